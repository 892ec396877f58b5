"""How one state tensor relates to its parameter: sharded like it, its own, or local to the rank.

A file holds global tensors. Optimizers hold what they like: DTensors laid out as the parameter,
DTensors laid out otherwise (factored moments), plain tensors of the local shard's shape (optimizers
that work on `to_local()`), and plain tensors that every rank holds whole. `to_stored` makes the
global tensor, `allocate` the target for reading it under whatever sharding the parameter has now,
`from_stored` what the optimizer had. A *form* is written only where the default is not meant.

Defaults for a DTensor parameter: a tensor of the parameter's shape is sharded as the parameter is;
a number (0-d, or one element) is plain; anything else is a DTensor that every rank holds whole. For
a plain parameter every state tensor is plain, so what a run without sharding saved takes these
defaults when it is loaded into a sharded one. An optimizer that wants plain tensors there has been
stepped already (its present state shows what it wants), or speaks `CheckpointableState`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan_ckpt.state.tensors import distribute, like, local_of

# "local": plain, this rank's shard. "whole": plain, all of it. A list: placements of a DTensor of
# its own, one entry a mesh dimension, a tensor dimension to shard or None to replicate.
Form = str | list[int | None] | None


def local_leaves(states: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> frozenset[str]:
    """Names of flat state that one optimizer keeps as this rank's shards, from all its parameters.

    All ranks must agree, and on one parameter a whole tensor can have the shape of one rank's shard
    and not of another's: so a name counts only if it fits every parameter that has it.
    """
    fitting: set[str] = set()
    refuted: set[str] = set()
    for parameter, leaves in states:
        if isinstance(parameter, DTensor):
            shape = local_of(parameter).shape
            for name, value in leaves.items():
                if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim():
                    (fitting if value.shape == shape else refuted).add(name)
    return frozenset(fitting - refuted)


def to_stored(parameter: Tensor | None, value: Tensor, local: bool) -> tuple[Tensor, Form]:
    """The global tensor that a file holds for `value`, and the form if it is not the default.

    `local` says that plain values under this name are this rank's shards (`local_leaves`).
    """
    if isinstance(value, DTensor):
        whole = _without_partial(value)
        if not isinstance(parameter, DTensor):
            return whole, _encode(whole.placements)
        if whole.shape == parameter.shape:
            default = tuple(parameter.placements)
        else:
            default = _everywhere(parameter)
        ordinary = whole.placements == default and whole.device_mesh == parameter.device_mesh
        return whole, None if ordinary and whole.numel() > 1 else _encode(whole.placements)
    if not isinstance(parameter, DTensor) or (value.dim() == 0 and parameter.dim() > 0):
        return value, None
    if local and value.shape == local_of(parameter).shape:
        return like(parameter, value), "local"
    return value, None if value.numel() == 1 else "whole"


def allocate(
    parameter: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An uninitialised target for a stored tensor, holding only what this rank needs of it."""
    size = tuple(shape)
    if isinstance(parameter, DTensor) and size == tuple(parameter.shape):
        local = torch.empty(local_of(parameter).shape, dtype=dtype, device=device)
        return like(parameter, local)
    return torch.empty(size, dtype=dtype, device=device)


def from_stored(
    parameter: Tensor | None, value: Tensor, form: Form, live: Any = None, live_local: bool = False
) -> Tensor:
    """What the optimizer had, from what was read; `live` is its present value, if it has one."""
    if not isinstance(parameter, DTensor):
        return value
    if form is None and isinstance(live, Tensor):
        _, form = to_stored(parameter, live, live_local)
    if form == "local":
        return local_of(value)
    if form == "whole":
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(form, list) and len(form) == parameter.device_mesh.ndim:
        return _laid_out(value, parameter, _decode(form))
    if value.shape == parameter.shape or (form is None and value.numel() == 1):
        return value
    return _laid_out(value, parameter, _everywhere(parameter))


def _laid_out(value: Tensor, parameter: DTensor, placements: Sequence[Placement]) -> Tensor:
    mesh = parameter.device_mesh
    if isinstance(value, DTensor):
        moved: Tensor = value.redistribute(mesh, tuple(placements))
        return moved
    return distribute(value, mesh, placements)


def _everywhere(parameter: DTensor) -> tuple[Placement, ...]:
    return (Replicate(),) * parameter.device_mesh.ndim


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
