"""What is told from what tensors are made from: layers whose values are not checked, and causes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from conformance import Capabilities, Subject, check
from conformance.checks.keys_groups import layers
from conformance.checks.values_flow import dtensor
from conformance.lab import Lab
from conformance.layers import part_of
from conformance.template import Leaf
from conformance.verdict import Finding
from tests.specimens import right
from tests.specimens.edits import edited, value
from tests.specimens.right import Right, State
from tests.specimens.specimen import BLIND

MODEL = {f"layers.{i}.w": Leaf((2, 5), "float32") for i in range(30)} | {
    "norm": Leaf((7,), "float32")
}


def test_values_are_checked_on_the_whole_model_up_to_the_limit() -> None:
    size = sum(leaf.numel for leaf in MODEL.values())
    assert part_of(MODEL, most=size).leaves == MODEL
    assert len(part_of(MODEL, most=size - 1).leaves) < len(MODEL)


def test_of_a_larger_model_the_seed_draws_a_layer_between_the_first_and_the_last() -> None:
    drawn = {tuple(part_of(MODEL, most=100, seed=seed).leaves) for seed in range(9)}
    assert len(drawn) > 3
    for part in drawn:
        assert {"layers.0.w", "layers.29.w", "norm"} < set(part)
        assert len(part) == 4
    assert part_of(MODEL, most=100, seed=5) == part_of(MODEL, most=100, seed=5)
    # Where there is no room for it, the ends; then the first alone.
    assert set(part_of(MODEL, most=27).leaves) == {"layers.0.w", "layers.29.w", "norm"}
    assert set(part_of(MODEL, most=17).leaves) == {"layers.0.w", "norm"}
    assert part_of(MODEL, most=16).refused


def test_rows_that_are_rolled_in_a_middle_layer_show() -> None:
    rolled = edited(value(r"layers\.7.*o_proj", lambda v: v.roll(1, 0)))
    (finding,) = check(right.subject("rolled", rolled), checks=["values.pinned-export"]).findings
    assert finding.keys == ("model.layers.7.self_attn.o_proj.weight",)


def relabelled(names: Iterable[tuple[str, str]], hf: Any = None) -> Subject:
    """An adapter that gives tensors other names."""
    there = dict(names)
    back = {new: old for old, new in there.items()}

    class Relabels:
        def to_hf(self, state_dict: State) -> State:
            return {there[k]: v for k, v in state_dict.items()}

        def from_hf(self, hf_state_dict: State) -> State:
            return {back[k]: v for k, v in hf_state_dict.items()}

    native = dict.fromkeys(there, ((3, 5), "float32"))
    return Subject(name="relabelled", adapter=Relabels, native=native, hf=hf)


def hybrid(i: int, *, mlp: int = 1) -> list[tuple[str, str]]:
    """One layer of the model is two of the files, after one that has no like."""
    return [
        (f"layers.{i}.attn.weight", f"backbone.{2 * i + 1}.mixer.weight"),
        (f"layers.{i}.attn_norm.weight", f"backbone.{2 * i + 1}.norm.weight"),
        (f"layers.{i}.mlp.weight", f"backbone.{2 * i + 1 + mlp}.mixer.weight"),
        (f"layers.{i}.mlp_norm.weight", f"backbone.{2 * i + 1 + mlp}.norm.weight"),
    ]


def test_one_layer_may_be_two_of_the_files() -> None:
    assert list(layers(Lab(relabelled(n for i in range(12) for n in hybrid(i)), seed=1))) == []


def test_a_layer_that_deviates_from_the_others_fails() -> None:
    names = [n for i in range(12) for n in hybrid(i, mlp=25 if i == 5 else 1)]
    (finding, _) = layers(Lab(relabelled(names), seed=1))
    assert finding.keys == ("backbone.36.mixer.weight",)
    assert "backbone.11 to 12 like the rest of layers.5" in finding.expected


class EveryOther(Right):
    """Instances take turns: what one writes first the next writes last."""

    made = 0

    def __init__(self, hf_assets_path: str | None = None) -> None:
        super().__init__(hf_assets_path)
        EveryOther.made += 1
        self.turned = EveryOther.made % 2 == 0

    def export_experts(self, prefix: str, part: str, value: Any) -> State:
        return super().export_experts(prefix, part, value.flip(0) if self.turned else value)


def test_numbers_that_change_from_call_to_call_are_told_by_purity_alone() -> None:
    checks = ["values.pinned-export", "values.provenance", "purity.stateless"]
    report = check(right.subject("turns", EveryOther), checks=checks)
    assert report.cell("purity.stateless").verdict == "fail"
    for one in checks[:2]:
        cell = report.cell(one)
        assert (cell.verdict, cell.reason) == ("blocked", "by purity.stateless")


def test_a_name_of_a_config_is_no_native_name() -> None:
    class Configured(Right):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"tok_weight": True}

        def to_hf(self, state_dict: State) -> State:
            return super().to_hf({k: v for k, v in state_dict.items() if k != "tok.weight"})

    (finding,) = check(right.subject("x", Configured, **BLIND), checks=["keys.total"]).findings
    assert finding.cause == "no rule matches"


def test_a_tied_name_that_takes_the_place_of_the_other_is_named() -> None:
    def alias(state: State) -> State:
        return {**state, "tok.weight": state["head.weight"]} if "head.weight" in state else state

    ties = Capabilities(tied={"head.weight": "tok.weight"}, partial=False)
    subject = right.subject("x", edited(before_export=alias), capabilities=ties, **BLIND)
    finding, *_ = check(subject, checks=["keys.total"]).findings
    assert finding.keys == ("tok.weight",)
    assert finding.cause.startswith("head.weight, which it is tied to")


@pytest.mark.parametrize("direction", ["to_hf", "from_hf"])
def test_the_tensor_that_dtensors_are_refused_for_is_named(direction: str) -> None:
    def plain(v: Any) -> Any:
        if not right.is_plain(v):
            raise RuntimeError("a plain tensor is wanted")
        return v

    refuses = value(r"experts\.|moe\.w2", plain)
    edit = {"before_export" if direction == "to_hf" else "before_import": refuses}
    subject = right.subject("x", edited(**edit), **BLIND)
    found: list[Finding] = list(dtensor(Lab(subject, seed=1)))
    assert found
    for finding in found:
        assert finding.keys[0] == (
            "layers.1.moe.w2" if direction == "to_hf" else "layers.1.moe.w13"
        )
        assert direction == "to_hf" or "experts" in finding.keys[1]
