"""What the gate says of code that fails in ways of its own: which fault, whose, and where."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch

from conformance import Capabilities, Subject, check
from conformance.compare import explain
from conformance.contract import select
from conformance.fingerprint import Positions
from conformance.raised import told
from conformance.template import Leaf
from tests.specimens import right
from tests.specimens.edits import edited, value
from tests.specimens.readers import PlainForQuantized
from tests.specimens.right import Right, State
from tests.specimens.specimen import BLIND, HEAD, TiedRight
from tests.specimens.values import ThroughNumpy
from torchtitan_ckpt.errors import ConfigError


def said(adapter: Any, *checks: str, **options: Any) -> Any:
    return check(right.subject("one", adapter, **{**BLIND, **options}), checks=checks)


class Yields(Right):
    def to_hf(self, state_dict: State) -> Any:
        yield from super().to_hf(state_dict).items()


def test_what_is_returned_in_place_of_a_dict_is_told_once_and_not_as_raised() -> None:
    report = said(Yields, "keys.leaves", "keys.total", "files.reread")
    assert [f.what for f in report.findings] == ["to_hf returned a generator, not a dict"]
    assert report.cell("files.reread").verdict == "blocked"


class KeepsMeta(Right):
    kept: ClassVar[State] = {}

    def to_hf(self, state_dict: State) -> State:
        return {**super().to_hf(state_dict), **self._once(super().to_hf(state_dict))}

    @classmethod
    def _once(cls, out: State) -> State:
        cls.kept = cls.kept or out
        return {k: v for k, v in cls.kept.items() if k in out}


def test_tensors_kept_from_the_gates_own_tracing_are_the_adapters_fault() -> None:
    report = said(KeepsMeta, "values.provenance", "purity.*")
    assert "error" not in {c.verdict for c in report.cells}
    assert report.cell("purity.stateless").verdict == "fail"
    assert report.cell("values.provenance").reason == "by purity.stateless"


def test_a_reference_gets_files_of_its_own_shapes() -> None:
    """What the adapter writes in another shape is for `shapes.exact` to say."""
    flat = edited(value("q_proj", lambda v: v.reshape(-1)[:-6]))
    report = said(flat, "values.pinned-import", referenced=True)
    assert report.cell("values.pinned-import").verdict == "pass", report.text()


def test_a_native_model_of_bare_shapes_is_refused() -> None:
    shapes = {key: list(shape) for key, (shape, _) in right.native().items()}
    report = check(Subject("one", Right, shapes), checks=["keys.total"])
    assert report.exit_code == 1
    assert "(shape, dtype)" in report.text()


def test_a_config_of_another_model_says_what_else_can_be_named() -> None:
    subject = Subject("one", Right, right.native(), hf={"model_type": "mixtral"})
    report = check(subject, checks=["keys.exact"])
    assert report.exit_code == 1
    assert re.search(r"(?s)no family.*mixtral.*a list of its keys", report.text())


def test_an_adapter_in_place_of_its_factory() -> None:
    (finding,) = said(Right(), "keys.leaves").findings
    assert "is a Right, which cannot be called" in finding.what
    assert finding.remedy.startswith("adapter=lambda")


def test_a_level_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="no level 9"):
        select(level=9)


def test_errors_are_one_line_with_a_place_in_the_subjects_code() -> None:
    try:
        torch.zeros(3).view(2)
    except RuntimeError as error:
        words = told(type(error)("a\n\n  b " * 200).with_traceback(error.__traceback__))
    assert "\n" not in words
    assert len(words) < 300
    assert " at test_said.py:" in words


def test_a_round_trip_that_exchanges_two_tensors_says_so() -> None:
    """Their values differ, so that it looks like lost precision."""

    def exchange(state: State) -> State:
        a, b = "layers.3.attn.q_norm.weight", "layers.3.attn.k_norm.weight"
        return {**state, a: state[b], b: state[a]} if a in state and b in state else state

    cell = said(edited(None, exchange), "values.native-round-trip").cells[0]
    (finding,) = cell.findings
    assert finding.cause == "names are swapped in one of the directions"
    assert finding.actual.startswith("made from layers.3.attn.k_norm.weight, which to_hf writes as")
    lost = edited(None, value("norm", lambda v: v.to(torch.bfloat16).to(v.dtype)))
    cell = said(lost, "values.native-round-trip").cells[0]
    assert {f.cause for f in cell.findings} == {"precision or a bit is lost"}


def test_random_values_are_not_told_as_state_or_order() -> None:
    shaky = edited(None, value(r"^norm", lambda v: v + torch.rand(v.shape).to(v)))
    options = {"capabilities": Capabilities(lossy={"norm.weight": "noise"})}
    report = said(shaky, "purity.repeat", "purity.order", **options)
    assert report.findings
    assert all(f.cause.startswith("no two calls agree") for f in report.findings)


def test_a_layer_that_a_loop_leaves_out_is_not_told_as_a_name() -> None:
    def but_first(state: State) -> State:
        return {k: v for k, v in state.items() if not k.startswith("layers.0.")}

    (finding,) = said(edited(before_export=but_first), "keys.total").findings
    assert finding.cause.startswith("layers.{1..11}.attn.wq.weight is written")


def test_values_that_leave_torch_are_not_told_as_dropped() -> None:
    assert said(ThroughNumpy, "keys.total", "keys.partial").ok


def test_values_of_another_place_are_not_told_as_dropped() -> None:
    def elsewhere(state: State) -> State:
        return {k: torch.ones(v.shape, dtype=v.dtype) for k, v in state.items()}

    (finding,) = said(edited(elsewhere), "keys.total").findings
    assert finding.what.startswith("none of 164 tensors")
    assert "another place" in finding.cause


class DtypeMatters(Right):
    def to_hf(self, state_dict: State) -> State:
        half = any(v.dtype == torch.bfloat16 for v in state_dict.values())
        out = super().to_hf(state_dict)
        return {k: v.flip(0) if half and k == "model.norm.weight" else v for k, v in out.items()}


def test_a_drawn_case_gives_the_cause_that_it_shows() -> None:
    report = said(DtypeMatters, "values.drawn", referenced=True)
    causes = {f.cause for f in report.findings}
    assert causes == {"the conversion depends on the dtype"}, report.text()


class NoHalf(Right):
    def to_hf(self, state_dict: State) -> State:
        if odd := [k for k, v in state_dict.items() if v.dtype == torch.float16]:
            raise TypeError(f"{odd[0]}: float16 is not trained with here")
        return super().to_hf(state_dict)


def test_a_dtype_that_is_refused_is_told_with_what_was_given() -> None:
    (finding,) = said(NoHalf, "dtypes.policy").findings
    assert finding.what == "to_hf refuses a model of several dtypes"
    assert finding.keys[0] in finding.actual


def test_the_index_of_a_tied_model_is_not_given_native_names() -> None:
    """Files hold no `head.weight`; without a list, the head that published indexes list."""

    class Passes(TiedRight):
        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            self.fqn_to_index_mapping = dict(self.listed) or None
            return out

    may = {"capabilities": Capabilities(tied={"head.weight": "tok.weight"}, partial=False)}
    listed = {k: v for k, v in right.files().items() if k != HEAD}
    assert said(Passes, "keys.index", listed=listed, **may).ok
    (finding,) = said(Passes, "keys.index", **may).findings
    assert finding.keys == (HEAD,)


@pytest.mark.parametrize("keys_only", [False, True])
def test_scales_of_quantized_files_are_nothing_to_an_adapter(keys_only: bool) -> None:
    """Its reader takes them: `from_hf` sees values, and may refuse a scale as any other key."""
    files = right.files()
    for key, (shape, _) in list(files.items()):
        if key.endswith("o_proj.weight"):
            files[key] = (shape, "float8_e4m3fn")
            files[f"{key}_scale_inv"] = ((1, 1), "float32")
    listed = list(files) if keys_only else files
    report = said(Right, "keys.exact", "keys.index", "shapes.exact", listed=listed)
    assert not report.findings, report.text()
    plain = said(PlainForQuantized, "files.quantized", listed=listed, capabilities=Capabilities())
    assert [f.what for f in plain.findings] == ["the quantized reader loads codes as weights"]


def test_without_a_second_implementation_the_report_says_what_it_cannot_see() -> None:
    note = "no second implementation is named"
    assert any(note in n for n in said(Right, "values.provenance").notes)
    assert not any(note in n for n in said(Right, "values.provenance", referenced=True).notes)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((6, 3, 8), "blocks of 8 regrouped: 3 groups of 6 taken for 6 of 3"),
        ((1, 1, 144), "shifted"),
    ],
)
def test_blocks_that_are_grouped_otherwise(order: tuple[int, int, int], words: str) -> None:
    groups, each, block = order
    positions = Positions({"w": Leaf((144, 5), "float32")})
    have = positions.numbers("w")
    want = have.view(groups, each, block, 5).transpose(0, 1).reshape(144, 5)
    if want.equal(have):
        want = have.roll(1, 0)
    assert words in explain(positions, want, have).cause
