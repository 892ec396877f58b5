"""Save under one split, load under another, bit for bit: one cycle by default, all pairs slow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from conformance.degrees import CASES, Case
from conformance.jobs import Job, small_table
from conformance.kinds import FATES, KINDS, MIXED, fate, layer_of
from conformance.matrix import STEPS, Loaded, Matrix, cycle, every_pair, table_of
from conformance.ranks import RankPool
from torchtitan_ckpt.formats import dcp, hf
from torchtitan_ckpt.parallel import ParallelDegrees

DEFAULT = cycle()
SLOW = [pair for pair in every_pair() if pair not in DEFAULT]


@pytest.fixture(scope="module")
def matrix(
    pool: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
    tables: list[Callable[[], str]],
) -> Matrix:
    found = Matrix(pool, tmp_path_factory.mktemp("matrix"))
    tables.append(lambda: table_of(found.rows))
    return found


def name(case: Case) -> str:
    return case.name.replace(" ", "")


@pytest.mark.parametrize(
    ("source", "target"),
    [*DEFAULT, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)],
    ids=name,
)
def test_saved_under_one_split_and_loaded_under_another(
    matrix: Matrix, source: Case, target: Case
) -> None:
    row = matrix.pair(source, target)
    assert not row.wrong, "\n".join(row.wrong[:10])


# By default all kinds in one job; each over the whole model is slow.
OTHERS = ["mixed", *(kind for kind in KINDS if kind != "adamw")]


OTHER_PAIRS = [
    pytest.param(
        *(kind, source, target),
        marks=() if kind == "mixed" else (pytest.mark.slow,),
        id=f"{kind}-{name(source)}-{name(target)}",
    )
    for kind in OTHERS
    for source, target in cycle(step=5)
]


@pytest.fixture(scope="module")
def kinds(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Matrix]:
    return {kind: Matrix(pool, tmp_path_factory.mktemp(kind), kind=kind) for kind in OTHERS}


@pytest.mark.parametrize(("kind", "source", "target"), OTHER_PAIRS)
def test_other_kinds_of_state(
    kinds: dict[str, Matrix], kind: str, source: Case, target: Case
) -> None:
    row = kinds[kind].pair(source, target)
    assert not row.wrong, "\n".join(row.wrong[:10])


def test_the_mixed_kinds_take_turns_over_the_layers() -> None:
    """Every kind has every layer in one arrangement, and something in all of them."""
    table = small_table()
    seen: set[tuple[int, int, str]] = set()
    for turn, kind in enumerate(MIXED.values()):
        job = Job.start(kind.table(table), ParallelDegrees(), kind=f"mixed{turn}")
        names = {id(p): key for key, p in job.parts[0].named_parameters()}
        for number, optimizer in enumerate(job.optimizers):
            for group in optimizer.param_groups:
                layers = {layer_of(names[id(p)]) for p in group["params"]}
                seen |= {(turn, layer, str(number)) for layer in layers if layer is not None}
        assert len(job.optimizers) == len(KINDS) + 2  # a hybrid and a swapped one are two each
    assert {(turn, layer) for turn, layer, _ in seen} == {
        (turn, layer) for turn in range(len(KINDS)) for layer in range(12)
    }
    assert {(layer, number) for _, layer, number in seen} == {
        (layer, str(number)) for layer in range(12) for number in range(len(KINDS) + 2)
    }


def test_the_partly_trained_kind_is_what_it_says() -> None:
    """No state for what is frozen or waits; an old one for what stopped; one for a tied pair."""
    table = KINDS["partly"].table(small_table())
    pairs = {key: leaf.tied for key, leaf in table.items() if leaf.tied}
    tied = {*pairs, *pairs.values()}
    steps = {}
    for count in (2, 3):
        job = Job.start(table, ParallelDegrees(), kind="partly")
        job.train(count)
        named = dict(job.parts[0].named_parameters())
        state = job.optimizers[0].state
        steps[count] = {
            word: {int(state[value]["step"]) if value in state else 0 for value in own}
            for word in FATES
            if (own := [v for k, v in named.items() if fate(k) == word and k not in tied])
        }
        assert all(named[key].requires_grad == (fate(key) != "frozen") for key in named)
        assert len(tied & named.keys()) == len(pairs) == 11
    assert steps[2] == {"trained": {2}, "frozen": {0}, "waiting": {0}, "stopped": {1}}
    assert steps[3] == {"trained": {3}, "frozen": {0}, "waiting": {1}, "stopped": {1}}


def test_the_default_cycle_has_every_split_on_both_sides() -> None:
    assert {source.name for source, _ in DEFAULT} == {case.name for case in CASES}
    assert {target.name for _, target in DEFAULT} == {case.name for case in CASES}
    assert len(SLOW) + len(DEFAULT) == len(CASES) ** 2
    assert not any(source == target for source, target in DEFAULT)


def test_what_no_rank_holds_any_more_is_lost(tmp_path: Path) -> None:
    """A stage lacks what the others hold; a state that all lack must not pass as equal."""

    class Said:
        def run(self, fn: Any, n: int, *_: Any, **__: Any) -> list[Any]:
            return [Loaded([], {"a", "b"}, 0.0, 0.0), Loaded([], {"b", "c"}, 0.0, 0.0)]

    told = Matrix(cast(RankPool, Said()), tmp_path)
    told._saved[CASES[0].name] = tmp_path
    assert told.pair(CASES[0], CASES[1]).wrong == ["lost: b"]


KEY = "layers.0.attention.sinks"


def save_spoilt(folder: str) -> None:
    """What a wrong writer would leave: one element of one tensor is another's."""
    job = Job.start(small_table(), ParallelDegrees())
    job.train(STEPS)
    flat = job.state()
    for key in (KEY, f"optimizer.state.{KEY}.exp_avg"):
        flat[key] = flat[key].detach().clone()
        flat[key][3] = flat[key][2]
    flat[f"optimizer.state.{KEY}.extra"] = flat[KEY] + 1
    dcp.save(flat, f"{folder}/dcp", sync_files=False)
    hf.save({k: flat[k] for k in small_table()}, f"{folder}/hf", sync_files=False)


def test_a_difference_is_seen(pool: RankPool, tmp_path: Path) -> None:
    """The judge can say no: in the weights, in a moment, after a step, and in safetensors."""
    pool.run(save_spoilt, 1, str(tmp_path))
    spoilt = Matrix(pool, tmp_path)
    spoilt._saved[CASES[0].name] = tmp_path
    wrong = spoilt.pair(CASES[0], CASES[2]).wrong
    assert KEY in wrong
    assert f"optimizer.state.{KEY}.exp_avg" in wrong
    assert f"after a step: {KEY}" in wrong
    assert f"hf: {KEY}" in wrong
    assert f"invented: optimizer.state.{KEY}.extra" in wrong
    assert all(KEY in text for text in wrong)
