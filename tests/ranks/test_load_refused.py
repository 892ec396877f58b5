"""One rank's state refuses its values: on every rank everything is as it was, and nothing waits."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from conformance import jobs
from conformance.degrees import Case
from conformance.jobs import Job, small_table
from conformance.ranks import RankPool
from torchtitan_ckpt.errors import MismatchError
from torchtitan_ckpt.state import rng

FSDP, PIPELINE = Case.parse("fsdp2"), Case.parse("pp2")


class Averages:
    """A caller's own state with tensors that its load writes in place."""

    def __init__(self) -> None:
        self.mean, self.seen = torch.zeros(5), [0]

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean.copy_(state["mean"])
        self.seen[:] = state["seen"]


def start(case: Case, steps: int) -> tuple[Job, Averages]:
    job, own = Job.start(small_table(), case.degrees, chunks=case.chunks), Averages()
    job.schedulers = [MultiStepLR(o, [1, 2, 5], gamma=0.5) for o in job.optimizers]
    job.train(steps)
    own.mean += steps
    own.seen.append(steps)
    return job, own


def save(case: Case, folder: str) -> None:
    job, own = start(case, 1)
    manager = job.manager(folder, states={"own": own}, interval=1)
    assert manager.save(1)
    manager.close()


def seen(job: Job, own: Averages) -> dict[str, str]:
    """Bits of everything but the model, whose tensors are filled while they are read."""
    flat = job.state("optimizer", "lr_scheduler", "dataloader", "train_state")
    flat |= {f"own.{key}": value for key, value in own.state_dict().items()}
    flat["drawn"] = (random.getstate(), torch.get_rng_state())
    return {key: _bits(value) for key, value in flat.items()}


def _bits(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    local = value.to_local() if isinstance(value, DTensor) else value
    flat = local.detach().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def _no(*_: Any, **__: Any) -> None:
    raise RuntimeError("no more of this")


def _hook(job: Job) -> Any:
    hooks = job.optimizers[-1]._optimizer_load_state_dict_post_hooks
    return mock.patch.dict(hooks, {7: _no})


REFUSALS: dict[str, Callable[[Job], Any]] = {
    "optimizer": _hook,
    "lr_scheduler": lambda _: mock.patch.object(LRScheduler, "load_state_dict", _no),
    "dataloader": lambda _: mock.patch.object(jobs._Loader, "load_state_dict", _no),
    "train_state": lambda _: mock.patch.object(jobs._Counter, "load_state_dict", _no),
    "own": lambda _: mock.patch.object(Averages, "load_state_dict", _no),
    "generators": lambda _: mock.patch.object(rng.RngState, "load_state_dict", _no),
}


def load(case: Case, folder: str, rank: int) -> list[str]:
    """Every refusal in turn on one rank, and then the load that nobody refuses."""
    wrong = []
    job, own = start(case, 3)
    manager = job.manager(folder, states={"own": own}, load_only=True)
    for name, refuse in REFUSALS.items():
        before, said = seen(job, own), ""
        refusing = refuse(job) if dist.get_rank() == rank else mock.MagicMock()
        with refusing:
            try:
                manager.load()
            except MismatchError as error:
                said = str(error)
        if "RuntimeError: no more of this" not in said:
            wrong.append(f"{name}: {said or 'nothing was raised'}")
        if ("ranks.other-failed" in said) != (dist.get_rank() != rank):
            wrong.append(f"{name}: told by the wrong rank")
        now = seen(job, own)
        wrong += [f"{name}: {key}" for key in before if now[key] != before[key]]
    assert manager.load()
    manager.close()
    if (job.step, own.seen, job.schedulers[0].last_epoch) != (1, [0, 1], 1):
        wrong.append("the load that nobody refuses")
    return wrong


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", [FSDP, PIPELINE], ids=lambda case: case.name)
def test_what_one_rank_refuses_changes_nothing_on_any(
    pool: RankPool, tmp_path: Path, case: Case, rank: int
) -> None:
    pool.run(save, case.ranks, case, str(tmp_path))
    assert pool.run(load, case.ranks, case, str(tmp_path), rank, timeout=90) == [[], []]
