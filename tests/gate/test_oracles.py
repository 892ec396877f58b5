"""What the shipped subjects are measured against: never their own tables alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance import Report, check
from conformance.subjects import names, resolve
from conformance.subjects.configs import CONFIGS
from conformance.subjects.families import FamilyReference
from conformance.subjects.published import names as published_names
from conformance.subjects.published import tensors
from conformance.subjects.written import written
from torchtitan_ckpt.adapter import MappingAdapter
from torchtitan_ckpt.families import get

WRITTEN = ("deepseek_v32", "deepseek_v4", "gpt_oss")


@pytest.mark.needs_titan
@pytest.mark.parametrize("name", names())
def test_every_shipped_subject_has_a_second_source(name: str) -> None:
    pytest.importorskip("torchtitan", reason="wants the extra 'titan'")
    subject = resolve(name)
    assert subject.reference is not None
    assert not isinstance(subject.reference, FamilyReference)
    assert subject.notes == ()


def _swapped(name: str, first: str, second: str) -> Any:
    """The adapter of a table in which two rows have each other's native names, both ways."""
    family = get(name)
    rows = {row.hf: row for row in family.rows}
    assert {first, second} <= rows.keys()
    a, b = rows[first], rows[second]
    new = {
        first: replace(a, titan=b.titan, npu=b.npu),
        second: replace(b, titan=a.titan, npu=a.npu),
    }
    table = replace(family, rows=tuple(new.get(row.hf, row) for row in family.rows))
    return lambda hf_assets_path=None: MappingAdapter(CONFIGS[name], hf_assets_path, family=table)


SWAPS = {
    "deepseek_v32": ("input_layernorm.weight", "post_attention_layernorm.weight"),
    "deepseek_v4": ("attn_norm.weight", "ffn_norm.weight"),
    "gpt_oss": ("input_layernorm.weight", "post_attention_layernorm.weight"),
    "qwen3": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
}


def _named(name: str, short: str) -> str:
    return next(row.hf for row in get(name).rows if row.hf and row.hf.endswith(short))


def _judged(name: str, *globs: str) -> Report:
    swap = [_named(name, short) for short in SWAPS[name]]
    return check(replace(resolve(name), adapter=_swapped(name, *swap)), checks=globs)


@pytest.mark.parametrize("name", WRITTEN)
def test_names_swapped_both_ways_are_caught_by_what_was_written_apart(name: str) -> None:
    """Keys, shapes and round trips are all right; only the other list knows."""
    report = _judged(name, "keys.exact", "values.pinned-*", "values.native-round-trip")
    verdicts = {cell.check: cell.verdict for cell in report.cells}
    assert verdicts["keys.exact"] == "pass"
    assert verdicts["values.pinned-export"] == verdicts["values.pinned-import"] == "fail"
    assert "fixtures/published/mapping.json" in report.text()
    assert "swapped" in report.text()


@pytest.mark.parametrize("name", WRITTEN)
def test_the_written_list_inverts(name: str) -> None:
    """Each direction is written by itself; they agree about every element."""
    adapter = MappingAdapter(CONFIGS[name])
    reference = written(name, CONFIGS[name], adapter.generation)
    assert reference is not None
    shapes = {key: leaf.shape for key, leaf in resolve(name).native.items()}
    state = {key: torch.rand(shape) for key, shape in shapes.items()}
    files = reference.to_hf(state)
    back = reference.from_hf(files)
    assert len(back) > 150
    assert all(torch.equal(back[key], state[key]) for key in back)
    assert {key for key in state if key not in back} == {
        key for key in state if key.endswith("expert_bias_E") and name == "gpt_oss"
    }


@pytest.mark.needs_hf
def test_a_forward_pass_sees_norms_swapped_both_ways() -> None:
    pytest.importorskip("transformers", reason="wants the extra 'hf'")
    report = _judged("qwen3", "forward.logits")
    assert report.cell("forward.logits").verdict == "fail"
    assert "Qwen3ForCausalLM" in report.text()


@pytest.mark.needs_hf
@pytest.mark.needs_titan
@pytest.mark.parametrize("name", sorted(set(names()) - {"deepseek_v4"}))
def test_the_right_table_computes_what_transformers_computes(name: str) -> None:
    pytest.importorskip("transformers", reason="wants the extra 'hf'")
    pytest.importorskip("triton", reason="wants the extra 'titan'")
    report = check(name, checks=["forward.logits"])
    assert report.cells[0].verdict == "pass", report.text()


@pytest.mark.needs_hf
@pytest.mark.needs_titan
@pytest.mark.parametrize(
    "model", ["llama3/debugmodel", "qwen3/debugmodel", "deepseek_v3/debugmodel?mtp=1"]
)
def test_torchtitans_adapters_compute_what_transformers_computes(model: str) -> None:
    pytest.importorskip("transformers", reason="wants the extra 'hf'")
    pytest.importorskip("triton", reason="wants the extra 'titan'")
    report = check(f"titan:{model}", checks=["forward.logits"])
    assert report.cells[0].verdict == "pass", report.text()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v4", "neither torchtitan nor the reference job has a model of deepseek_v4"),
        ("published:Qwen3-0.6B", "752M elements; models run with up to 48M"),
    ],
)
def test_a_forward_pass_that_cannot_run_says_why(name: str, reason: str) -> None:
    report = check(name, checks=["forward.logits"])
    assert (report.cells[0].verdict, report.cells[0].reason) == ("n/a", reason)


def test_without_the_other_libraries_a_forward_pass_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from conformance.subjects import forward, forward_titan

    for module, lacks, reason in (
        (forward_titan, "triton", "triton not installed"),
        (forward, "transformers", "transformers not installed"),
    ):
        monkeypatch.setattr(module, "find_spec", lambda name, lacks=lacks: name != lacks or None)
        assert check("llama3", checks=["forward.logits"]).cells[0].reason == reason


QUICK = ("Qwen3-0.6B", "gpt-oss-20b")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in published_names()],
)
def test_published_files_at_full_size(name: str) -> None:
    """Keys and shapes are those of the hub's files, to the last expert."""
    checks = ["keys.exact", "shapes.exact", "keys.total", "keys.hf-only"]
    report = check(f"published:{name}", checks=checks)
    assert report.ok, report.text()
    assert report.counts["pass"] >= 3


def test_a_published_file_that_lacks_a_key_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance.subjects import published

    full = tensors("Qwen3-0.6B")
    less = {k: v for k, v in full.items() if k != "model.layers.11.self_attn.q_norm.weight"}
    monkeypatch.setattr(published, "tensors", lambda _: less)
    report = check("published:Qwen3-0.6B", checks=["keys.exact"])
    assert report.exit_code == 1
    assert "model.layers.11.self_attn.q_norm.weight" in report.text()
    assert "the published files of Qwen3-0.6B" in report.text()
