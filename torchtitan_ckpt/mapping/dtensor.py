"""Rules on DTensors: sharding is kept where a rule permits and moved, not gathered, where not.

A rule may run on local shards when each sharded dimension is carried whole: its outermost axis is
the outermost axis of a dimension on the other side, and the shards end where that axis's positions
end. Where that is not so (a head that is cut, experts that become keys, a fused dimension), the
offending mesh dimensions are first redistributed to another dimension that does carry, which keeps
the memory per rank, or replicated if there is none. No rule ever fuses or splits shard by shard.

Parts of a tensor that had to be redistributed remember the placements they came from, as an
attribute of the output tensors, so that the way back restores them without any state elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchtitan_ckpt.mapping import apply
from torchtitan_ckpt.mapping.apply import Part
from torchtitan_ckpt.mapping.group import Group
from torchtitan_ckpt.mapping.rule import Rule
from torchtitan_ckpt.mapping.view import Link, Shape, ShapeError, Side

_ORIGIN = "_torchtitan_ckpt_placements"
Placements = tuple[Placement, ...]


def run(group: Group, parts: Mapping[Part, DTensor], like: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one group of DTensors. Collective over the tensors' mesh where data must move."""
    rule = group.rule
    mesh, placements = _common(parts)
    if group.side == rule.big:
        taken = _take(rule, parts[0, ()], mesh, placements)
        made = {group.part_key(part): tensor for part, tensor in taken.items()}
    else:
        made = {group.big_key: _join(rule, parts, group.counts(), mesh, placements)}
    origins = {getattr(part, _ORIGIN, None) for part in parts.values()}
    origin = origins.pop() if len(origins) == 1 else None
    return {key: _as(like, key, _back(tensor, origin)) for key, tensor in made.items()}


def _back(value: DTensor, origin: Placements | None) -> DTensor:
    """Put a tensor into the placements that its source came from, where they fit it."""
    if origin is None or len(origin) != value.device_mesh.ndim:
        return value
    return _to(value, origin) if all(_dim_of(p) < value.ndim for p in origin) else value


def _plain(value: DTensor) -> DTensor:
    detached = apply.plain(value)
    assert isinstance(detached, DTensor)
    return detached


def _common(parts: Mapping[Part, DTensor]) -> tuple[DeviceMesh, Placements]:
    first = next(iter(parts.values()))
    if any(p.device_mesh != first.device_mesh for p in parts.values()):
        raise ShapeError("the parts lie on different device meshes")
    placements = tuple(first.placements)
    if any(tuple(p.placements) != placements for p in parts.values()):
        raise ShapeError("the parts have different placements")
    return first.device_mesh, placements


def _as(like: Mapping[str, Any], key: str, value: DTensor) -> DTensor:
    model = like.get(key)
    if isinstance(model, DTensor) and model.device_mesh == value.device_mesh:
        return _to(value, tuple(model.placements))
    return value


def _to(value: DTensor, placements: Placements) -> DTensor:
    """Redistribute, by torch where it can: strided shards are made whole first, and cut locally."""
    now = tuple(value.placements)
    if now == placements:
        return value
    strided = {_dim_of(p) for p in (*now, *placements) if isinstance(p, _StridedShard)}
    if not strided:
        return value.redistribute(placements=placements)
    whole = tuple(Replicate() if _dim_of(p) in strided else p for p in now)
    target = tuple(Replicate() if _dim_of(p) in strided else p for p in placements)
    value = value.redistribute(placements=whole).redistribute(placements=target)
    return value.redistribute(placements=placements)


def _dim_of(placement: Placement) -> int:
    if isinstance(placement, (Shard, _StridedShard)):
        return int(placement.dim)
    return -1


def _doubled(placements: Placements) -> bool:
    dims = [_dim_of(p) for p in placements if _dim_of(p) >= 0]
    return len(dims) != len(set(dims))


def _wrap(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: Shape) -> DTensor:
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        local,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def _carried(link: Link, here: Side, there: Side, dim: int, shards: int) -> int | None:
    """The dimension of `there` that is cut as `dim` of `here` is, into `shards`, or None."""
    members = here.axes_of(dim)
    if not members or here.first[dim]:
        return None
    if math.prod(link.extents[i] for i in members) != here.shape[dim]:
        return None
    outer = next((i for i in members if link.extents[i] != 1), members[0])
    other = there.terms[outer][0]
    if other < 0 or there.first[other]:
        return None
    opposite = there.axes_of(other)
    if math.prod(link.extents[i] for i in opposite) != there.shape[other]:
        return None
    long = [i for i in opposite if link.extents[i] != 1]
    if long and long[0] != outer:
        return None
    alone = len([i for i in members if link.extents[i] != 1]) <= 1 and len(long) <= 1
    return other if alone or link.extents[outer] % shards == 0 else None


