"""What a model's tensors may hold, and how a caller may hold them: two tables of kinds.

A fresh norm is all ones, a fresh bias all zeros, upcycled experts are equal; a model hands over
views, Parameters and an OrderedDict. A conversion depends on none of it. Nothing here judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch

from conformance.fingerprint import State, same_bits, without_nan


@dataclass(frozen=True, slots=True)
class Fill:
    """What is in the tensors of a model, made from tensors of noise, and in words."""

    make: Callable[[State], State]
    words: str


@dataclass(frozen=True, slots=True)
class Hold:
    """The same tensors handed over otherwise, and why that may fail.

    `files` says whether what is read from files may come so, too.
    """

    make: Callable[[State], Mapping[str, torch.Tensor]]
    files: bool
    cause: str
    remedy: str


def filled(kind: str, state: State, tied: Container[str]) -> State:
    """The state with such values; ties stay free of NaN, as in noise."""
    return without_nan(FILLS[kind].make(state), tied)


def _each(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    return lambda state: {key: make(value) for key, value in state.items()}


def _all(number: float) -> Callable[[State], State]:
    """One number everywhere but in codes of a byte; NaN only where there is one."""

    def make(value: torch.Tensor) -> torch.Tensor:
        fits = _inexact(value) or not math.isnan(number)
        return torch.full_like(value, number) if fits and not _codes(value) else value

    return _each(make)


def _inexact(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _codes(value: torch.Tensor) -> bool:
    """Whether a tensor is of a float of one byte, for which torch has little arithmetic."""
    return value.is_floating_point() and value.element_size() == 1


def _equal(state: State) -> State:
    """Every tensor holds what the first one of its shape and dtype holds."""
    first: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
    numbers = without_nan(state, state)
    return {k: first.setdefault((v.shape, v.dtype), v).clone() for k, v in numbers.items()}


def _equal_slices(state: State) -> State:
    def make(value: torch.Tensor) -> torch.Tensor:
        return value[:1].expand_as(value).clone() if value.dim() else value

    return _each(make)(without_nan(state, state))


def _zero_tail(value: torch.Tensor) -> torch.Tensor:
    if _codes(value) or not value.dim() or len(value) < 2:
        return value
    out = value.clone()
    out[-max(1, len(value) // 4) :] = 0
    return out


def _ordered(state: State) -> Mapping[str, torch.Tensor]:
    """As `Module.state_dict()` gives it, with `_metadata`."""
    out = torch.nn.Module().state_dict()
    out.update(state)
    return out


def _parameters(*, requires_grad: bool) -> Callable[[State], State]:
    def make(value: torch.Tensor) -> torch.Tensor:
        if _inexact(value):
            return torch.nn.Parameter(value, requires_grad=requires_grad)
        return value

    return _each(make)


def _transposed(value: torch.Tensor) -> torch.Tensor:
    return value.mT.contiguous().mT if value.dim() > 1 else value


def _offset(value: torch.Tensor) -> torch.Tensor:
    """In the middle of a larger storage, and of longer rows."""
    if not value.dim():
        return _offset(value.reshape(1))[0]
    room = value.new_zeros((*value.shape[:-1], value.shape[-1] + 3))
    return room[..., 2:-1].copy_(value)


def _shared(state: State) -> State:
    """Equal tensors are one."""
    first: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
    out = {}
    for key, value in state.items():
        seen = first.setdefault((value.shape, value.dtype), [])
        out[key] = next((one for one in seen if same_bits(one, value)), value)
        if out[key] is value:
            seen.append(value)
    return out


FILLS: dict[str, Fill] = {
    "noise": Fill(lambda state: state, "any bits"),
    "zeros": Fill(_all(0), "all zeros"),
    "ones": Fill(_all(1), "all ones"),
    "nan": Fill(_all(math.nan), "all NaN"),
    "equal": Fill(_equal, "equal to another"),
    "equal-slices": Fill(_equal_slices, "of equal slices"),
    "zero-tail": Fill(_each(_zero_tail), "zero in its last rows"),
}
_STRIDES = "memory is read in its own order: a view, a storage, fixed strides"
_BY_SHAPE = "index by shape; `reshape` or `contiguous` where `view` refuses"
HOLDS: dict[str, Hold] = {
    "plain": Hold(lambda state: state, True, "", ""),
    "ordered": Hold(
        _ordered,
        True,
        "the class of the dict is looked at: `state_dict()` gives an OrderedDict",
        "take any mapping",
    ),
    "parameters": Hold(
        _parameters(requires_grad=True),
        False,
        "a Parameter that wants gradients is taken otherwise than a tensor",
        "detach what comes in: `state_dict(keep_vars=True)` gives Parameters",
    ),
    "frozen": Hold(
        _parameters(requires_grad=False),
        False,
        "a frozen Parameter is taken otherwise than a tensor",
        "choose keys by name, not by class or `requires_grad`",
    ),
    "transposed": Hold(_each(_transposed), True, _STRIDES, _BY_SHAPE),
    "offset": Hold(_each(_offset), True, _STRIDES, _BY_SHAPE),
    "shared": Hold(
        _shared,
        False,
        "keys that share memory are taken for one tensor",
        "choose keys by name: ties are the config's to say",
    ),
}
