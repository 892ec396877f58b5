"""torchtitan 0.3.0's own adapters, unchanged: right where they are right, told where they are not.

The table of the documentation states the same; a finding that appears or goes away shows here.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from conformance import Report, check
from conformance.subjects import resolve, titan
from torchtitan_ckpt.errors import NotFoundError

pytest.importorskip("torchtitan", reason="wants the extra 'titan'")

from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

pytestmark = pytest.mark.needs_titan

UNKNOWN = {"keys.unknown-refused", "keys.lora-refused"}
DEEPSEEK = {"keys.half-group", "keys.index", "values.dtensor", "files.quantized"}
FOUND: dict[str, set[str]] = {
    "titan:llama3/debugmodel": {*UNKNOWN, "reshard.convert"},
    "titan:qwen3/debugmodel": {*UNKNOWN, "purity.input-unchanged"},
    "titan:qwen3/debugmodel_moe": {*UNKNOWN, "keys.half-group", "values.dtensor"},
    "titan:deepseek_v3/debugmodel": DEEPSEEK,
    "titan:deepseek_v3/debugmodel?mtp=1": {*DEEPSEEK, "keys.unknown-refused"},
    "titan:kimi_k2_7/debugmodel": {"keys.half-group", "values.dtensor"},
    "titan:muse_glimmer/debugmodel": UNKNOWN,
    "titan:muse_glimmer/debugmodel_mm": UNKNOWN,
    "titan:flux": {*UNKNOWN, "keys.index"},
    "titan:gpt_oss/debugmodel": {"keys.total", "keys.index", "files.quantized", *UNKNOWN},
}


def failed(report: Report) -> set[str]:
    return {cell.check for cell in report.cells if cell.bad}


@pytest.mark.parametrize("name", FOUND)
def test_keys_and_shapes(name: str) -> None:
    report = check(name, level=1)
    assert failed(report) == {c for c in FOUND[name] if c.startswith(("keys", "shapes", "dtypes"))}
    assert report.counts["error"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_everything(name: str) -> None:
    report = check(name)
    assert failed(report) == FOUND[name], report.text()


def test_llama_in_full() -> None:
    report = check("titan:llama3/debugmodel", level=4)
    assert failed(report) == UNKNOWN, report.text()
    assert report.cell("values.pinned-export").verdict == "pass"
    assert report.cell("values.pinned-import").verdict == "pass"


def test_gpt_oss_loses_its_experts_and_the_cause_is_named() -> None:
    report = check("titan:gpt_oss/debugmodel", checks=["keys.total"])
    (finding,) = report.findings
    assert finding.what == "to_hf dropped 16 of 75 native tensors"
    assert "nearest: layers.{}.moe.routed_experts.inner_experts.mlp1_weight" in finding.cause
    assert "layers.{0..3}.moe.routed_experts.inner_experts.mlp1_weight_EGD" in report.text()


def test_the_callers_dict_is_changed_by_tied_qwen3() -> None:
    report = check("titan:qwen3/debugmodel", checks=["purity.input-unchanged"])
    (finding,) = report.findings
    assert finding.keys == ("lm_head.weight",)
    assert finding.actual == "added to the caller's dict"


def test_replicated_experts_are_refused_by_name() -> None:
    report = check("titan:deepseek_v3/debugmodel", checks=["values.dtensor"])
    (finding,) = report.findings
    assert finding.keys == ("layers.1.moe.routed_experts.inner_experts.w1_EFD",)
    assert "'Replicate' object has no attribute 'dim'" in finding.actual


@pytest.mark.parametrize("model", ["deepseek_v3", "gpt_oss"])
def test_scales_that_torchs_reader_does_not_know(model: str) -> None:
    """Whole and sliced, it is right on published files, and refuses a scale without dimensions."""
    report = check(f"titan:{model}", checks=["files.quantized"])
    what, where = zip(*(f.what.split(" where ") for f in report.findings), strict=True)
    assert where == (
        "files hold no scale",
        "the scale is named .scale",
        "scales are exponents (uint8)",
    )
    assert what[:2] == ("the quantized reader loads codes as weights",) * 2
    assert report.findings[2].actual == "1.953125"


@pytest.mark.parametrize(
    ("model", "number", "more"),
    [
        ("deepseek_v3/debugmodel", 162, ()),
        ("deepseek_v3/debugmodel?mtp=1", 195, ("embed_tokens.weight", "shared_head.head.weight")),
    ],
)
def test_the_map_keeps_what_published_files_hold_and_nothing_writes(
    model: str, number: int, more: tuple[str, ...]
) -> None:
    (finding,) = check(f"titan:{model}", checks=["keys.index"]).findings
    assert finding.what == f"fqn_to_index_mapping lists {number} keys that to_hf does not write"
    others = [key for key in finding.keys if not key.endswith(".weight_scale_inv")]
    assert tuple(key.split(".", 3)[3] for key in others) == more


def test_the_map_of_flux_holds_text() -> None:
    (finding,) = check("titan:flux/flux-debug", checks=["keys.index"]).findings
    assert finding.what == "fqn_to_index_mapping gives the file numbers of 108 keys as text"


def test_heads_that_the_shards_do_not_divide_are_refused_by_llama() -> None:
    report = check("titan:llama3/debugmodel", checks=["reshard.convert"], degrees=["fsdp3"])
    (finding,) = report.findings
    assert finding.keys == ("layers.0.attention.qkv_linear.wq.weight",)
    assert (finding.what, finding.coordinate) == (
        "to_hf raises where the model is split",
        "fsdp3",
    )
    assert "Cannot unflatten unevenly sharded tensor" in finding.actual


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3/debugmodel", "qwen3/debugmodel_moe", "deepseek_v3"])
def test_every_even_split_is_right(name: str) -> None:
    """Experts that are written by the ranks that hold them, as torchtitan's are."""
    even = ("fsdp2", "tp2", "fsdp2 x tp2", "fsdp2 x ep2")
    report = check(
        f"titan:{name}", checks=["reshard.[scp]*"], degrees=even, without=["values.dtensor"]
    )
    assert [c.verdict for c in report.cells] == ["pass"] * 3, report.text()


