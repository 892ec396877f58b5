"""How an optimizer that keeps its state elsewhere says so, and what happens to one that does not.

Swapping optimizers move moments to host memory between steps and leave placeholders behind: tensors
whose storage was resized to zero, or None. Reading those gives garbage, a crash, or silence,
depending on the reader. Such an optimizer speaks `CheckpointableState`; one that has emptied its
tensors without speaking it is refused with the parameter's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from torchtitan_ckpt.errors import Problem
from torchtitan_ckpt.state.tensors import is_emptied


@runtime_checkable
class CheckpointableState(Protocol):
    """An optimizer, or an adapter around one, that knows where the true state of a parameter lies.

    Values are plain tensors of this rank's shard (or numbers), on any device. `step` belongs here
    even if the optimizer keeps it in the group. A key whose value is None is simply left out of the
    file; `checkpoint_restore` gets what the file has, never a None, and fills in the rest itself.
    What it cannot fill in it says with `RequiredState`.
    """

    def checkpoint_wait(self) -> None:
        """Finish pending moves; what `checkpoint_state` hands out is then true until the next step.

        Called by the thread that trains, before a save and before a load.
        """
        ...

    def checkpoint_state(self, parameter: Tensor) -> Mapping[str, Any]:
        """The state of one parameter, empty if it has none yet. Not copied: the caller copies."""
        ...

    def checkpoint_restore(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Become the optimizer with exactly these states; a parameter not named has none.

        The groups have their hyperparameters already. A `step` there is right where none of the
        group's parameters is named: it stays.

        All or nothing. The tensors are the caller's gift: on the host, never written to again. What
        `checkpoint_state` returned before must stay intact, since a rollback hands it in again.
        """
        ...


@runtime_checkable
class RequiredState(Protocol):
    """What a `CheckpointableState` may say besides."""

    def checkpoint_required(self, group: Mapping[str, Any]) -> Collection[str]:
        """Keys without which it cannot step a parameter of such a group, if that has state.

        A file that lacks one is refused by the parameter's name, before anything has changed.
        """
        ...


def required_of(speaker: object, group: Mapping[str, Any]) -> frozenset[str]:
    """What a speaker says that it needs; nothing where it says nothing."""
    if isinstance(speaker, RequiredState):
        return frozenset(speaker.checkpoint_required(group))
    return frozenset()


def emptied_problem(name: str, key: str, value: Any) -> Problem | None:
    """The refusal for a state tensor without bytes behind it, or None."""
    if not isinstance(value, Tensor) or not is_emptied(value):
        return None
    return Problem(
        code="optimizer.emptied",
        what=f"{name}: its optimizer state {key} has {value.numel()} elements and no storage",
        where=f"state.{name}.{key}",
        cause="the optimizer swapped it out (storage resized to zero) and does not say where to",
        fix="let the optimizer implement torchtitan_ckpt.state.swapped.CheckpointableState, "
        "or save model-only",
    )
