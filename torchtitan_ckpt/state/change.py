"""A state's new values, checked and not given yet, and the way back from them.

Giving values runs other people's code - a `load_state_dict`, a `__setstate__`, a hook - which may
refuse when others have theirs already, on this rank or another. So whoever gives remembers first,
and one failure takes everything back. How an optimizer is remembered is `takeover`'s affair.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Undo = Callable[[], None]

logger = logging.getLogger(__name__)


def _nothing() -> None:
    """For a state that is not brought back, as the model's: it is filled while it is read."""


@dataclass(frozen=True, slots=True)
class Change:
    """`apply` gives the values and returns notes; `remember` returns what takes them back."""

    apply: Callable[[], list[str]]
    remember: Callable[[], Undo] = lambda: _nothing

    def within(self, undo: contextlib.ExitStack) -> list[str]:
        """Apply; `undo`, unwound by a failure here or later, takes it back."""
        undo.callback(_try, self.remember())
        return self.apply()

    def __call__(self) -> list[str]:
        """Apply, or leave everything as it was and raise. Returns notes."""
        with contextlib.ExitStack() as undo:
            notes = self.within(undo)
            undo.pop_all()
        return notes


def _try(undo: Undo) -> None:
    """The failure that is being told must not be hidden by another, nor end the way back."""
    try:
        undo()
    except Exception:
        logger.exception("after a load that failed, a state could not be brought back")


def remember(*objects: Any) -> Undo:
    """What brings objects back to the states that they offer now; tensors are copied."""
    undos = [_remember(obj) for obj in objects]

    def undo() -> None:
        for one in undos:
            one()

    return undo


def _remember(obj: Any) -> Undo:
    """A dict gets its items back; an object its state, through its own `load_state_dict`.

    One that offers no copy of its state, or refuses that too, gets the attributes that it has now,
    which takes back whatever was assigned.
    """
    if isinstance(obj, MutableMapping) and not hasattr(obj, "load_state_dict"):
        return _assigning(obj, dict(obj))
    back = _assigning(obj.__dict__, dict(obj.__dict__)) if hasattr(obj, "__dict__") else _nothing
    try:
        state = _copied(obj.state_dict())
    except Exception:
        return back

    def undo() -> None:
        try:
            obj.load_state_dict(state)
        except Exception:
            back()

    return undo


def _assigning(target: MutableMapping[Any, Any], items: dict[Any, Any]) -> Undo:
    def undo() -> None:
        target.clear()
        target.update(items)

    return undo


def _copied(value: Any) -> Any:
    """A copy that no load writes to. Tensors that require a gradient know no deepcopy."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return copy.deepcopy(value)
