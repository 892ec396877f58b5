"""What broken managers are made from: this project's own, behind methods that an edit replaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan_ckpt import CheckpointManager

KEY = "layers.11.attention.wo.weight"
HEAD, TABLE = "lm_head.weight", "tok_embeddings.weight"


class Edited:
    """Ours, behind methods that a specimen replaces; `job` is what the constructor was given."""

    Config = CheckpointManager.Config

    def __init__(self, config: Any, **job: Any) -> None:
        self.job = job
        self.base = Path(job["base_folder"])
        self.steps = self.base / config.folder
        self.inner = CheckpointManager(self.configured(config), **self.given(job))

    def configured(self, config: Any) -> Any:
        return config

    def given(self, job: dict[str, Any]) -> dict[str, Any]:
        return job

    def save(self, step: int, last_step: bool = False) -> Any:
        return self.inner.save(step, last_step)

    def load(self, step: int = -1) -> Any:
        loaded = self.inner.load(step)
        self.loaded()
        return loaded

    def loaded(self) -> None:
        """What follows a load."""

    def maybe_wait_for_staging(self) -> None:
        self.inner.maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        self.inner.maybe_wait_for_saving()

    def close(self) -> None:
        self.inner.close()

    # what edits look at

    @property
    def resharded(self) -> bool:
        """On several ranks, and from a step that is neither a seed nor an export."""
        counter = self.job["states"]["train_state"].state_dict()
        return dist.get_world_size() > 1 and int(counter["step"]) > 0

    @property
    def seeded(self) -> bool:
        return (self.steps / "step-0").is_dir()

    def newest(self) -> Path | None:
        """The folder with the highest number, whatever is in it."""
        found = {int(p.name[5:]): p for p in self.complete() if p.is_dir()}
        return found[max(found)] if found else None

    def complete(self) -> list[Path]:
        return [p for p in self.steps.glob("step-*") if re.fullmatch(r"step-\d+", p.name)]

    def parameters(self) -> Iterator[tuple[str, Any, Any]]:
        """Name, parameter, optimizer, in the order of the groups."""
        for part, optimizer in zip(self.job["model_parts"], self.job["optimizers"], strict=True):
            names = {id(p): name for name, p in part.named_parameters()}
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield names[id(parameter)], parameter, optimizer

    def state_of(self, key: str) -> dict[str, Any]:
        return next((o.state.get(p, {}) for name, p, o in self.parameters() if name == key), {})


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
