"""Which optimizer holds which parameter, under which name, and who knows its true state.

A `Slot` is one parameter in one group of one optimizer. Names come from the model by identity, so
the order of parameters and groups never matters; a group's own `param_names` chooses among the
names of a tie, and stands in where the model does not know the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan_ckpt.errors import Problem, SaveError, list_keys
from torchtitan_ckpt.state.forms import local_leaves
from torchtitan_ckpt.state.leaves import flatten
from torchtitan_ckpt.state.names import Names, as_parts, parameter_names, strip_segments
from torchtitan_ckpt.state.swapped import CheckpointableState

Optimizers = Optimizer | Iterable[Optimizer]


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One parameter of one optimizer; `speaker` tells its state where the optimizer does not."""

    optimizer: Optimizer
    group_index: int
    parameter: Tensor
    names: Names
    speaker: CheckpointableState | None

    @property
    def group(self) -> dict[str, Any]:
        group: dict[str, Any] = self.optimizer.param_groups[self.group_index]
        return group

    def state(self) -> Mapping[str, Any]:
        """The present state; reading it never creates an entry."""
        if self.speaker is not None:
            held = self.speaker.checkpoint_state(self.parameter)
            return {key: value for key, value in held.items() if value is not None}
        state: Mapping[str, Any] = self.optimizer.state.get(self.parameter, {})
        return state


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """All optimizers of this process with their slots and the labels of what has no parameter."""

    optimizers: tuple[Optimizer, ...]
    labels: tuple[str, ...]
    slots: tuple[Slot, ...]
    speakers: tuple[CheckpointableState, ...]

    def local_leaves(self) -> dict[int, frozenset[str]]:
        """Per optimizer (by id): names of its state that are plain shards of this rank."""
        held: dict[int, list[tuple[Tensor, dict[str, Any]]]] = {}
        for slot in self.slots:
            if isinstance(slot.parameter, DTensor):
                leaves, _ = flatten(slot.state())
                held.setdefault(id(slot.optimizer), []).append((slot.parameter, leaves))
        return {key: local_leaves(states) for key, states in held.items()}

    def empty_groups(self) -> Iterator[tuple[str, Optimizer, dict[str, Any]]]:
        """Groups without parameters, as (owner label, optimizer, group)."""
        for optimizer, label in zip(self.optimizers, self.labels, strict=True):
            for index, group in enumerate(optimizer.param_groups):
                if not group["params"]:
                    yield f"@empty.{label}.{index}", optimizer, group

    def globals(self) -> Iterator[tuple[str, Optimizer, dict[Any, Any]]]:
        """State that belongs to no parameter, as (owner label, optimizer, state)."""
        for optimizer, label in zip(self.optimizers, self.labels, strict=True):
            own = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
            yield f"@global.{label}", optimizer, own

    def outside_groups(self) -> Iterator[tuple[Optimizer, Tensor]]:
        """Parameters of which an optimizer holds state, although none of its groups has them."""
        for optimizer in self.optimizers:
            grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for key, held in optimizer.state.items():
                if isinstance(key, Tensor) and held and id(key) not in grouped:
                    yield optimizer, key


def fleet_of(optimizers: Optimizers, model_parts: nn.Module | Iterable[nn.Module]) -> Fleet:
    """Gather every parameter of every optimizer. Raises `SaveError` for what cannot be named."""
    containers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    known = parameter_names(as_parts(model_parts))
    flat: list[tuple[Optimizer, CheckpointableState | None]] = []
    for container in containers:
        spoken = _speaker(container)
        flat += [(inner, _speaker(inner) or spoken) for inner in _inner(container)]

    counts: dict[str, int] = {}
    labels: list[str] = []
    slots: list[Slot] = []
    for optimizer, speaker in flat:
        kind = type(optimizer).__name__
        labels.append(f"{kind}.{counts.setdefault(kind, 0)}")
        counts[kind] += 1
        slots += _slots(optimizer, speaker, known)
    _check_unique(slots)
    speakers = {id(s): s for _, s in flat if s is not None}
    return Fleet(tuple(o for o, _ in flat), tuple(labels), tuple(slots), tuple(speakers.values()))


def _inner(container: Optimizer) -> list[Optimizer]:
    """torchtitan's container is an Optimizer over all parameters that iterates over the real ones.

    Its own groups are for step hooks only and are no state.
    """
    return list(container) if isinstance(container, Iterable) else [container]


def _speaker(optimizer: Any) -> CheckpointableState | None:
    """The optimizer itself, or the adapter that was set as its attribute `checkpointable`."""
    for candidate in (optimizer, getattr(optimizer, "checkpointable", None)):
        if isinstance(candidate, CheckpointableState):
            return candidate
    return None


def _slots(
    optimizer: Optimizer, speaker: CheckpointableState | None, known: Mapping[int, Names]
) -> Iterator[Slot]:
    unnamed: list[str] = []
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        seen: set[int] = set()
        for position, parameter in enumerate(group["params"]):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            names = known.get(id(parameter))
            if given is not None:
                names = _prefer(strip_segments(given[position]), names)
            if names is None:
                unnamed.append(f"group {index}, parameter {position} {tuple(parameter.shape)}")
                continue
            yield Slot(optimizer, index, parameter, names, speaker)
    if unnamed:
        raise SaveError(
            Problem(
                code="optimizer.unnamed",
                what=f"{type(optimizer).__name__} holds parameters of no model part: "
                + "; ".join(unnamed[:8]),
                cause="the model was wrapped or rebuilt after the optimizer was made",
                fix="make the optimizer last, or build it from (name, parameter) pairs",
            )
        )


def _prefer(given: str, names: Names | None) -> Names:
    if names is None:
        return Names(given)
    if given not in names.all:
        return names
    return Names(given, tuple(name for name in names.all if name != given))


def _check_unique(slots: Iterable[Slot]) -> None:
    owners: dict[str, Slot] = {}
    twice: list[str] = []
    for slot in slots:
        if owners.setdefault(slot.names.canonical, slot) is not slot:
            twice.append(slot.names.canonical)
    if twice:
        raise SaveError(
            Problem(
                code="optimizer.duplicate",
                what=f"two optimizer entries would be written under one name: {list_keys(twice)}",
                cause="one parameter in two optimizers, or two model parts with the same names",
                fix="give each parameter to one optimizer, and each model part its own names",
            )
        )
