"""Calls into the caller's own code: what a job registered gives or takes its state, an adapter
converts.

Whatever such code raises becomes a CheckpointError that names the object, the exception and the
line it came from, so that one rank's failure can be told on all others.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from torchtitan_ckpt.device_failures import own_error
from torchtitan_ckpt.errors import (
    CheckpointError,
    MappingError,
    MismatchError,
    Problem,
    SaveError,
)

_STATE = "correct it there, or leave this state out (exclude_from_loading for a load)"
_ADAPTER = "torchtitan-ckpt check shows what is wrong with an adapter"


def state_of(obj: Any) -> dict[Any, Any]:
    """A shallow copy of what `obj.state_dict()` returns. Raises `SaveError`."""
    try:
        state = obj.state_dict()
    except Exception as error:
        raise _ours(
            error, SaveError, "state.not-given", "could not give its state", obj, "state_dict"
        ) from error
    return _checked(state, obj, "state_dict", SaveError, "state.no-dict")


def give(
    obj: Any, *state: Any, code: str = "state.refused", method: str = "load_state_dict"
) -> None:
    """Hand `state` to `obj` by `method`. Raises `MismatchError`."""
    try:
        getattr(obj, method)(*state)
    except Exception as error:
        raise _ours(error, MismatchError, code, "refused its state", obj, method) from error


def converted(adapter: Any, method: str, state: dict[str, Any]) -> dict[str, Any]:
    """What `adapter.to_hf(state)` or `adapter.from_hf(state)` returns. Raises `MappingError`."""
    try:
        state = getattr(adapter, method)(state)
    except Exception as error:
        raise _ours(
            error, MappingError, "adapter.failed", "could not convert the model", adapter, method
        ) from error
    return _checked(state, adapter, method, MappingError, "adapter.no-dict")


def _checked(
    state: Any, obj: Any, method: str, kind: type[CheckpointError], code: str
) -> dict[Any, Any]:
    if not isinstance(state, Mapping):
        raise kind(
            Problem(
                code=code,
                what=f"{type(obj).__name__}.{method} gives no dict",
                where=_place(obj, method),
                expected="a dict",
                actual=type(state).__name__,
                fix=_ADAPTER if kind is MappingError else "let it return a dict, empty if need be",
            )
        )
    return dict(state)


def _ours(
    error: Exception, kind: type[CheckpointError], code: str, what: str, obj: Any, method: str
) -> Exception:
    known = own_error(error)
    if isinstance(known, CheckpointError):
        return known
    last = traceback.extract_tb(error.__traceback__)[-1]
    return kind(
        Problem(
            code=code,
            what=f"{type(obj).__name__} {what}",
            where=f"{_place(obj, method)}, raised in {last.filename}, line {last.lineno}",
            actual=f"{type(error).__name__}: {error}",
            cause="its own code, which the training job brought along",
            fix=_ADAPTER if kind is MappingError else _STATE,
        )
    )


def _place(obj: Any, method: str) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}.{method}"
