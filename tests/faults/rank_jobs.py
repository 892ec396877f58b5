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
from torchtitan_ckpt.formats import hf
from torchtitan_ckpt.parallel import ParallelDegrees

PATIENCE = 30  # seconds that the job's collectives wait for a rank


class Adapter:
    """Hugging Face names for the job: a prefix."""

    hf_assets_path = None
    fqn_to_index_mapping = None

    def to_hf(self, state):
        return {f"model.{key}": value for key, value in state.items()}

    def from_hf(self, state):
        return {key.removeprefix("model."): value for key, value in state.items()}


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


def digest(job, *names):
    """A hash of this rank's part of the named states, of everything without names."""
    total = hashlib.sha256()
    for key, value in sorted(job.state(*names).items()):
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            flat = local.detach().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            total.update(f"{key} {local.dtype} {tuple(local.shape)}".encode() + data)
        else:
            total.update(f"{key} {value!r}".encode())
    return total.hexdigest()


def record(store, rank, size, until):
    """(digest of the state, of the model) of this rank by step, from a job that nobody disturbs."""
    join(store, rank, size)
    job = start(size)
    truth = [(digest(job), digest(job, "model"))]
    for _ in range(until):
        job.train()
        truth.append((digest(job), digest(job, "model")))
    return truth


def live(store, rank, size, folder, until, **options):
    """Load and train on, saving every step and exporting step `until`.

    Says which full step is certain to be on disk.
    """
    join(store, rank, size)
    job = start(size)
    fixed = {"sd_adapter": Adapter(), "last_save_in_hf": True, "interval": 1, "keep_latest_k": 2}
    manager = job.manager(folder, **fixed, **options)
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
        last = job.step == until
        if last:
            lab.say(("exporting",))
        manager.save(job.step, last_step=last)
        # A save that is asked for while another runs waits for that other one first.
        lab.say(("saved", job.step - (last or waits)))
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
    full = [number for number, name in seen if (output / name / ".metadata").is_file()]
    wrong = []
    for number, name in seen:
        probe = start(size, empty=True)
        if number in full:
            manager = probe.manager(folder, load_only=True)
            manager.load(number)
            manager.close()
            right = digest(probe) == truth[number][0]
        else:
            hf.load(output / name, Adapter().to_hf(probe.state("model")))
            right = digest(probe, "model") == truth[number][1]
        if name != f"step-{number}" or not right:
            wrong.append(name)
    dist.barrier()
    job = start(size)
    manager = job.manager(folder, interval=1, keep_latest_k=2)
    manager.load()
    step, same = job.step, digest(job) == truth[job.step][0]
    job.train()
    manager.save(job.step)
    manager.close()
    dist.barrier()
    return {
        "visible": seen,
        "full": full,
        "wrong": wrong,
        "resumed": step,
        "same": same and digest(job) == truth[step + 1][0],
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
