"""The state of one training job as a single flat dict, and back.

Keys are torchtitan's: the model's names at the top, everything else under the name of its state
(`optimizer.`, `lr_scheduler.`, `dataloader.`, `train_state.`, and whatever else was registered).
How each part is flattened is the affair of `state`; files are that of `formats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.config import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    TRAINING_STATES,
)
from torchtitan_ckpt.errors import Problem
from torchtitan_ckpt.manifest import Manifest
from torchtitan_ckpt.state import model as models
from torchtitan_ckpt.state import rng
from torchtitan_ckpt.state.change import Change
from torchtitan_ckpt.state.dataloader import (
    dataloader_state_dict,
    dataloader_template,
    prepare_dataloader_load,
)
from torchtitan_ckpt.state.leaves import UNREAD
from torchtitan_ckpt.state.objects import (
    LAYOUT,
    object_state_dict,
    object_template,
    prepare_object_load,
)
from torchtitan_ckpt.state.optimizer import optimizer_state_dict, optimizer_template
from torchtitan_ckpt.state.optimizer_load import prepare_optimizer_load
from torchtitan_ckpt.state.scheduler import (
    prepare_scheduler_load,
    scheduler_state_dict,
    scheduler_template,
)


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
        self._registered = tuple(states)
        self._own_loader = dataloader is not None
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

    def state_problems(self, model: Iterable[str]) -> list[Problem]:
        """What a save would find out late: states without methods, and names that cannot be told
        apart on disk.

        A checkpoint is one flat dict: whose a key is is told by what comes before its first dot.
        `model` are the model's own keys.
        """
        taken = {MODEL, OPTIMIZER, LR_SCHEDULER} | ({DATALOADER} if self._own_loader else set())
        heads = {key.partition(".")[0] for key in model} & {*self.names, *TRAINING_STATES}
        problems = []
        for name in self._registered:
            why = "is taken" if name in taken else "has a dot or is empty"
            if name in taken or not name or "." in name:
                problems.append(_name_problem(f"a state cannot be called {name!r}: it {why}"))
        problems += [
            Problem(
                code="config.state-methods",
                what=f"the state {name!r} ({type(value).__name__}) can be neither saved nor loaded",
                expected="an object with state_dict and load_state_dict, or a dict",
                fix="give it the two methods",
            )
            for name, value in self._all_parts()
            if not (isinstance(value, MutableMapping) or _has_methods(value))
        ]
        problems += [
            _name_problem(f"the model has {name!r} at its top, as a state of the job is called")
            for name in sorted(heads)
        ]
        return problems

    def _all_parts(self) -> Iterator[tuple[str, Any]]:
        for name, parts in ((OPTIMIZER, self.optimizers), (LR_SCHEDULER, self.lr_schedulers)):
            several = isinstance(parts, Iterable) and not hasattr(parts, "state_dict")
            yield from ((name, part) for part in (parts if several else filter(None, [parts])))
        yield from self.objects.items()

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
        """One state besides the model, under whole keys; generators go with the train state."""
        flat = {f"{name}.{key}": value for key, value in self._state(name).items()}
        if name == TRAIN_STATE:
            drawn = object_state_dict(self._generators())
            flat |= {f"{rng.PREFIX}{key}": value for key, value in drawn.items()}
        return flat

    def targets(self, names: Sequence[str], manifest: Manifest) -> dict[str, Any]:
        """What to read for the named states: tensors to fill, `UNREAD` for objects.

        The model's own tensors are filled in place; those of other states never are.
        """
        flat: dict[str, Any] = {}
        for name in names:
            if name == MODEL:
                flat.update(self.model_state())
            else:
                wanted = self._template(name, manifest)
                flat.update({f"{name}.{key}": value for key, value in wanted.items()})
        return flat

    def restore(self, names: Sequence[str], flat: Mapping[str, Any]) -> list[str]:
        """Give the named states their values out of `flat`. Returns notes."""
        return [note for change in self.prepare(names, flat) for note in change()]

    def prepare(
        self, names: Sequence[str], flat: Mapping[str, Any], *, keep: Sequence[str] = ()
    ) -> list[Change]:
        """Find everything in `flat` that the named states refuse, and change nothing.

        What it returns is to be applied in order. The caller's objects come first, for they are
        other people's code and may still refuse.
        `keep` names hyperparameters of the optimizer that stay as they are.
        """
        ordered = sorted(names, key=lambda name: name not in self.objects)
        return [self._prepare(name, flat, keep) for name in ordered]

    def _prepare(self, name: str, flat: Mapping[str, Any], keep: Sequence[str]) -> Change:
        if name == MODEL:
            values = {key: v for key, v in flat.items() if self.state_of(key) == MODEL}
            return Change(lambda: self._give_model(values))
        values = _under(f"{name}.", flat)
        if name == OPTIMIZER:
            return prepare_optimizer_load(self.optimizers, self.parts, values, keep=keep)
        if name == LR_SCHEDULER:
            return prepare_scheduler_load(self.lr_schedulers, values, self.parts)
        if name == DATALOADER:
            return prepare_dataloader_load(self.objects[name], values)
        return prepare_object_load(self.objects[name], values)

    def _give_model(self, values: Mapping[str, Any]) -> list[str]:
        models.load_model_state_dict(self.parts, values)
        return []

    def generator_targets(self, names: Sequence[str], manifest: Manifest) -> dict[str, Any]:
        """What to read for this rank's random number generators, where the train state is read.

        They are no part of `targets`: a file may lack them, and they fit no other split.
        """
        if TRAIN_STATE not in names:
            return {}
        wanted = object_template(self._generators(), manifest, rng.PREFIX)
        return {f"{rng.PREFIX}{key}": value for key, value in wanted.items()}

    def restore_generators(
        self, flat: Mapping[str, Any], ranks: Ranks, undo: ExitStack
    ) -> list[str]:
        """Let the random number generators of all ranks go on as they were saved, or of none.

        Returns the reason for none as a note. The last act of a load: nothing may draw after it.
        """
        mine = self._generators()
        values = _under(rng.PREFIX, flat)
        # Ranks of the whole job, as in the keys; `ranks` may be some of them.
        why = mine.unfit(values, Ranks.current().size)
        unfit = next(filter(None, ranks.gather(why)), "")
        if unfit:
            return [f"random number generators go on as they are: {unfit}"]
        with ranks.together("restoring the random number generators"):
            return prepare_object_load(mine, values).within(undo)

    def _generators(self) -> rng.RngState:
        tensors = self.model_state().values()
        return rng.RngState(
            split=rng.split_in_words(tensors), accelerator=rng.accelerator_of(tensors)
        )

    def _template(self, name: str, manifest: Manifest) -> dict[str, Any]:
        prefix = f"{name}."
        if name == OPTIMIZER:
            return optimizer_template(self.optimizers, self.parts, manifest, prefix)
        if name == LR_SCHEDULER:
            template = scheduler_template(manifest, prefix)
        elif name == DATALOADER:
            template = dataloader_template(self.objects[name], manifest, prefix)
        else:
            template = object_template(self.objects[name], manifest, prefix)
            template = {k: v for k, v in template.items() if not rng.is_key(prefix + k)}
        # What the live state has and the file lacks in any form must show as missing.
        held = {key.partition(".")[0] for key in template}
        live = self._state(name).keys() - {LAYOUT}
        return {
            **dict.fromkeys((k for k in live if k.partition(".")[0] not in held), UNREAD),
            **template,
        }

    def _state(self, name: str) -> dict[str, Any]:
        if name == OPTIMIZER:
            return optimizer_state_dict(self.optimizers, self.parts)
        if name == LR_SCHEDULER:
            return scheduler_state_dict(self.lr_schedulers, self.parts)
        if name == DATALOADER:
            return dataloader_state_dict(self.objects[name])
        return object_state_dict(self.objects[name])


def _has_methods(value: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(value, name, None)) for name in names)


def _name_problem(what: str) -> Problem:
    return Problem(
        code="config.state-name",
        what=what,
        expected="names without a dot, each used once, that are no module at the model's top",
        cause="keys on disk begin with the name of their state; those of the model have no prefix",
        fix="register the state, or name the module, otherwise",
    )


def _under(prefix: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): v for key, v in flat.items() if key.startswith(prefix)}


def _any(value: Any) -> bool:
    """Whether an optional part of a job is there; torchtitan's containers may be empty."""
    if value is None:
        return False
    try:
        return len(value) > 0
    except TypeError:
        return True
