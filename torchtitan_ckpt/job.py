"""The state of one training job as a single flat dict, and back.

Keys are torchtitan's: the model's names at the top, everything else under the name of its state
(`optimizer.`, `lr_scheduler.`, `dataloader.`, `train_state.`, and whatever else was registered).
How each part is flattened is the affair of `state`; files are that of `formats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from torchtitan_ckpt.config import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAINING_STATES,
)
from torchtitan_ckpt.manifest import Manifest
from torchtitan_ckpt.state import model as models
from torchtitan_ckpt.state.leaves import UNREAD
from torchtitan_ckpt._interim import load_object_state, object_state_dict
from torchtitan_ckpt.state.optimizer import optimizer_state_dict, optimizer_template
from torchtitan_ckpt.state.optimizer_load import load_optimizer_state_dict
from torchtitan_ckpt._interim import load_scheduler_state, scheduler_state_dict


class JobState:
    """What a job is made of. `names` are the states besides the model that it has."""

    def __init__(
        self,
        model_parts: nn.Module | Iterable[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        dataloader: Any,
        states: Mapping[str, Any],
    ) -> None:
        self.parts = [model_parts] if isinstance(model_parts, nn.Module) else list(model_parts)
        self.optimizers = optimizers
        self.lr_schedulers = lr_schedulers
        self.objects: dict[str, Any] = {}
        if dataloader is not None:
            self.objects[DATALOADER] = dataloader
        self.objects.update(states)
        self.names: tuple[str, ...] = tuple(
            name
            for name, there in (
                (OPTIMIZER, _any(optimizers)),
                (LR_SCHEDULER, _any(lr_schedulers)),
                *((name, True) for name in self.objects),
            )
            if there
        )

    def state_of(self, key: str) -> str:
        """The name of the state that a key of a checkpoint belongs to."""
        head = key.partition(".")[0]
        return head if head in self.names or head in TRAINING_STATES else MODEL

    def model_state(self) -> dict[str, Any]:
        """The model's live tensors by canonical name."""
        return models.model_state_dict(self.parts)

    def collect(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """The model and the named states (default: all) as one flat dict of live values."""
        flat = self.model_state()
        for name in self.names if names is None else names:
            flat.update(self.state_dict_of(name))
        return flat

    def state_dict_of(self, name: str) -> dict[str, Any]:
        """One state besides the model, under whole keys."""
        return {f"{name}.{key}": value for key, value in self._state(name).items()}

    def targets(self, names: Sequence[str], manifest: Manifest) -> dict[str, Any]:
        """What to read for the model and the named states: tensors to fill, `UNREAD` for objects.

        The model's own tensors are filled in place; an optimizer's never are.
        """
        flat = self.model_state()
        for name in names:
            if name == MODEL:
                continue
            prefix = f"{name}."
            if name == OPTIMIZER:
                wanted = optimizer_template(self.optimizers, self.parts, manifest, prefix)
                flat.update({prefix + key: value for key, value in wanted.items()})
            else:
                flat.update(dict.fromkeys(self.state_dict_of(name), UNREAD))
        return flat

    def restore(self, names: Sequence[str], flat: Mapping[str, Any]) -> list[str]:
        """Give every named state its values out of `flat`; the model last. Returns notes."""
        notes = self.restore_states([name for name in names if name != MODEL], flat)
        model = {key: value for key, value in flat.items() if self.state_of(key) == MODEL}
        models.load_model_state_dict(self.parts, model)
        return notes

    def restore_states(self, names: Sequence[str], flat: Mapping[str, Any]) -> list[str]:
        """Give states besides the model their values out of `flat`. Returns notes."""
        notes: list[str] = []
        for name in names:
            prefix = f"{name}."
            values = {k.removeprefix(prefix): v for k, v in flat.items() if k.startswith(prefix)}
            if name == OPTIMIZER:
                notes += load_optimizer_state_dict(self.optimizers, self.parts, values)
            elif name == LR_SCHEDULER:
                load_scheduler_state(self.lr_schedulers, values)
            else:
                load_object_state(self.objects[name], values)
        return notes

    def _state(self, name: str) -> dict[str, Any]:
        if name == OPTIMIZER:
            return optimizer_state_dict(self.optimizers, self.parts)
        if name == LR_SCHEDULER:
            return scheduler_state_dict(self.lr_schedulers)
        return object_state_dict(self.objects[name])


def _any(value: Any) -> bool:
    """Whether an optional part of a job is there; torchtitan's containers may be empty."""
    if value is None:
        return False
    try:
        return len(value) > 0
    except TypeError:
        return True
