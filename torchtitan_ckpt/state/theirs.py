"""Calls into the caller's own code: `state_dict` and `load_state_dict` of what a job registered.

Whatever such code raises becomes a CheckpointError that names the object, the exception and the
line it came from, so that one rank's failure can be told on all others.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from torchtitan_ckpt.errors import CheckpointError, MismatchError, Problem, SaveError


def state_of(obj: Any) -> dict[Any, Any]:
    """A shallow copy of what `obj.state_dict()` returns. Raises `SaveError`."""
    name = type(obj).__name__
    try:
        state = obj.state_dict()
    except CheckpointError:
        raise
    except Exception as error:
        raise SaveError(
            _problem("state.not-given", f"{name} could not give its state", obj, error)
        ) from error
    if not isinstance(state, Mapping):
        raise SaveError(
            Problem(
                code="state.no-dict",
                what=f"{name} gives no dict as its state",
                where=f"{type(obj).__module__}.{type(obj).__qualname__}.state_dict",
                expected="a dict",
                actual=type(state).__name__,
                fix="let its state_dict return a dict, empty where it has no state",
            )
        )
    return dict(state)


def give(obj: Any, state: Any, code: str = "state.refused") -> None:
    """Hand `state` to `obj.load_state_dict`. Raises `MismatchError`."""
    try:
        obj.load_state_dict(state)
    except Exception as error:
        raise MismatchError(
            _problem(code, f"{type(obj).__name__} refused its state", obj, error)
        ) from error


def _problem(code: str, what: str, obj: Any, error: Exception) -> Problem:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Problem(
        code=code,
        what=what,
        where=f"{type(obj).__module__}.{type(obj).__qualname__}, raised in {last.filename}, "
        f"line {last.lineno}",
        actual=f"{type(error).__name__}: {error}",
        cause="its own code, which the training job brought along",
        fix="correct it there, or leave this state out (exclude_from_loading for a load)",
    )
