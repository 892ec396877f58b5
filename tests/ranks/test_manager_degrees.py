"""The manager under parallel degrees: seed to every split, excluded states, loaders, generators."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from conformance.degrees import CASES, Case
from conformance.jobs import Job, comparable, small_table, truth
from conformance.ranks import RankPool
from conformance.reference import Leaf
from torchtitan_ckpt.errors import ConfigError, MismatchError

TRAINING = ("optimizer", "lr_scheduler", "dataloader", "train_state")
BY_NAME = {case.name: case for case in CASES}


def start(case: Case, *, table: dict[str, Leaf] | None = None, empty: bool = False) -> Job:
    return Job.start(table or small_table(), case.degrees, chunks=case.chunks, empty=empty)


# --- seed ---------------------------------------------------------------------------------------


def make_seed(folder: str) -> None:
    job = start(BY_NAME["1"])
    manager = job.manager(folder, create_seed_checkpoint=True)
    assert manager.save(0)
    manager.close()


def load_seed(case: Case, folder: str) -> list[str]:
    """Load step-0 into a job full of NaN; the first step must be an unsplit job's first."""
    job = start(case, empty=True)
    manager = job.manager(folder, load_only=True)
    assert manager.load()
    manager.close()
    model = job.state("model")
    wrong = job.differences(truth(job.table, 0), model)
    if any(optimizer.state for optimizer in job.optimizers):
        wrong.append("the optimizer is not fresh")
    if (job.step, job.position) != (0, 0):
        wrong.append("a counter moved")
    job.train()
    expected = truth(job.table, 1)
    wrong += job.differences(expected, comparable(expected, job.state()))
    return wrong


