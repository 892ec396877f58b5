"""A save that one rank spoils fails on every rank, with the first cause, and leaves no step."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from conformance.degrees import CASES, Case
from conformance.jobs import Job, small_table
from conformance.ranks import RankPool
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.formats import dcp

BY_NAME = {case.name: case for case in CASES}


class Spoilt:
    """A state that fails, dies or differs on one rank."""

    def __init__(self, how: str, rank: int) -> None:
        self.how = how if dist.get_rank() == rank else ""
        self.all_inside = how == "dies"

    def state_dict(self) -> dict[str, Any]:
        if self.all_inside:
            # A rank that dies while another still connects a process group is torch's to time out.
            dist.barrier()
        if self.how == "raises":
            raise ValueError("this state cannot be had")
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"value": torch.tensor([1.0, 2.0 + (self.how == "differs")])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("not loaded here")


def save(case: Case, folder: str, how: str) -> tuple[str, list[str]]:
    job = Job.start(small_table(), case.degrees, chunks=case.chunks)
    manager = job.manager(folder, states={"own": Spoilt(how, 2)}, interval=1)
    text = ""
    try:
        manager.save(1)
    except Exception as error:
        # The rank at fault raises its own error, the others what they heard of it.
        text = f"{type(error).__name__}: {error}"
    manager.close()
    return text, sorted(p.name for p in Path(folder, "checkpoint").glob("step-*"))


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("raises", ["ValueError: this state cannot be had"]),
        ("differs", ["own.value", "rank 2", "ranks 0, 1, 3"]),
    ],
)
def test_every_rank_fails_with_the_cause(
    pool: RankPool, tmp_path: Path, how: str, parts: list[str]
) -> None:
    case = BY_NAME["fsdp2 x tp2"]
    outcomes = pool.run(save, case.ranks, case, str(tmp_path), how)
    for text, steps in outcomes:
        assert all(part in text for part in parts), text
        assert steps == []


def test_an_unspoilt_state_is_saved(pool: RankPool, tmp_path: Path) -> None:
    case = BY_NAME["fsdp2 x tp2"]
    outcomes = pool.run(save, case.ranks, case, str(tmp_path), "")
    assert outcomes == [("", ["step-1"])] * case.ranks


def save_uncaught(case: Case, folder: str, how: str) -> None:
    """As in a job: who hears of a failure ends, and so do the connections to it."""
    job = Job.start(small_table(), case.degrees, chunks=case.chunks)
    manager = job.manager(folder, states={"own": Spoilt(how, 2)}, interval=1)
    manager.save(1)


def test_a_rank_that_dies_leaves_nobody_waiting(pool: RankPool, tmp_path: Path) -> None:
    case = BY_NAME["fsdp2 x tp2"]
    begin = time.monotonic()
    outcomes = pool.outcomes(save_uncaught, case.ranks, case, str(tmp_path), "dies", timeout=90)
    assert time.monotonic() - begin < 60
    kinds = [o.failure.kind if o.failure else "returned" for o in outcomes]
    why = "\n".join(str(o.failure) for o in outcomes)
    assert kinds == ["raised", "raised", "died", "raised"], why
    assert list(Path(tmp_path, "checkpoint").glob("step-*")) == []


def destroy_while_saving(folder: str) -> tuple[str, list[str]]:
    """Shutdown in the wrong order: the process group first, then the manager."""
    job = Job.start(small_table(), BY_NAME["fsdp2"].degrees)
    manager = job.manager(folder, interval=1, async_mode="async")
    go, real = threading.Event(), dcp.save

    def late(*args: Any, **kwargs: Any) -> None:
        go.wait(60)
        real(*args, **kwargs)

    with mock.patch.object(dcp, "save", late):
        manager.save(1)
        dist.barrier()
        dist.destroy_process_group()
        go.set()
        try:
            manager.close()
        except CheckpointError as error:
            return str(error), os.listdir(f"{folder}/checkpoint")
    return "", os.listdir(f"{folder}/checkpoint")


def test_a_process_group_that_is_destroyed_first_is_said(pool: RankPool, tmp_path: Path) -> None:
    for text, left in pool.run(destroy_while_saving, 2, str(tmp_path)):
        assert text.startswith("[ranks.destroyed] The process group was destroyed while step 1 ")
        assert "call close() first" in text
        assert not [name for name in left if name.startswith("step-")]


def save_with_a_failing_disk(folder: str) -> str:
    """Rank 1 cannot write its file."""
    case = BY_NAME["fsdp2"]
    job = Job.start(small_table(), case.degrees)
    if dist.get_rank() == 1:
        Path(folder, "__1_0.distcp").mkdir(parents=True)
    dist.barrier()
    try:
        dcp.save(job.state(), folder, sync_files=False)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_file_that_cannot_be_written_fails_both_ranks(pool: RankPool, tmp_path: Path) -> None:
    texts = pool.run(save_with_a_failing_disk, 2, str(tmp_path))
    for text in texts:
        assert "__1_0.distcp" in text
        assert "rank 1" in text.lower()
    assert not (tmp_path / ".metadata").exists()