def _image(
    links: Sequence[Link], to_small: bool, placements: Placements, sizes: Sequence[int]
) -> list[int | None]:
    """Per mesh dim: the dimension on the other side that a Shard becomes; None where it cannot."""
    total: dict[int, int] = {}
    for placement, size in zip(placements, sizes, strict=True):
        if _dim_of(placement) >= 0:
            total[_dim_of(placement)] = total.get(_dim_of(placement), 1) * size
    for placement, size in zip(placements, sizes, strict=True):
        # A strided shard is made of blocks cut by its split factor, whoever else cuts there.
        if isinstance(placement, _StridedShard):
            dim, blocks = _dim_of(placement), int(placement.split_factor)
            if (total[dim] // size) % blocks:
                total[dim] *= blocks
    out: list[int | None] = []
    for placement in placements:
        if isinstance(placement, Replicate):
            out.append(-1)
            continue
        dim = _dim_of(placement)
        if dim < 0:
            out.append(None)
            continue
        images = set()
        for link in links:
            here, there = (link.big, link.small) if to_small else (link.small, link.big)
            images.add(_carried(link, here, there, dim, total[dim]))
        out.append(images.pop() if len(images) == 1 else None)
    return out


def _movable(
    links: Sequence[Link], to_small: bool, shape: Shape, placements: Placements, mesh: DeviceMesh
) -> Placements:
    """Placements under which the rule can run on local shards, as near to the given as possible.

    Mesh dims are kept from the outermost on while what is kept so far is carried; the others move
    to a dimension that is not cut yet, one whose length their size divides if there is one.
    """
    sizes = [mesh.size(i) for i in range(mesh.ndim)]

    def fits(trial: Sequence[Placement], i: int) -> int | None:
        return _image(links, to_small, tuple(trial), sizes)[i]

    if all(dim is not None for dim in _image(links, to_small, placements, sizes)):
        return placements
    strided = {_dim_of(p) for p in placements if isinstance(p, _StridedShard)}
    kept: list[Placement] = [Replicate()] * mesh.ndim
    for i, placement in enumerate(placements):
        trial = [*kept[:i], placement, *kept[i + 1 :]]
        if _dim_of(placement) >= 0 and _dim_of(placement) not in strided:
            kept[i] = placement if fits(trial, i) is not None else kept[i]
    for i, placement in enumerate(placements):
        if _dim_of(placement) < 0 or kept[i] == placement:
            continue
        choices = []
        for dim, length in enumerate(shape):
            trial = [*kept[:i], Shard(dim), *kept[i + 1 :]]
            found = fits(trial, i)
            free = all(_dim_of(p) != dim for p in kept)
            if found is not None and free and length >= sizes[i]:
                choices.append((length % sizes[i] != 0, found, dim))
        if choices:
            kept[i] = Shard(min(choices)[2])
    return tuple(kept)


def _translate(placements: Placements, image: Sequence[int | None]) -> Placements:
    out: list[Placement] = []
    for placement, dim in zip(placements, image, strict=True):
        if dim is None:
            raise AssertionError("placements were made movable first")
        if isinstance(placement, _StridedShard):
            out.append(_StridedShard(dim, split_factor=placement.split_factor))
        elif isinstance(placement, Shard):
            out.append(Shard(dim))
        else:
            out.append(placement)
    return tuple(out)


def _take(
    rule: Rule, big: DTensor, mesh: DeviceMesh, placements: Placements
) -> dict[Part, DTensor]:
    value = _plain(big)
    if rule.identity:
        return {(0, ()): value}
    links = rule.links(tuple(big.shape))
    movable = _movable(links, True, tuple(big.shape), placements, mesh)
    image = _image(links, True, movable, [mesh.size(i) for i in range(mesh.ndim)])
    target = _translate(movable, image)
    local = apply.take(rule, _to(value, movable).to_local())
    out = {}
    for part, small in local.items():
        wrapped = _wrap(small, mesh, target, links[part[0]].small.shape)
        out[part] = _restored(wrapped, placements, movable, links)
    return out


def _restored(
    value: DTensor, placements: Placements, movable: Placements, links: Sequence[Link]
) -> DTensor:
    """Same shape on both sides: same placements. Else remember where it came from."""
    if placements == movable:
        return value
    if len(links) == 1 and links[0].big.shape == links[0].small.shape and not links[0].names:
        return _to(value, placements)
    if not any(isinstance(p, Partial) for p in placements):
        setattr(value, _ORIGIN, placements)
    return value


def _join(
    rule: Rule,
    parts: Mapping[Part, DTensor],
    counts: Mapping[str, int],
    mesh: DeviceMesh,
    placements: Placements,
) -> DTensor:
    if rule.identity:
        return _plain(parts[0, ()])
    shape = rule.big_shape(apply.part_shapes(rule, parts), counts)
    links = rule.links(shape)
    movable = _movable(links, False, links[0].small.shape, placements, mesh)
    image = _image(links, False, movable, [mesh.size(i) for i in range(mesh.ndim)])
    target = _translate(movable, image)
    local = {part: _to(value, movable).to_local() for part, value in parts.items()}
    big = _wrap(apply.join(rule, local, counts), mesh, target, shape)
    return _restored(big, placements, movable, links)


def local_box(tensor: torch.Tensor) -> tuple[Shape, Shape]:
    """Where this rank's part of a tensor lies in the whole: (offsets, sizes)."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offsets), tuple(sizes)
