"""One root cause is told once, and told: no check is silent because another could speak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank as join_files,
)
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from conformance import Capabilities, Report, check
from conformance.subject import numbers_of
from tests.specimens import right
from tests.specimens.edits import drop, edited, renumber, value
from tests.specimens.packed import PacksExperts, packed
from tests.specimens.right import Right, State
from tests.specimens.specimen import BLIND, KEYED, TIED, TiedRight

FORGOTTEN = "model.extra.weight"
DROPS = edited(before_export=drop("^norm"))


def verdicts(report: Report) -> dict[str, str]:
    return {c.check: f"{c.verdict} {c.reason}".strip() for c in report.cells}


def test_a_key_that_is_missing_because_its_tensor_was_dropped_is_told_once() -> None:
    both = ["keys.total", "keys.exact"]
    report = check(right.subject("d", DROPS, **KEYED), checks=both)
    assert verdicts(report) == {"keys.total": "fail", "keys.exact": "blocked by keys.total"}
    alone = check(right.subject("d", DROPS, **KEYED), checks=both, without=["keys.total"])
    assert [f.keys for f in alone.findings] == [("model.norm.weight",)]


def test_keys_that_are_more_than_what_was_dropped_are_told_besides() -> None:
    files = right.files() | {FORGOTTEN: ((3, 5), "bfloat16")}
    report = check(right.subject("d", DROPS, listed=files), checks=["keys.total", "keys.exact"])
    assert verdicts(report) == {"keys.total": "fail", "keys.exact": "fail"}
    assert FORGOTTEN in report.findings[1].keys


def test_a_value_that_is_no_tensor_is_told_once() -> None:
    odd = right.subject("odd", edited(value(r"model\.norm", lambda v: None)), **BLIND)
    both = ["keys.leaves", "keys.total"]
    assert verdicts(check(odd, checks=both)) == {
        "keys.leaves": "fail",
        "keys.total": "blocked by keys.leaves",
    }
    assert check(odd, checks=both, without=["keys.leaves"]).findings


@pytest.mark.parametrize("listed", [right.files(), list(right.files())], ids=["shapes", "keys"])
def test_only_as_many_keys_as_a_tied_pair_has_names_may_be_unwritten(listed: Any) -> None:
    """The head is the duplicate; a key of a layer, and a second one, are not."""
    for more in ("lm_head_too.weight", "model.layers.0.extra.weight"):
        files = {**listed, more: ((13, 10), "bfloat16")} if isinstance(listed, dict) else listed
        names = files if isinstance(files, dict) else [*listed, more]
        report = check(
            right.subject("t", TiedRight, **TIED | {"listed": names}), checks=["keys.exact"]
        )
        assert [f.keys for f in report.findings] == [(more,)]


def test_an_alias_that_import_leaves_out_is_told_whatever_the_size() -> None:
    class NotFilled(TiedRight):
        def from_hf(self, hf_state_dict: State) -> State:
            out = super().from_hf(hf_state_dict)
            out.pop("head.weight", None)
            return out

    subject, both = right.subject("n", NotFilled, **TIED), ["keys.import", "values.tied"]
    assert verdicts(check(subject, checks=both)) == {
        "keys.import": "fail",
        "values.tied": "blocked by keys.import",
    }
    large = check(subject, checks=both, max_elements=100)
    assert large.cell("values.tied").verdict == "n/a"
    (finding,) = large.findings
    assert (finding.keys, finding.cause) == (
        ("head.weight",),
        "the alias is not filled from what it is tied to",
    )


def test_shapes_that_a_list_of_keys_does_not_give_are_those_of_the_reference() -> None:
    turned = edited(
        value("o_proj", lambda v: v.t().contiguous()),
        before_import=value("o_proj", lambda v: v.t()),
    )
    report = check(
        right.subject("keys", turned, listed=list(right.files())), checks=["shapes.exact"]
    )
    (finding,) = report.findings
    assert finding.oracle == "reference the right adapter"
    assert len(finding.keys) == right.LAYERS


class Four(Right):
    """Of a model of four layers and four experts; knows no other layer."""

    count = 4

    def to_hf(self, state_dict: State) -> State:
        if any(key.startswith("layers.") and numbers_of(key)[0] > 3 for key in state_dict):
            raise KeyError("no such layer")
        return super().to_hf(state_dict)


def small(adapter: Any, layers: int, experts: int) -> Report:
    subject = right.subject("small", adapter, **BLIND)
    return check(
        replace(subject, native=right.native(layers, experts)), checks=["keys.high-numbers"]
    )


def test_what_was_found_before_an_input_was_missing_is_found() -> None:
    back = renumber("^model.layers", 0, lambda i: 3 - i)
    report = small(edited(back, before_import=back, base=Four), 4, 4)
    assert report.findings[0].what == "layer numbers change their order on export"
    assert small(Four, 4, 4).cell("keys.high-numbers").verdict == "n/a"


def test_numbers_of_one_digit_are_said_to_show_nothing() -> None:
    class Twelve(Four):
        count = 12

    assert small(Right, 12, 12).notes == ()
    assert small(Right, 12, 1).notes == (
        "small: at most 1 expert: their numbers sorted as text would not show",
    )
    assert small(Twelve, 4, 12).notes == (
        "small: 4 layers: their numbers sorted as text would not show",
    )


def test_a_model_without_linear_weights_is_asked_nothing_about_lora() -> None:
    flat = {"norm.weight": ((10,), "float32")}
    subject = replace(right.subject("flat", Right, **BLIND), native=flat)
    assert verdicts(check(subject, checks=["keys.lora-refused"])) == {
        "keys.lora-refused": "n/a no key ends in .weight and has two dimensions"
    }


def test_a_number_of_a_file_as_text_is_called_text() -> None:
    class AsText(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            self.listed = {k: f"{v:05}" for k, v in self.listed.items()}

    (finding,) = check(right.subject("text", AsText, **BLIND), checks=["keys.index"]).findings
    key = finding.keys[0]
    assert finding.what.startswith("fqn_to_index_mapping gives the file numbers of ")
    assert finding.what.endswith(" keys as text")
    assert (finding.expected, finding.actual) == (f"{key}: 12", f"{key}: '00012'")
    assert finding.cause.endswith("joins the files of its ranks, and ends with a TypeError")


def _joined(folder: Path, files: dict[str, Any]) -> None:
    """A tensor of torch's writer, and its files joined, as torchtitan's save does both."""
    sharded = str(folder / "sharded")
    writer = HuggingFaceStorageWriter(sharded, fqn_to_index_mapping=files, save_distributed=True)
    dcp.save({"w.weight": torch.ones(3, 5)}, storage_writer=writer, no_dist=True)
    join_files(sharded, str(folder), fqn_to_index_mapping=files)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_said_of_wrong_maps_is_what_torch_makes_of_them(tmp_path: Path) -> None:
    scale = "w.weight_scale_inv"
    _joined(tmp_path, {"w.weight": 1, scale: 1})
    with pytest.raises(SafetensorError, match="invalid JSON in header"):
        safe_open(tmp_path / "model-00001-of-00001.safetensors", "pt")
    with pytest.raises(TypeError):
        _joined(tmp_path / "text", {"w.weight": "00001"})


class Bare:
    """A right adapter of the invented model, and nothing but two directions."""

    def __init__(self, hf_assets_path: str | None = None) -> None:
        self.to_hf, self.from_hf = Right().to_hf, Right().from_hf


def test_only_an_adapter_that_is_made_on_a_folder_is_asked_for_what_trainers_ask() -> None:
    asked = ["keys.index", "files.reader"]
    report = check(right.subject("bare", Bare, **BLIND), checks=asked)
    assert [f.actual for f in report.findings] == [
        "no such attribute",
        "no such attribute",
        "AttributeError",
    ]
    alone = check(right.subject("alone", lambda: Bare(), **BLIND), checks=asked)
    assert verdicts(alone) == {
        "keys.index": "n/a the subject's adapter factory takes no hf_assets_path",
        "files.reader": "n/a the adapter has no get_hf_storage_reader",
    }


class AsBlocks(PacksExperts):
    """As torchtitan's: asks for the values under the name of their codes, and transposes none."""

    def to_hf(self, state_dict: State) -> State:
        return {f"{key}_blocks": value for key, value in super().to_hf(state_dict).items()}

    def from_hf(self, hf_state_dict: State) -> State:
        return super().from_hf({k.removesuffix("_blocks"): v for k, v in hf_state_dict.items()})

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return self.quantized(path) if from_quantized else HuggingFaceStorageReader(path)

    quantized: type = QuantizedHuggingFaceStorageReader