@pytest.fixture(scope="module")
def seed(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("seed"))
    pool.run(make_seed, 1, folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_seed_is_loaded_by_every_split(pool: RankPool, seed: str, case: Case) -> None:
    assert pool.run(load_seed, case.ranks, case, seed) == [[]] * case.ranks


def load_other_model(case: Case, folder: str, table: dict[str, Leaf]) -> str:
    job = start(case, table=table)
    before = {key: value.clone() for key, value in job.state("model").items()}
    manager = job.manager(folder, load_only=True)
    text = ""
    try:
        manager.load()
    except MismatchError as error:
        text = str(error)
    manager.close()
    unchanged = all(before[k].equal(v) for k, v in job.state("model").items())
    return text if unchanged else "changed before it was refused"


@pytest.mark.parametrize("split", ["fsdp2", "pp2", "fsdp4 x ep2"])
def test_a_seed_of_another_model_is_refused_before_data_moves(
    pool: RankPool, seed: str, split: str
) -> None:
    table = small_table()
    key = "layers.10.moe.router.gate.weight"
    table[key] = replace(table[key], shape=(12, 26))
    table["layers.3.extra.weight"] = Leaf((5, 3))
    del table["layers.4.attention.q_norm.weight"]
    case = BY_NAME[split]
    texts = pool.run(load_other_model, case.ranks, case, seed, table)
    together = "\n".join(texts)
    for part in (key, "layers.3.extra.weight", "layers.4.attention.q_norm.weight"):
        assert part in together
    assert all(texts)
    assert "changed before" not in together


# --- excluded states ----------------------------------------------------------------------------


def save_step(case: Case, folder: str) -> None:
    job = start(case)
    job.train(2)
    manager = job.manager(folder, interval=2)
    assert manager.save(2)
    manager.close()


def load_without(case: Case, folder: str) -> list[str]:
    """Every subset left out: what is left out keeps its own value, the rest is the saved one."""
    wrong = []
    own, saved = truth(small_table(), 1), truth(small_table(), 2)
    for count in range(len(TRAINING) + 1):
        for excluded in combinations(TRAINING, count):
            job = start(case)
            if "optimizer" in excluded and "lr_scheduler" not in excluded:
                with pytest.raises(ConfigError, match="exclude-coupled"):
                    job.manager(folder, load_only=True, exclude_from_loading=list(excluded))
                continue
            job.train(1)
            mine = job.position
            manager = job.manager(folder, load_only=True, exclude_from_loading=list(excluded))
            assert manager.load()
            manager.close()
            for name in ("model", *TRAINING):
                if name == "dataloader":
                    steps = 1 if name in excluded else 2
                    if job.position != mine * steps:
                        wrong.append(f"{excluded}: position {job.position}")
                    continue
                expected = own if name in excluded else saved
                keys = comparable(expected, job.state(name))
                wrong += [f"{excluded}: {key}" for key in job.differences(expected, keys)]
    return wrong


@pytest.mark.parametrize("split", ["fsdp2", "fsdp2 x tp2", "pp2"])
def test_every_subset_of_states_can_be_left_out(pool: RankPool, tmp_path: Path, split: str) -> None:
    case = BY_NAME[split]
    pool.run(save_step, case.ranks, case, str(tmp_path))
    wrong = pool.run(load_without, case.ranks, case, str(tmp_path))
    assert wrong == [[]] * case.ranks


# --- the whole state under other degrees --------------------------------------------------------


def resume(case: Case, folder: str, excluded: list[str]) -> tuple[list[str], int, str]:
    """(differences, position, refusal) after a resume into a job full of NaN."""
    job = start(case, empty=True)
    manager = job.manager(folder, load_only=True, exclude_from_loading=excluded)
    try:
        manager.load()
    except MismatchError as error:
        moved = [k for k, v in job.state("model").items() if v.is_floating_point() and not _nan(v)]
        return moved, job.position, str(error)
    finally:
        manager.close()
    expected = truth(job.table, 2)
    wrong = job.differences(expected, comparable(expected, job.state()))
    job.train()
    expected = truth(job.table, 3)
    wrong += job.differences(expected, comparable(expected, job.state()))
    return wrong, job.position, ""


def _nan(value: torch.Tensor) -> bool:
    local = value.to_local() if isinstance(value, DTensor) else value
    return bool(local.isnan().all())


SAME_DATA = [
    ("fsdp2 x tp2", "hsdp2x2"),
    ("fsdp4", "fsdp2"),
    ("fsdp2", "fsdp2 x cp2"),
    ("fsdp2 x tp2 x pp2", "fsdp2"),
]


@pytest.mark.parametrize(("source", "target"), SAME_DATA)
def test_the_position_is_kept_or_refused_with_the_remedy(
    pool: RankPool, tmp_path: Path, source: str, target: str
) -> None:
    a, b = BY_NAME[source], BY_NAME[target]
    pool.run(save_step, a.ranks, a, str(tmp_path))
    same = (
        a.degrees.dp_replicate * a.degrees.dp_shard == b.degrees.dp_replicate * b.degrees.dp_shard
    )
    outcomes: list[Any] = pool.run(resume, b.ranks, b, str(tmp_path), [])
    if same:
        assert [(wrong, refusal) for wrong, _, refusal in outcomes] == [([], "")] * b.ranks
        assert {position for _, position, _ in outcomes} == {9, 12}
        return
    for moved, position, refusal in outcomes:
        assert not moved
        assert position == 0
        assert "exclude_from_loading" in refusal
        assert "dataloader" in refusal
    outcomes = pool.run(resume, b.ranks, b, str(tmp_path), ["dataloader"])
    assert [(wrong, refusal) for wrong, _, refusal in outcomes] == [([], "")] * b.ranks


# --- random number generators -------------------------------------------------------------------


def draw_and_save(case: Case, folder: str) -> list[float]:
    """Save with every rank elsewhere in a stream of its own; what it draws next."""
    job = start(case)
    manager = job.manager(folder, interval=1)
    torch.manual_seed(100 + dist.get_rank())
    torch.rand(3 + dist.get_rank())
    manager.save(1)
    manager.close()
    return [torch.rand(()).item(), random.random()]


def draw_after_loading(case: Case, folder: str) -> tuple[list[float], list[float], str]:
    """(what a rank draws after a load, what it had drawn without, the note of the log)."""
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchtitan_ckpt.manager").addHandler(handler)
    logging.getLogger("torchtitan_ckpt.manager").setLevel(logging.INFO)
    job = start(case, empty=True)
    manager = job.manager(folder, load_only=True, exclude_from_loading=["dataloader"])
    own = torch.get_rng_state(), random.getstate()
    assert manager.load()
    drawn = [torch.rand(()).item(), random.random()]
    manager.close()
    torch.set_rng_state(own[0])
    random.setstate(own[1])
    text = next((line for line in log if "random number" in line), "")
    return drawn, [torch.rand(()).item(), random.random()], text


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("fsdp2 x tp2", "fsdp2 x tp2", ""),
        ("fsdp4", "fsdp2", "saved by 4 ranks, and here are 2"),
        ("fsdp2", "tp2", "split otherwise"),
        ("tp2", "pp2", "split otherwise"),
    ],
)
def test_each_rank_draws_on_where_it_was_if_the_job_is_split_as_it_was(
    pool: RankPool, tmp_path: Path, source: str, target: str, why: str
) -> None:
    a, b = BY_NAME[source], BY_NAME[target]
    saved = pool.run(draw_and_save, a.ranks, a, str(tmp_path))
    assert len({first for first, _ in saved}) == a.ranks
    found = pool.run(draw_after_loading, b.ranks, b, str(tmp_path))
    for rank, (drawn, own, _) in enumerate(found):
        assert drawn == (own if why else saved[rank])
    assert why in found[0][2]
    assert bool(found[0][2]) == bool(why)
