"""No false alarm: what right adapters of real projects do passes, each habit by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from conformance import Capabilities, Report, Subject, check
from conformance.subject import template_of
from tests.specimens import right
from tests.specimens.edits import edited, looked_at, value
from tests.specimens.right import Right, State
from tests.specimens.specimen import BLIND, TiedRight


def clean(subject: Subject) -> Report:
    report = check(subject, level=4)
    assert report.ok, report.text()
    assert report.counts["pass"] >= 20
    return report


def test_the_right_adapter_passes_everything_that_it_supplies_inputs_for() -> None:
    report = clean(right.subject(sizes=right.SIZES))
    assert {c.check for c in report.cells if c.verdict == "n/a"} == {
        "keys.hf-only",
        "keys.also-reads",
        "values.tied",
        "forward.logits",
    }
    assert report.counts["fail"] == report.counts["blocked"] == report.counts["error"] == 0


def test_verdicts_are_the_same_with_the_same_seed_and_the_seed_is_printed() -> None:
    one, two = (check(right.subject(), level=2, seed=7) for _ in range(2))
    assert [(c.id, c.verdict, c.findings) for c in one.cells] == [
        (c.id, c.verdict, c.findings) for c in two.cells
    ]
    assert "seed 7" in one.text()


class Empties(Right):
    """Frees memory: takes each entry out of the argument while it converts."""

    def to_hf(self, state_dict: State) -> State:
        out = super().to_hf(state_dict)
        state_dict.clear()
        return out

    def from_hf(self, hf_state_dict: State) -> State:
        out = super().from_hf(hf_state_dict)
        hf_state_dict.clear()
        return out


class PassesOn(Right):
    """Unknown keys come out under their own names."""

    def to_hf(self, state_dict: State) -> State:
        known, odd = self.parted(state_dict, right.native())
        return {**super().to_hf(known), **odd}

    def from_hf(self, hf_state_dict: State) -> State:
        known, odd = self.parted(hf_state_dict, right.files())
        return {**super().from_hf(known), **odd}

    @staticmethod
    def parted(state: State, listed: Iterable[str]) -> tuple[State, State]:
        names = {template_of(key) for key in listed}
        known = {k: v for k, v in state.items() if template_of(k) in names}
        return known, {k: v for k, v in state.items() if k not in known}


class Replicates(Right):
    """DTensors come back replicated, with right values."""

    def from_hf(self, hf_state_dict: State) -> State:
        out = super().from_hf(hf_state_dict)
        return {
            k: v.redistribute(v.device_mesh, [Replicate()] * v.device_mesh.ndim)
            if isinstance(v, DTensor)
            else v
            for k, v in out.items()
        }


class BothHeads(TiedRight):
    """Writes both keys of a tied pair."""

    def to_hf(self, state_dict: State) -> State:
        return Right.to_hf(self, state_dict)


class RefusesParts(Right):
    def to_hf(self, state_dict: State) -> State:
        if not {"tok.weight", "head.weight"} <= state_dict.keys():
            raise ValueError("tied weights do not go with pipelines")
        return super().to_hf(state_dict)


class WithoutBias(Right):
    """Keeps the load-balancing bias to itself."""

    def to_hf(self, state_dict: State) -> State:
        return super().to_hf({k: v for k, v in state_dict.items() if "moe.bias" not in k})


class Looks(Right):
    """Looks at values, as to see whether two names are tied: meta tensors have none."""

    def to_hf(self, state_dict: State) -> State:
        looked_at(state_dict)
        return super().to_hf(state_dict)

    def from_hf(self, hf_state_dict: State) -> State:
        looked_at(hf_state_dict)
        return super().from_hf(hf_state_dict)


class InThreads(Right):
    """Converts each tensor in a thread, where nothing sees torch's operations."""

    def to_hf(self, state_dict: State) -> State:
        biases = {k: v for k, v in state_dict.items() if k.endswith(("bq", "bk"))}
        parts = [biases, *({k: v} for k, v in state_dict.items() if k not in biases)]
        with ThreadPoolExecutor(2) as pool:
            # An adapter a part: each keeps the map of the files of what it has converted.
            found = pool.map(lambda part: Right().to_hf(part), parts)
            return {key: tensor for part in found for key, tensor in part.items()}