class Whole(QuantizedHuggingFaceStorageReader):
    """torch's, whose chunks are those of the codes, with chunks of the values."""

    def read_metadata(self) -> Any:
        metadata = super().read_metadata()
        for entry in metadata.state_dict_metadata.values():
            (codes,) = entry.chunks
            entry.chunks = [replace(codes, sizes=entry.size)]
        return metadata


class AsWholeBlocks(AsBlocks):
    quantized = Whole


def test_experts_in_mxfp4_are_asked_for_by_their_own_name_or_by_that_of_their_blocks() -> None:
    report = check(packed(), checks=["keys.*", "files.*"])
    assert not report.findings, report.text()
    assert check(packed(AsWholeBlocks), checks=["files.quantized"]).counts["pass"] == 1


def test_torchs_reader_fills_as_many_columns_of_mxfp4_as_there_are_groups() -> None:
    (finding,) = check(packed(AsBlocks), checks=["files.quantized"]).findings
    assert finding.what.endswith("leaves a part of weights as it was where experts are in mxfp4")
    assert (finding.coordinate, finding.actual) == ("[0, 0, 4]", "nan")
    assert finding.cause.startswith("its metadata has other sizes than what it gives")


def test_declared_extras_and_spellings_give_the_same_model() -> None:
    copy = "model.layers.12.embed_tokens.weight"

    class Leaves(Right):
        def from_hf(self, hf_state_dict: State) -> State:
            out = super().from_hf({k: v for k, v in hf_state_dict.items() if k != copy})
            return {k: v for k, v in out.items() if copy not in hf_state_dict or k != "norm.weight"}

    may = Capabilities(hf_only={copy: "a copy"})
    subject = right.subject("gone", Leaves, **BLIND | {"capabilities": may})
    (finding,) = check(subject, checks=["keys.hf-only"]).findings
    assert finding.keys == (copy, "norm.weight")
    assert finding.actual == "norm.weight left out or made otherwise"
