"""The training loop: build, load, train step by step, save; and nothing of how a checkpoint works.

Everything that a step depends on is in what the manager saves, so that the loss of a resumed run
equals that of a run that was never stopped, bit for bit.
"""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO

import numpy as np
import torch

from torchtitan_ckpt import streams
from torchtitan_ckpt.parallel import ParallelDegrees
from torchtitan_ckpt.train import world as worlds
from torchtitan_ckpt.train.build import (
    build_parts,
    loss_over,
    make_lr_scheduler,
    make_optimizer,
)
from torchtitan_ckpt.train.config import JobConfig
from torchtitan_ckpt.train.data import SyntheticDataLoader
from torchtitan_ckpt.train.models.config import read_hf_config
from torchtitan_ckpt.train.pipeline import make_step
from torchtitan_ckpt.train.progress import TrainState
from torchtitan_ckpt.train.rules import check_job
from torchtitan_ckpt.train.world import World

log = logging.getLogger("torchtitan_ckpt.train")


def prepare(job: JobConfig, world_size: int) -> tuple[JobConfig, ParallelDegrees]:
    """The job with its model filled in, and its degrees; ConfigError where it cannot run."""
    if job.model is None:
        check_job(job, world_size)
        job = replace(job, model=read_hf_config(_model_folder(job)))
    if job.checkpoint.create_seed_checkpoint:
        job = replace(job, device="cpu")
    return job, check_job(job, world_size)


def _model_folder(job: JobConfig) -> str:
    """Where config.json is looked for: beside the weights that the job starts from."""
    weights = job.checkpoint.initial_load_path if job.checkpoint.initial_load_in_hf else None
    return job.hf_assets_path or weights or "."


def run(job: JobConfig, *, out: TextIO | None = None) -> None:
    """Train one job to its last step, on the ranks that this process belongs to.

    Rank 0 writes one line a step to `out` (standard output): step, loss and learning rate, the
    latter two also as hexadecimal floats, which show every bit.
    """
    job, degrees = prepare(job, worlds.place().size)
    with worlds.enter(degrees, device=job.device) as world, _repeatable(world.device):
        trainer = Trainer(job, world, out or sys.stdout)
        try:
            trainer.run()
        finally:
            trainer.close()


class Trainer:
    """One job on one rank. `prepare` its config first."""

    def __init__(self, job: JobConfig, world: World, out: TextIO) -> None:
        assert job.model is not None
        self.job, self.world, self.out, self.config = job, world, out, job.model
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(job.training.seed)  # all that a checkpoint holds, so that two runs agree
        self.parts = build_parts(job, world)
        self.optimizers = [make_optimizer(part, job.optimizer) for part in self.parts]
        self.lr_schedulers = [
            make_lr_scheduler(optimizer, job.lr_scheduler, job.training.steps)
            for optimizer in self.optimizers
        ]
        self.dataloader = SyntheticDataLoader(
            vocab_size=self.config.vocab_size,
            seq_len=job.training.seq_len,
            batch_size=job.training.local_batch_size,
            seed=job.training.seed,
            dp_rank=world.dp_rank,
            dp_world_size=world.dp_size,
        )
        self.progress = TrainState()
        self.tokens_per_step = job.training.local_batch_size * job.training.seq_len * world.dp_size
        self.step = make_step(self.parts, world, job, loss_over(self.tokens_per_step))
        self.checkpointer = self._checkpointer()

    def run(self) -> None:
        """Load, then train to the last step; or make a seed checkpoint and stop."""
        options = self.job.checkpoint
        if options.create_seed_checkpoint:
            self.checkpointer.save(0, last_step=True)
            log.info("made the seed checkpoint step-0")
            return
        self.checkpointer.load(step=options.load_step)
        last = self.job.training.steps
        if self.progress.step >= last:
            log.warning("step %d is reached already: nothing to train", self.progress.step)
        while self.progress.step < last:
            loss, rate = self.train_step()
            if self.world.place.rank == 0:
                self._print(
                    f"step={self.progress.step} loss={loss!r} loss_hex={loss.hex()} "
                    f"lr={rate!r} lr_hex={rate.hex()}"
                )
            self.checkpointer.save(self.progress.step, last_step=self.progress.step == last)

    def _print(self, line: str) -> None:
        try:
            print(line, file=self.out, flush=True)
        except OSError as error:  # whoever read it has gone, or its disk is full
            log.warning("steps are printed no more, and go on: %s", error)
            streams.discard(self.out)

    def train_step(self) -> tuple[float, float]:
        """One step; the mean loss over all ranks' tokens, and the learning rate that was used."""
        self.progress.step += 1
        self.progress.ntokens_seen += self.tokens_per_step
        # Drawn on every rank, used by those that hold the embedding: the streams stay in step.
        noise = int(torch.randint(2**62, ())) + self.world.dp_rank
        for part in self.parts:
            part.noise.manual_seed(noise)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        batch = next(self.dataloader).to(self.world.device)
        loss = self.step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        total = self.world.total(loss.float(), "dp_replicate", "fsdp", "pp")
        rate = float(self.lr_schedulers[0].get_last_lr()[0])
        self.checkpointer.maybe_wait_for_staging()
        for optimizer in self.optimizers:
            optimizer.step()
        self._balance_experts()
        for scheduler in self.lr_schedulers:
            scheduler.step()
        return float(total), rate

    def close(self) -> None:
        """Wait for saves in the background; their failures are raised here."""
        self.checkpointer.close()

    def _balance_experts(self) -> None:
        for part in self.parts:
            for moe in part.moe_layers():
                self.world.total(moe.tokens_per_expert_E, "dp_replicate", "fsdp")
                moe.move_bias()

    def _checkpointer(self) -> Any:
        from torchtitan_ckpt.adapter import MappingAdapter
        from torchtitan_ckpt.manager import CheckpointManager

        return CheckpointManager(
            self.job.checkpoint,
            dataloader=self.dataloader,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self.progress},
            sd_adapter=MappingAdapter(self.config.to_hf(), self.job.hf_assets_path),
            base_folder=self.job.dump_folder,
            hf_assets_path=self.job.hf_assets_path,
        )


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Let the same step give the same bits every time, and leave torch as it was."""
    strict, lax = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")
    if device.type == "cuda":
        # cuBLAS repeats its sums only with a workspace of its own; it asks when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # Sums over threads depend on how many there are, and models this small gain nothing.
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=lax)
        torch.set_num_threads(threads)
