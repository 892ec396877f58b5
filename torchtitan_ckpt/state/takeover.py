"""Handing prepared state to optimizers, and the way back.

Everything that can be checked was checked before (`optimizer_load`). What can still fail is other
people's code - `__setstate__`, post-hooks, a swapper's restore - and then every optimizer goes back
to what it was (`remember`, which a `Change` calls). Lists and dicts of the optimizer keep their
identity: schedulers and callers hold references to its groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchtitan_ckpt.errors import CheckpointError, MismatchError, Problem
from torchtitan_ckpt.state.change import Undo
from torchtitan_ckpt.state.hyperparameters import values_of
from torchtitan_ckpt.state.slots import Fleet


@dataclass(slots=True)
class Taken:
    """New values: groups by (id of the optimizer, index), states by id of optimizer or speaker."""

    groups: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    states: dict[int, dict[Any, Any]] = field(default_factory=dict)
    spoken: dict[int, dict[Tensor, dict[str, Any]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Before:
    """An optimizer as it was, to go back to."""

    attributes: dict[str, Any]
    groups: list[dict[str, Any]]
    state: dict[Any, Any]


def take_over(fleet: Fleet, taken: Taken) -> None:
    """Assign `taken` to every optimizer of `fleet`. Raises `MismatchError` if one refuses."""
    try:
        for optimizer in fleet.optimizers:
            _assign(fleet, optimizer, taken)
        for speaker in fleet.speakers:
            speaker.checkpoint_restore(taken.spoken.get(id(speaker), {}))
        for optimizer in fleet.optimizers:
            for hook in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
                hook(optimizer)
    except CheckpointError:
        raise
    except Exception as error:
        raise MismatchError(
            Problem(
                code="optimizer.refused",
                what="an optimizer refused the state; all optimizers are as they were",
                actual=f"{type(error).__name__}: {error}",
                cause="its __setstate__, its post-hook or its checkpoint_restore raised",
            )
        ) from error


def remember(fleet: Fleet) -> Undo:
    """What brings the optimizers of `fleet` back to what they are now."""
    before = [
        _Before(dict(o.__dict__), [dict(g) for g in o.param_groups], dict(o.state))
        for o in fleet.optimizers
    ]
    spoken = _spoken_states(fleet)

    def undo() -> None:
        for optimizer, was in zip(fleet.optimizers, before, strict=True):
            _go_back(optimizer, was)
        for speaker in fleet.speakers:
            speaker.checkpoint_restore(spoken[id(speaker)])

    return undo


def _spoken_states(fleet: Fleet) -> dict[int, dict[Tensor, Mapping[str, Any]]]:
    states: dict[int, dict[Tensor, Mapping[str, Any]]] = {id(s): {} for s in fleet.speakers}
    for slot in fleet.slots:
        if slot.speaker is not None and (held := slot.state()):
            states[id(slot.speaker)][slot.parameter] = dict(held)
    return states


def _assign(fleet: Fleet, optimizer: Optimizer, taken: Taken) -> None:
    """Give `optimizer` its new groups and states; lists and dicts keep their identity."""
    groups = []
    for index, old in enumerate(optimizer.param_groups):
        named: dict[str, Any] = {k: old[k] for k in ("params", "param_names") if k in old}
        groups.append({**named, **taken.groups.get((id(optimizer), index), values_of(old))})
    mine = [slot for slot in fleet.slots if slot.optimizer is optimizer]
    new: defaultdict[Any, Any] = defaultdict(dict, optimizer.state)
    for slot in mine:
        if slot.speaker is None:
            new.pop(slot.parameter, None)
    new.update(taken.states.get(id(optimizer), {}))
    old_groups, old_state = optimizer.param_groups, optimizer.state
    if _wants_setstate(optimizer, any(slot.speaker is not None for slot in mine)):
        pickled: dict[str, Any] = {"state": new, "param_groups": groups}
        optimizer.__setstate__(pickled)
        groups, new = optimizer.param_groups, optimizer.state
    for target, source in zip(old_groups, groups, strict=True):
        target.clear()
        target.update(source)
    old_state.clear()
    old_state.update(new)
    optimizer.param_groups, optimizer.state = old_groups, old_state


def _wants_setstate(optimizer: Optimizer, spoken: bool) -> bool:
    """torch's `__setstate__` of an Adam reads keys that a subclass of it may keep elsewhere."""
    definer = next(cls for cls in type(optimizer).__mro__ if "__setstate__" in vars(cls))
    foreign = type(optimizer).__module__.split(".")[0] != "torch"
    inherited = (
        foreign and definer.__module__.startswith("torch.optim.") and definer is not Optimizer
    )
    return not spoken and not inherited


def _go_back(optimizer: Optimizer, was: _Before) -> None:
    groups, state = was.attributes["param_groups"], was.attributes["state"]
    for target, source in zip(groups, was.groups, strict=True):
        target.clear()
        target.update(source)
    state.clear()
    state.update(was.state)
    optimizer.__dict__.clear()
    optimizer.__dict__.update(was.attributes)
