"""Where steps are counted: with every parameter's state, or once in the group.

torch's optimizers count in the state, swapping ones in the group, and either reads the other's
files. The rule is for `step` alone; no other value is known to lie in both places.

- It goes to where the running optimizer counts. In the state: one that speaks
  `CheckpointableState`, one of torch's, one whose state holds it now. In the group: another one
  whose group holds it, and a speaker that counts there too.
- It is taken from the same place in the file, or else from the other one. A group's count is that
  of its parameters, which must agree. Where none of them had any state, a file that says nothing
  means 0, and a count for which there is no state to go to is dropped; both are said.
- Nothing moves where the optimizer shows neither place, or where a user's own value of this name
  lies in the group of one of torch's optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_ckpt.state.hyperparameters import required_state
from torchtitan_ckpt.state.slots import Slot
from torchtitan_ckpt.state.tensors import local_of

STEP = "step"


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one group: what the file has, by parameter, and where its optimizer counts."""

    slot: Slot
    in_states: Mapping[str, Any]
    in_group: Mapping[str, Any]
    stateless: bool
    to_state: bool
    to_group: bool

    @classmethod
    def of(
        cls,
        slots: Sequence[Slot],
        states: Mapping[str, Mapping[str, Any]],
        groups: Mapping[str, Mapping[str, Any]],
    ) -> Steps:
        """`slots` are all of one group; `states` and `groups` what the file has, by parameter."""
        stateless = not any(states.values())
        return cls(slots[0], _counts(states), _counts(groups), stateless, *_places(slots))

    @property
    def only_in_group(self) -> bool:
        """Whether a state needs no count of its own."""
        return self.to_group and not self.to_state

    def give_group(self, values: Mapping[str, dict[str, Any]]) -> list[str]:
        """Put the count into the group's values, by parameter, or out of them; returns notes."""
        if self.to_group:
            return self._fill(values)
        if not self.to_state:
            return []
        dropped = [count for own in values.values() if (count := own.pop(STEP, None))]
        if not (dropped and self.stateless):
            return []
        kind = type(self.slot.optimizer).__name__
        return [f"step {dropped[0]} dropped: {kind} counts with the state, of which there is none"]

    def _fill(self, values: Mapping[str, dict[str, Any]]) -> list[str]:
        lacking = [own for own in values.items() if STEP not in own[1]]
        if not lacking or not (self.in_states or self.stateless):
            return []  # where it lies nowhere, `resolve` says so
        first = next(iter(self.in_states.values()), 0)
        for name, own in lacking:
            own[STEP] = _as(self.slot.group[STEP], self.in_states.get(name, first))
        return ["step is 0: nothing of the group had any state"] if self.stateless else []

    def give_state(self, name: str, tree: dict[Any, Any], live: Mapping[Any, Any]) -> None:
        """Put the count into one parameter's state, or out of it where it moves to the group."""
        if self.to_state:
            if STEP not in tree and not self.in_states and name in self.in_group:
                tree[STEP] = _as(live.get(STEP), self.in_group[name])
        elif self.to_group and STEP not in live and name not in self.in_group:
            tree.pop(STEP, None)


def _places(slots: Sequence[Slot]) -> tuple[bool, bool]:
    """Whether the count goes to the state, and whether it goes to the group."""
    slot = slots[0]
    in_group = STEP in slot.group
    if slot.speaker is not None:
        return True, in_group
    if STEP in required_state(slot.optimizer, slot.group):
        return not in_group, False
    return not in_group and any(STEP in slot.state() for slot in slots), in_group


def _counts(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: own[STEP] for name, own in values.items() if _is_count(own.get(STEP))}


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _as(like: Any, count: Any) -> Any:
    """`count`, in a copy, of the type of `like`; as torch's optimizers have it without one."""
    number = local_of(count).item() if isinstance(count, Tensor) else count
    if isinstance(like, Tensor):
        return torch.tensor(number, dtype=like.dtype, device=like.device)
    return torch.tensor(float(number), dtype=torch.float32) if like is None else type(like)(number)