class OnAccess(Mapping[str, Any]):
    """A mapping that makes each tensor when it is asked for it."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __getitem__(self, key: str) -> Any:
        return self.state[key].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


class Lazy(Right):
    def to_hf(self, state_dict: State) -> Any:
        return OnAccess(super().to_hf(state_dict))


def terse(error: str) -> type:
    """Refuses with a message that names nothing."""

    class Terse(Right):
        def to_hf(self, state_dict: State) -> State:
            try:
                return super().to_hf(state_dict)
            except (KeyError, ValueError) as cause:
                raise RuntimeError(error) from cause

    return Terse


bf16_norms = edited(
    value("q_norm", lambda v: v.bfloat16()), before_import=value("q_norm", lambda v: v.float())
)
one_plus = edited(
    value(r"model\.norm", lambda v: v + 1.0), before_import=value(r"model\.norm", lambda v: v - 1.0)
)
strided = edited(value("down_proj", lambda v: v.t().contiguous().t()))
TIES = {"head.weight": "tok.weight"}


@pytest.mark.parametrize(
    ("adapter", "capabilities"),
    [
        (Empties, Capabilities(consumes_input=True)),
        (PassesOn, Capabilities()),
        (Replicates, Capabilities()),
        (strided, Capabilities()),
        (TiedRight, Capabilities(tied=TIES, partial=False)),
        (BothHeads, Capabilities(tied=TIES, partial=False)),
        (RefusesParts, Capabilities(partial=False)),
        (WithoutBias, Capabilities(native_only={"*.moe.bias": "the files have none"})),
        (one_plus, Capabilities(lossy={"*norm.weight": "stored as 1 + w"})),
        (terse("no"), Capabilities()),
        (Looks, Capabilities()),
        (InThreads, Capabilities()),
        (Lazy, Capabilities()),
    ],
    ids=[
        "empties-its-argument",
        "passes-unknown-keys-on",
        "placement-changes",
        "strided-outputs",
        "tied-once",
        "tied-twice",
        "refuses-parts",
        "native-only",
        "declared-arithmetic",
        "terse-errors",
        "looks-at-values",
        "converts-in-threads",
        "computes-on-access",
    ],
)
def test_declared_habits_of_right_adapters_pass(adapter: Any, capabilities: Capabilities) -> None:
    clean(right.subject("habit", adapter, capabilities=capabilities, **BLIND))


@pytest.mark.parametrize("shapes", [True, False], ids=["shapes", "keys-only"])
@pytest.mark.parametrize("adapter", [TiedRight, BothHeads])
def test_a_file_may_hold_the_duplicate_of_a_tied_pair(adapter: Any, shapes: bool) -> None:
    files = right.files()
    may = Capabilities(tied=TIES, partial=False)
    clean(right.subject("both", adapter, listed=files if shapes else list(files), capabilities=may))


def test_the_same_habits_fail_when_they_are_not_declared() -> None:
    for adapter, check_id in (
        (Empties, "purity.input-unchanged"),
        (WithoutBias, "keys.total"),
        (RefusesParts, "keys.partial"),
        (one_plus, "values.provenance"),
        (bf16_norms, "dtypes.policy"),
    ):
        report = check(right.subject("undeclared", adapter, **BLIND), checks=[check_id])
        assert report.cell(check_id).verdict == "fail", (adapter, check_id)


def test_halves_of_a_chunk_interleave_in_memory_and_share_nothing() -> None:
    class Columns(Right):
        """The two halves of the fused expert weight by columns: addresses overlap."""

        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            if "tok.weight" in state_dict and "head.weight" in state_dict:
                both = torch.cat([state_dict["tok.weight"], state_dict["head.weight"]], dim=1)
                one, two = both.chunk(2, dim=1)
                out["model.embed_tokens.weight"], out["lm_head.weight"] = one, two
            return out

    assert check(right.subject("chunks", Columns, **BLIND), checks=["purity.aliasing"]).ok


@pytest.mark.parametrize("listed", [False, True])
def test_an_fp32_policy_of_a_bf16_model_is_a_policy(listed: bool) -> None:
    pinned = edited(value("o_proj", lambda v: v.float()))
    declared = Capabilities(dtypes={"*.o_proj.weight": "float32"})
    clean(right.subject("policy", pinned, **BLIND | {"listed": listed, "capabilities": declared}))
