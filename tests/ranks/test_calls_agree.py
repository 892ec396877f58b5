"""Ranks that call a manager differently are told so, instead of mixing steps or waiting."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from conformance.degrees import CASES
from conformance.jobs import Job, small_table
from conformance.ranks import RankPool
from torchtitan_ckpt.errors import CheckpointError, Problem, RankError
from torchtitan_ckpt.formats import dcp_save

DEGREES = next(case.degrees for case in CASES if case.name == "fsdp2")


def differ(folder: str, what: str) -> tuple[list[Problem], list[str]]:
    """Rank 1 has other options, or calls `save` otherwise."""
    job = Job.start(small_table(), DEGREES)
    odd = dist.get_rank() == 1
    problems: tuple[Problem, ...] = ()
    try:
        options: dict[str, Any] = {"interval": 1}
        if what == "options":
            options |= {"interval": 2, "async_mode": "async"} if odd else {}
        if what == "invalid":
            options |= {"keep_latest_k": 1} if odd else {}
        manager = job.manager(folder, **options)
        manager.save(3 + (what == "step" and odd), last_step=what == "last" and odd)
    except CheckpointError as error:
        problems = error.problems
    dist.barrier()
    return list(problems), sorted(n for n in os.listdir(folder + "/checkpoint") if "step" in n)


@pytest.mark.parametrize(
    ("what", "codes", "text"),
    [
        ("options", ["ranks.options"] * 2, "2 on rank 1"),
        ("step", ["ranks.step"], "4 on rank 1"),
        ("last", ["ranks.step"], "True on rank 1"),
    ],
)
def test_ranks_that_differ_are_told(
    pool: RankPool, tmp_path: Path, what: str, codes: list[str], text: str
) -> None:
    (tmp_path / "checkpoint").mkdir()
    for problems, steps in pool.run(differ, 2, str(tmp_path), what, timeout=60):
        assert [p.code for p in problems] == codes
        assert text in {p.actual for p in problems}
        assert steps == []


def test_an_option_that_one_rank_refuses_is_told_on_all(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    first, second = pool.run(differ, 2, str(tmp_path), "invalid", timeout=60)
    assert [p.code for p in first[0]] == ["config.value", "ranks.other-failed"]
    assert [p.code for p in second[0]] == ["config.value"]


def interrupt(folder: str) -> tuple[str, str]:
    """Ctrl-C reaches rank 1 while both write."""
    job = Job.start(small_table(), DEGREES)
    real = dcp_save.ItemWriter.write

    def write(self: Any, *args: Any) -> int:
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        return real(self, *args)

    with mock.patch.object(dcp_save.ItemWriter, "write", write):
        try:
            dcp_save.save(job.state(), folder, sync_files=False)
        except BaseException as error:
            return type(error).__name__, str(error)
    return "", ""


def test_the_interrupted_rank_is_interrupted_and_the_other_told(
    pool: RankPool, tmp_path: Path
) -> None:
    (kind, text), (other, _) = pool.run(interrupt, 2, str(tmp_path), timeout=60)
    assert other == "KeyboardInterrupt"
    assert kind == "SaveError"
    assert "its process was interrupted" in text
    assert "(rank 1)" in text


def lose(folder: str) -> list[Problem]:
    """Rank 1 leaves in the middle of a save."""
    job = Job.start(small_table(), DEGREES)
    if dist.get_rank() == 1:
        with mock.patch.object(dcp_save.ItemWriter, "write", side_effect=lambda *_: os._exit(7)):
            dcp_save.save(job.state(), folder, sync_files=False)
    try:
        dcp_save.save(job.state(), folder, sync_files=False)
    except RankError as error:
        return list(error.problems)
    return []


def test_a_rank_that_goes_in_the_middle_of_a_save_is_told_as_such(
    pool: RankPool, tmp_path: Path
) -> None:
    first, _ = pool.outcomes(lose, 2, str(tmp_path), timeout=60)
    (problem,) = first.value
    assert problem.code == "ranks.lost"
    assert problem.where == str(tmp_path)
    assert ".cc:" not in problem.actual
    assert problem.fix
