"""Schedulers of every kind under pipeline stages whose groups and optimizers differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as lr

from conformance.degrees import Case
from conformance.jobs import Job, comparable, small_table
from conformance.ranks import RankPool
from torchtitan_ckpt.errors import RankError

Named = dict[str, nn.Parameter]


def grouped(named: Named) -> list[Optimizer]:
    """Embedding and head have rates of their own, so the stages' groups differ."""
    groups = [
        {"params": [p for k, p in named.items() if _is_end(k) == end], "lr": 2.0**-rate}
        for end, rate in ((None, 6), ("tok_embeddings", 4), ("lm_head", 3))
    ]
    return [AdamW([g for g in groups if g["params"]], foreach=False)]


def several(named: Named) -> list[Optimizer]:
    """The embedding has an optimizer of its own, so the stages' numbers of optimizers differ."""
    ends = [p for k, p in named.items() if _is_end(k) == "tok_embeddings"]
    rest = [p for k, p in named.items() if _is_end(k) != "tok_embeddings"]
    first: list[Optimizer] = [SGD(ends, lr=2.0**-4, momentum=0.5, foreach=False)] if ends else []
    return [*first, AdamW(rest, lr=2.0**-6, foreach=False)]


def _is_end(key: str) -> str | None:
    return next((end for end in ("tok_embeddings", "lm_head") if key.startswith(end)), None)


def _rates(optimizer: Optimizer, factor: float) -> list[float]:
    return [group["lr"] * factor for group in optimizer.param_groups]


def _by_kind(optimizer: Optimizer) -> lr.LRScheduler:
    """Optimizers of different classes have different schedules."""
    if isinstance(optimizer, SGD):
        return lr.MultiStepLR(optimizer, [1, 3], gamma=0.5)
    return lr.CosineAnnealingLR(optimizer, 11)


SCHEDULES: dict[str, Callable[[Any], lr.LRScheduler]] = {
    "cosine": lambda o: lr.CosineAnnealingLR(o, 11),
    "step": lambda o: lr.StepLR(o, 2, gamma=0.5),
    "warmed": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.25, total_iters=2), lr.CosineAnnealingLR(o, 9)], [2]
    ),
    "chained": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.5, total_iters=3), lr.ExponentialLR(o, 0.75)]
    ),
    "one-cycle": lambda o: lr.OneCycleLR(o, _rates(o, 2.0), total_steps=20),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lr.CyclicLR(
        o, _rates(o, 0.5), _rates(o, 2.0), step_size_up=3, cycle_momentum=False
    ),
    "by kind": _by_kind,
}
OPTIMIZERS = {"grouped": grouped, "several": several}


def start(case: Case, optimizers: str, schedule: str, *, empty: bool = False) -> Job:
    job = Job.start(small_table(), case.degrees, chunks=case.chunks, empty=empty)
    parts = [dict(part.named_parameters()) for part in job.parts]
    job.optimizers = [made for own in parts for made in OPTIMIZERS[optimizers](own)]
    job.schedulers = [SCHEDULES[schedule](optimizer) for optimizer in job.optimizers]
    return job


def save(case: Case, folder: str, optimizers: str) -> None:
    for schedule in SCHEDULES:
        job = start(case, optimizers, schedule)
        job.train(2)
        manager = job.manager(f"{folder}/{schedule}", interval=2)
        assert manager.save(2)
        manager.close()


def resume(case: Case, folder: str, optimizers: str) -> list[str]:
    """What is not bit for bit the job's that was never split nor stopped, now and a step on."""
    wrong = []
    for schedule in SCHEDULES:
        whole = start(Case.parse("1"), optimizers, schedule)
        whole.train(2)
        job = start(case, optimizers, schedule, empty=True)
        excluded = ["dataloader"]  # another degree is its own affair
        manager = job.manager(f"{folder}/{schedule}", load_only=True, exclude_from_loading=excluded)
        assert manager.load()
        manager.close()
        for step in (2, 3):
            expected = whole.state()
            keys = comparable(expected, job.state())
            entries = [key for key in keys if key.startswith("lr_scheduler.schedulers.of.")]
            names = [key for key in job.state("model") if f"optimizer.state.{key}.step" in keys]
            wrong += [f"{schedule} {step}: {key}" for key in job.differences(expected, keys)]
            if not names or len(entries) < len(names):
                wrong.append(f"{schedule} {step}: only {len(entries)} schedules were compared")
            whole.train()
            job.train()
    return wrong


@pytest.mark.parametrize("optimizers", OPTIMIZERS)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("pp2", "pp2"),
        ("1", "pp2 (2 chunks a rank)"),
        ("pp2 (2 chunks a rank)", "1"),
        pytest.param("pp2", "fsdp2", marks=pytest.mark.slow),
        pytest.param("fsdp2 x tp2 x pp2", "pp2", marks=pytest.mark.slow),
        pytest.param("pp2", "fsdp2 x tp2 x pp2", marks=pytest.mark.slow),
    ],
)
def test_every_schedule_goes_on(
    pool: RankPool, tmp_path: Path, source: str, target: str, optimizers: str
) -> None:
    a, b = Case.parse(source), Case.parse(target)
    pool.run(save, a.ranks, a, str(tmp_path), optimizers)
    assert pool.run(resume, b.ranks, b, str(tmp_path), optimizers) == [[]] * b.ranks


def save_plateau(case: Case, folder: str) -> list[tuple[str, str]]:
    """Each rank steps by a loss of its own: not one state."""
    job = start(case, "grouped", "step")
    plateau = lr.ReduceLROnPlateau(job.optimizers[0], patience=1)
    plateau.step(1.0 + dist.get_rank())
    job.schedulers = [plateau]
    manager = job.manager(folder, interval=1)
    problems = []
    try:
        manager.save(1)
    except RankError as error:
        problems = [(p.code, p.fix) for p in error.problems]
    manager.close()
    return problems


def test_schedulers_that_ranks_step_otherwise_are_refused_with_the_remedy(
    pool: RankPool, tmp_path: Path
) -> None:
    case = Case.parse("fsdp2")
    for problems in pool.run(save_plateau, case.ranks, case, str(tmp_path)):
        ((code, fix),) = problems
        assert code == "ranks.object-differs"
        assert "the same values on every rank" in fix
