"""Managers that are wrong on several ranks or with a seed, for the chapters reshard and seed."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from conformance.checks.seed import ALONE
from tests.specimens.edited import KEY, TABLE, Edited, local
from torchtitan_ckpt import CheckpointManager
from torchtitan_ckpt.errors import CheckpointError


class ShardsOfTheNeighbour(Edited):
    def loaded(self) -> None:
        if not self.resharded:
            return
        mine = next((p.detach() for name, p, _ in self.parameters() if name == TABLE), None)
        held = [None] * dist.get_world_size()
        dist.all_gather_object(held, None if mine is None else local(mine).clone())
        other = held[dist.get_rank() - 1]
        if mine is not None and other is not None and other.shape == local(mine).shape:
            local(mine).copy_(other)


class MomentsNotResharded(Edited):
    def loaded(self) -> None:
        if self.resharded:
            for optimizer in self.job["optimizers"]:
                optimizer.state.clear()


class MomentsUnderOtherNames(Edited):
    def loaded(self) -> None:
        one, two = self.state_of(KEY), self.state_of("layers.10.attention.wo.weight")
        if self.resharded and one and two:
            one["exp_avg"], two["exp_avg"] = two["exp_avg"], one["exp_avg"]


class BufferOfTheFirstRankOnly(Edited):
    def load(self, step: int = -1) -> Any:
        buffers = [b for part in self.job["model_parts"] for b in part.buffers()]
        before = [b.clone() for b in buffers]
        loaded = self.inner.load(step)
        if self.resharded and dist.get_rank():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        return loaded


class RatesFromWhereItStopped(Edited):
    def loaded(self) -> None:
        if self.resharded:
            for scheduler in self.job["lr_schedulers"]:
                scheduler.base_lrs = [g["lr"] for g in scheduler.optimizer.param_groups]


class EqualShardsAreCopies(Edited):
    """Of what all shards have alike, the first is taken for the whole: the other rows stay."""

    def load(self, step: int = -1) -> Any:
        before = {name: local(p.detach()).clone() for name, p, _ in self.parameters()}
        loaded = self.inner.load(step)
        for name, parameter, _ in self.parameters() if self.resharded else ():
            mine = local(parameter.detach())
            if dist.get_rank() and mine.dim() == 1 and mine.unique().numel() == 1 < mine.numel():
                mine.copy_(before[name])
        return loaded


class PlainTensorsRefused(Edited):
    def load(self, step: int = -1) -> Any:
        for name, parameter, _ in self.parameters() if dist.get_world_size() > 1 else ():
            if not isinstance(parameter, DTensor) and not self.seeded:
                raise TypeError(f"{name} is no DTensor, and has no mesh")
        return self.inner.load(step)


class PositionDropped(Edited):
    def load(self, step: int = -1) -> Any:
        try:
            return self.inner.load(step)
        except CheckpointError as error:
            if "dataloader" not in str(error):
                raise
            config = replace(self.inner.config, exclude_from_loading=["dataloader"])
            return CheckpointManager(config, **self.job).load(step)


class _FirstRanks:
    """A state of which the first rank's value is taken for everybody's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> Any:
        held = [self.inner.state_dict()]
        dist.broadcast_object_list(held)
        return held[0]

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class RanksNotCompared(Edited):
    def given(self, job: dict[str, Any]) -> dict[str, Any]:
        states = {k: v if k == "train_state" else _FirstRanks(v) for k, v in job["states"].items()}
        return {**job, "states": states}


class ShardWise:
    """An adapter that turns the rows of one weight shard by shard, and back."""

    KEY = "layers.0.feed_forward.w1.weight"

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def to_hf(self, state: Any) -> Any:
        return self.inner.to_hf(self.turned(dict(state)))

    def from_hf(self, state: Any) -> Any:
        return self.turned(self.inner.from_hf(state))

    def turned(self, state: dict[str, Any]) -> dict[str, Any]:
        value = state.get(self.KEY)
        if isinstance(value, DTensor):
            state[self.KEY] = DTensor.from_local(
                local(value.detach()).flip(0),
                value.device_mesh,
                value.placements,
                shape=value.shape,
                stride=value.stride(),
            )
        return state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ExportsShardByShard(Edited):
    def given(self, job: dict[str, Any]) -> dict[str, Any]:
        adapter = job["sd_adapter"]
        return {**job, "sd_adapter": ShardWise(adapter) if adapter else None}


class SeedOnTheFirstRankOnly(Edited):
    def load(self, step: int = -1) -> Any:
        mine = next((p.detach() for name, p, _ in self.parameters() if name == TABLE), None)
        before = None if mine is None else local(mine).clone()
        loaded = self.inner.load(step)
        if self.seeded and dist.get_rank() and mine is not None:
            local(mine).copy_(before)
        return loaded


class SeedWaitsForOthers(Edited):
    """Sets up what a job on several ranks needs, and makes the seed when nobody has come."""

    def configured(self, config: Any) -> Any:
        if config.create_seed_checkpoint and dist.get_world_size() == 1:
            with contextlib.suppress(dist.DistStoreError):
                patience = timedelta(seconds=ALONE + 10)
                dist.TCPStore("localhost", 0, 2, is_master=True, timeout=patience)
        return config


class SeedOnlyWithAnExport(Edited):
    """An option that has nothing to do with seeds decides whether there is one."""

    def save(self, step: int, last_step: bool = False) -> Any:
        config = self.inner.config
        seeds = config.create_seed_checkpoint and not config.last_save_in_hf
        return False if seeds and dist.get_world_size() == 1 else self.inner.save(step, last_step)


class SeedWithPosition(Edited):
    def save(self, step: int, last_step: bool = False) -> Any:
        if step == 0:
            text = json.dumps(self.job["dataloader"].state_dict())
            Path(self.base, "position").write_text(text)
        return self.inner.save(step, last_step)

    def loaded(self) -> None:
        if self.seeded and dist.get_world_size() == 1:
            state = json.loads(Path(self.base, "position").read_text())
            self.job["dataloader"].load_state_dict(state)


class SeedByMany(Edited):
    """A seed is to it a last step like any other, put under another name."""

    def configured(self, config: Any) -> Any:
        self.seeds = config.create_seed_checkpoint and dist.get_world_size() > 1
        return replace(config, create_seed_checkpoint=False) if self.seeds else config

    def save(self, step: int, last_step: bool = False) -> Any:
        saved = self.inner.save(1 if self.seeds else step, last_step)
        if self.seeds and dist.get_rank() == 0:
            (self.steps / "step-1").rename(self.steps / "step-0")
        return saved


class SeedLoadsWhatFits(Edited):
    def load(self, step: int = -1) -> Any:
        if not self.seeded:
            return self.inner.load(step)
        config = replace(self.inner.config, excuse_mismatch=["*"])
        return CheckpointManager(config, **self.job).load(step)


class _Excuses(Edited):
    """Goes on where the model of the seed differs in this one way."""

    code = ""

    def load(self, step: int = -1) -> Any:
        try:
            return self.inner.load(step)
        except CheckpointError as error:
            if not self.seeded or {problem.code for problem in error.problems} != {self.code}:
                raise
        return True


class SeedOfAnotherShape(_Excuses):
    code = "load.shape"


class SeedOfAnotherDtype(_Excuses):
    code = "load.dtype"
