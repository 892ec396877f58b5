"""Save under one split, load under another, bit for bit: one cycle by default, all pairs slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from conformance.degrees import CASES, Case
from conformance.jobs import Job, small_table
from conformance.kinds import KINDS
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


def _kind_pairs(kind: str) -> Iterator[Any]:
    """One cycle a kind; by default a share of it, so that all kinds together meet every split."""
    for number, pair in enumerate(cycle(step=5)):
        chosen = number % len(OTHERS) == OTHERS.index(kind)
        name_of = f"{kind}-{name(pair[0])}-{name(pair[1])}"
        marks = () if chosen else (pytest.mark.slow,)
        yield pytest.param(kind, *pair, marks=marks, id=name_of)


OTHERS = [kind for kind in KINDS if kind != "adamw"]


@pytest.fixture(scope="module")
def kinds(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Matrix]:
    return {kind: Matrix(pool, tmp_path_factory.mktemp(kind), kind=kind) for kind in OTHERS}


@pytest.mark.parametrize(
    ("kind", "source", "target"), [param for kind in OTHERS for param in _kind_pairs(kind)]
)
def test_other_kinds_of_state(
    kinds: dict[str, Matrix], kind: str, source: Case, target: Case
) -> None:
    row = kinds[kind].pair(source, target)
    assert not row.wrong, "\n".join(row.wrong[:10])


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
    assert all(KEY in text for text in wrong)