@pytest.mark.parametrize("number", [2, 13])
def test_a_search_may_draw_other_numbers_of_layers(number: int) -> None:
    found = resolve("titan:llama3/debugmodel")
    assert found.sizes == {"layers": (2, 3, 13)}
    assert found.resized is not None
    other = found.resized(layers=number)
    assert {_layer(k) for k in other.native} == {-1, *range(number)}
    assert resolve("titan:llama3/8B").sizes == {}


def _layer(key: str) -> int:
    return int(key.split(".")[1]) if key.startswith("layers.") else -1


def test_a_model_that_cannot_be_imported_says_what_is_to_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(name: str) -> None:
        raise ModuleNotFoundError("No module named 'fla'", name="fla")

    monkeypatch.setattr(titan.importlib, "import_module", fails)
    with pytest.raises(NotFoundError, match="install the package that provides 'fla'"):
        resolve("titan:llama3/debugmodel")


class SixLayers(Llama3StateDictAdapter):
    """Right for the model that it was written for."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return super().to_hf({k: v for k, v in state_dict.items() if _layer(k) < 6})


@pytest.mark.slow
def test_an_adapter_of_six_layers_is_found_out_by_a_model_of_more() -> None:
    spec = copy.copy(titan._spec("llama3", "llama3", "debugmodel", {}))
    spec.state_dict_adapter = SixLayers
    report = check(titan.of_spec("six-layers", spec), checks=["values.drawn"])
    assert report.findings
    assert report.findings[0].example.startswith("layers=13")
    assert report.findings[0].keys[0].startswith("layers.")


@pytest.mark.slow
def test_a_model_of_671_billion_parameters_on_meta_tensors() -> None:
    report = check("titan:deepseek_v3/671B?mtp=1", level=1)
    assert failed(report) == {"keys.half-group", "keys.index", "keys.unknown-refused"}
    values = check("titan:deepseek_v3/671B", checks=["values.provenance"])
    assert "values are checked on up to 48M" in values.cells[0].reason
    assert values.exit_code == 5
