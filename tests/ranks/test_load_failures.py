"""Damage that one rank meets while it reads: every rank fails, told of the same older step."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from conformance.degrees import CASES, Case
from conformance.jobs import Job, small_table
from conformance.ranks import RankPool
from torchtitan_ckpt.errors import DamagedError
from torchtitan_ckpt.formats import dcp

CASE = next(case for case in CASES if case.ranks == 2)


def save_and_load(case: Case, folder: str) -> list[tuple[str, str]]:
    job = Job.start(small_table(), case.degrees, chunks=case.chunks)
    manager = job.manager(folder, interval=1, keep_latest_k=0)
    for step in (1, 2):
        manager.save(step)
    if dist.get_rank() == 0:
        spoil(Path(folder, "checkpoint", "step-2"))
    dist.barrier()
    problems = []
    try:
        manager.load()
    except DamagedError as error:
        problems = [(problem.code, problem.fix) for problem in error.problems]
    manager.close()
    return problems


def spoil(step: Path) -> None:
    """Damage what the second rank wrote of the model, and only it reads."""
    for entry in dcp.read_manifest(step).tensors.values():
        shard = next((s for s in entry.shards if s.file == "__1_0.distcp"), None)
        if shard is not None and not entry.key.startswith(("optimizer.", "train_state.")):
            break
    assert shard is not None
    with open(step / shard.file, "r+b") as file:
        file.seek(shard.byte_offset)
        file.write(bytes(shard.byte_length))


def test_every_rank_is_told_of_the_older_step(pool: RankPool, tmp_path: Path) -> None:
    outcomes = pool.run(save_and_load, CASE.ranks, CASE, str(tmp_path))
    for problems in outcomes:
        assert problems[-1] == ("load.older-step", "--checkpoint.load_step 1")
        assert problems[0][0] == "zip.damaged"
    # The rank that met it says just that; the other also says whose it is.
    assert sorted("ranks.other-failed" in dict(p) for p in outcomes) == [False, True]
