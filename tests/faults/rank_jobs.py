"""The same on several ranks: a job split over processes, which `test_kills_ranks` kills.

The job is the conformance suite's, whose state after each step is known; a digest stands for it.
"""

import hashlib
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from conformance.jobs import Job, small_table
from tests.faults import lab
from tests.faults.judge import strays, visible
from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.formats import dcp
from torchtitan_ckpt.parallel import ParallelDegrees

PATIENCE = 30  # seconds that the job's collectives wait for a rank


def join(store, rank, size):
    """Become rank `rank` of `size`, over a file that only these ranks use."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE),
    )


def start(size, empty=False):
    return Job.start(small_table(), ParallelDegrees.parse(f"fsdp{size}"), empty=empty)


def digest(job):
    """A hash of this rank's part of everything."""
    total = hashlib.sha256()
    for key, value in sorted(job.state().items()):
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            flat = local.detach().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            total.update(f"{key} {local.dtype} {tuple(local.shape)}".encode() + data)
        else:
            total.update(f"{key} {value!r}".encode())
    return total.hexdigest()


def record(store, rank, size, until):
    """Digests of this rank's state by step, from a job that nobody disturbs."""
    join(store, rank, size)
    job = start(size)
    truth = [digest(job)]
    for _ in range(until):
        job.train()
        truth.append(digest(job))
    return truth


def live(store, rank, size, folder, until, **options):
    """Load and train on, saving every step; a checkpoint error is said, any other is raised."""
    join(store, rank, size)
    job = start(size)
    manager = job.manager(folder, interval=1, keep_latest_k=2, **options)
    lab.say(("start",))
    manager.load()
    lab.say(("loaded", job.step, digest(job)))
    waits = options.get("async_mode", "disabled") != "disabled"
    while job.step < until:
        try:
            job.train()
        except RuntimeError as error:
            # The training's own collectives fail when another rank has gone: not our affair.
            lab.say(("training ended", str(error)))
            return
        manager.save(job.step)
        lab.say(("saved", job.step - waits))
    manager.close()


def live_or_say(*args, **kwargs):
    """`live`, whose checkpoint error is its value: the words that a survivor's user sees."""
    try:
        live(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return ""


def restart(store, rank, size, folder, truth):
    """As `judge.restart`, by all ranks together. `truth` is this rank's."""
    join(store, rank, size)
    output = Path(folder) / "checkpoint"
    seen = visible(output)
    wrong, full = [], []
    for number, name in seen:
        heads = {key.partition(".")[0] for key in dcp.read_manifest(str(output / name)).keys}
        full += [number] if "optimizer" in heads else []
        probe = start(size, empty=True)
        manager = probe.manager(folder, load_only=True)
        manager.load(number)
        manager.close()
        if name != f"step-{number}" or digest(probe) != truth[number]:
            wrong.append(name)
    dist.barrier()
    job = start(size)
    manager = job.manager(folder, interval=1, keep_latest_k=2)
    manager.load()
    step, same = job.step, digest(job) == truth[job.step]
    job.train()
    manager.save(job.step)
    manager.close()
    dist.barrier()
    return {
        "visible": seen,
        "full": full,
        "wrong": wrong,
        "resumed": step,
        "same": same and digest(job) == truth[step + 1],
        "left": strays(folder),
        "next": step + 1 in [number for number, _ in visible(output)],
    }


def meet_an_absence(store, rank, size, what):
    """Rank 1 is gone before the others come together; what they are told."""
    join(store, rank, size)
    ranks = Ranks.current()
    ranks.gather(rank)
    if rank == 1:
        os._exit(1)
    try:
        ranks.gather(rank) if what == "gather" else ranks.broadcast(rank)
    except CheckpointError as error:
        return str(error)
    return "nobody was missed"
