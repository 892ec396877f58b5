"""How one state tensor relates to its parameter: sharded like it, its own, or local to the rank.

A file holds global tensors. Optimizers hold what they like: DTensors laid out as the parameter,
DTensors laid out otherwise (factored moments), plain tensors of the local shard's shape (optimizers
that work on `to_local()`), and plain tensors that every rank holds whole. `to_stored` makes the
global tensor, `allocate` the target for reading it under whatever sharding the parameter has now,
`from_stored` what the optimizer had. A *form* is written only where the default is not meant.

Defaults for a DTensor parameter: a tensor of the parameter's shape is sharded as the parameter is;
any other is plain and the same on all ranks. For a plain parameter every state tensor is plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan_ckpt.state.tensors import distribute, like, local_of

# "local": plain, this rank's shard. "whole": plain, all of it. A list: placements of a DTensor of
# its own, one entry a mesh dimension, a tensor dimension to shard or None to replicate.
Form = str | list[int | None] | None


def to_stored(parameter: Tensor | None, value: Tensor) -> tuple[Tensor, Form]:
    """The global tensor that a file holds for `value`, and the form if it is not the default."""
    if isinstance(value, DTensor):
        whole = _without_partial(value)
        if not isinstance(parameter, DTensor):
            return whole, _encode(whole.placements)
        as_parameter = (
            whole.shape == parameter.shape
            and whole.placements == parameter.placements
            and whole.device_mesh == parameter.device_mesh
        )
        return whole, None if as_parameter else _encode(whole.placements)
    if not isinstance(parameter, DTensor) or (value.dim() == 0 and parameter.dim() > 0):
        return value, None
    if value.shape == local_of(parameter).shape:
        return like(parameter, value), "local"
    return value, "whole" if value.shape == parameter.shape else None


def allocate(
    parameter: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An uninitialised target for a stored tensor, holding only what this rank needs of it."""
    size = tuple(shape)
    if isinstance(parameter, DTensor) and size == tuple(parameter.shape):
        local = torch.empty(local_of(parameter).shape, dtype=dtype, device=device)
        return like(parameter, local)
    return torch.empty(size, dtype=dtype, device=device)


def from_stored(parameter: Tensor | None, value: Tensor, form: Form, live: Any = None) -> Tensor:
    """What the optimizer had, from what was read; `live` is its present value, if it has one."""
    if not isinstance(parameter, DTensor):
        return value
    if form == "local":
        return local_of(value)
    if form == "whole":
        return value.full_tensor() if isinstance(value, DTensor) else value
    if form is None and isinstance(live, DTensor) and live.shape == value.shape:
        return _laid_out(value, parameter, live.placements)
    if not isinstance(form, list):
        return value
    if len(form) == parameter.device_mesh.ndim:
        return _laid_out(value, parameter, _decode(form))
    if value.shape == parameter.shape:  # another mesh than at the save: as the parameter lies
        return value
    return _laid_out(value, parameter, [Replicate()] * parameter.device_mesh.ndim)


def _laid_out(value: Tensor, parameter: DTensor, placements: Sequence[Placement]) -> Tensor:
    mesh = parameter.device_mesh
    if isinstance(value, DTensor):
        moved: Tensor = value.redistribute(mesh, tuple(placements))
        return moved
    return distribute(value, mesh, placements)


def _without_partial(value: DTensor) -> DTensor:
    """A DTensor that still waits for a sum over ranks cannot be stored; the sum can."""
    if not any(p.is_partial() for p in value.placements):
        return value
    target = [Replicate() if p.is_partial() else p for p in value.placements]
    whole: DTensor = value.redistribute(value.device_mesh, target)
    return whole


def _encode(placements: Sequence[Placement]) -> list[int | None]:
    return [p.dim if type(p) is Shard else None for p in placements]


def _decode(form: Sequence[int | None]) -> list[Placement]:
    return [Replicate() if dim is None else Shard(dim) for dim in form]
