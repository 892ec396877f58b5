"""Boxes: which part of a tensor a rank holds, and how a part lies in the bytes of the whole.

Pure geometry over shapes, offsets and sizes in elements; `local_boxes` is the one function that
looks at a DTensor. Splits follow torch: a dimension is cut into ceil-sized chunks, the last ones
short or empty, and placements apply from left to right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

Ints = tuple[int, ...]
Run = tuple[int, int]  # start and length along one dimension


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: `offsets` and `sizes` in the whole, `local` its place in a rank's own."""

    offsets: Ints
    sizes: Ints
    local: Ints

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


class UnevenStrided(ValueError):
    """A strided sharding whose description can be read in two ways that differ."""


# --- what a rank holds --------------------------------------------------------------------------


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank, detached; for a plain tensor the tensor itself."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.detach()


def local_boxes(tensor: torch.Tensor) -> tuple[Box, ...]:
    """The boxes of the whole that this rank holds, none where the rank is outside the mesh.

    Raises UnevenStrided, and ValueError for partial sums and for a local tensor of another shape
    than its placements say.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        zero = (0,) * len(shape)
        return (Box(zero, shape, zero),)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    mesh_shape = tuple(tensor.device_mesh.shape)
    boxes = boxes_of(shape, mesh_shape, tuple(coordinate), describe(tensor.placements))
    local = tuple(tensor.to_local().shape)
    held = [0] * len(shape)
    for box in boxes:
        held = [max(h, at + n) for h, at, n in zip(held, box.local, box.sizes, strict=True)]
    if math.prod(held) != math.prod(local) or (boxes and tuple(held) != local):
        raise ValueError(
            f"this rank holds {list(local)} where {tuple(tensor.placements)} of {list(shape)} "
            f"gives {held}"
        )
    return boxes


def describe(placements: Sequence[Placement]) -> tuple[tuple[int, int], ...]:
    """Placements as (dim, split factor); dim -1 for a replica, split factor 0 for a plain shard."""
    out = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            out.append((placement.dim, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            out.append((placement.dim, 0))
        elif isinstance(placement, Replicate):
            out.append((-1, 0))
        else:
            raise ValueError(f"placement {placement} holds a partial sum, not values")
    return tuple(out)


@lru_cache(maxsize=8192)
def boxes_of(
    shape: Ints, mesh_shape: Ints, coordinate: Ints, placements: tuple[tuple[int, int], ...]
) -> tuple[Box, ...]:
    """The boxes at one coordinate of a mesh: the product of the runs along each dimension."""
    per_dim: list[list[Run]] = []
    for dim, size in enumerate(shape):
        steps = [
            (split, mesh_shape[axis], coordinate[axis])
            for axis, (d, split) in enumerate(placements)
            if d == dim
        ]
        per_dim.append(runs_of(size, tuple(steps)))
    boxes = []
    for combination in product(*(_with_local(runs) for runs in per_dim)):
        offsets, sizes, local = zip(*combination, strict=True) if combination else ((), (), ())
        boxes.append(Box(offsets, sizes, local))
    return tuple(box for box in boxes if box.numel)


def _with_local(runs: list[Run]) -> list[tuple[int, int, int]]:
    out, at = [], 0
    for start, length in runs:
        out.append((start, length, at))
        at += length
    return out


@lru_cache(maxsize=8192)
def runs_of(size: int, steps: tuple[tuple[int, int, int], ...]) -> list[Run]:
    """The runs of `range(size)` at one place; a step is (split factor or 0, parts, which part).

    A strided step stands for a cut that came after the plain ones to its right (FSDP over TP).
    Where both readings give the same runs on every rank there is nothing to choose.
    """
    runs = _left_to_right(size, steps)
    if any(split for split, _, _ in steps) and not _readings_agree(
        size, tuple((split, parts) for split, parts, _ in steps)
    ):
        raise UnevenStrided(
            f"{size} rows do not divide evenly over the strided sharding "
            f"{[(split, parts) for split, parts, _ in steps]}"
        )
    return runs


@lru_cache(maxsize=4096)
def _readings_agree(size: int, steps: tuple[tuple[int, int], ...]) -> bool:
    for place in product(*(range(parts) for _, parts in steps)):
        here = tuple((split, parts, at) for (split, parts), at in zip(steps, place, strict=True))
        other = _plain_first(size, here)
        if other is not None and _left_to_right(size, here) != other:
            return False
    return True


def _left_to_right(size: int, steps: Sequence[tuple[int, int, int]]) -> list[Run]:
    runs: list[Run] = [(0, size)] if size else []
    for split, parts, at in steps:
        if split:
            pieces = [_chunk(runs, split, i) for i in range(split)]
            runs = _merge([run for piece in pieces for run in _chunk(piece, parts, at)])
        else:
            runs = _chunk(runs, parts, at)
    return runs


def _plain_first(size: int, steps: Sequence[tuple[int, int, int]]) -> list[Run] | None:
    """The runs when each strided step is taken after the plain ones right of it, if it says so."""
    order: list[tuple[int, int, int]] = []
    for index, (split, parts, at) in enumerate(steps):
        right = [step for step in steps[index + 1 :] if not step[0]]
        if split and math.prod(p for _, p, _ in right) != split:
            return None
        if not split:
            order.append((0, parts, at))
    order += [(0, parts, at) for split, parts, at in reversed(steps) if split]
    return _left_to_right(size, order)


def _chunk(runs: list[Run], parts: int, at: int) -> list[Run]:
    """Part `at` of torch.chunk over the concatenation of `runs`; trailing parts may be empty."""
    total = sum(length for _, length in runs)
    step = -(-total // parts)
    begin, end = min(step * at, total), min(step * (at + 1), total)
    out, passed = [], 0
    for start, length in runs:
        low, high = max(begin - passed, 0), min(end - passed, length)
        if low < high:
            out.append((start + low, high - low))
        passed += length
    return out


def _merge(runs: list[Run]) -> list[Run]:
    out: list[Run] = []
    for start, length in runs:
        if out and out[-1][0] + out[-1][1] == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((start, length))
    return out


# --- relations of boxes -------------------------------------------------------------------------


def intersect(a: tuple[Ints, Ints], b: tuple[Ints, Ints]) -> tuple[Ints, Ints] | None:
    """The common part of two (offsets, sizes), or None."""
    offsets = tuple(map(max, a[0], b[0]))
    ends = tuple(min(o + n, p + m) for o, n, p, m in zip(a[0], a[1], b[0], b[1], strict=True))
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def find_gap_or_overlap(shape: Ints, boxes: Sequence[tuple[Ints, Ints]]) -> str:
    """Empty when the boxes tile the shape exactly; else a sentence with the place.

    Linear in the number of boxes: they tile the whole exactly when their volumes add up to it and
    all corners cancel in pairs but those of the whole (then every element is covered an odd number
    of times, and the volume says once).
    """
    for offsets, sizes in boxes:
        if any(o < 0 or o + n > s for o, n, s in zip(offsets, sizes, shape, strict=True)):
            return f"a part at {list(offsets)} of {list(sizes)} lies outside {list(shape)}"
    held, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if len(shape) > 8 or _corners_cancel(shape, boxes):
        return "" if held == whole else f"{whole - held} of {whole} elements are in no part"
    return _first_overlap(boxes) or f"{whole - held} of {whole} elements are in no part"


def _corners_cancel(shape: Ints, boxes: Sequence[tuple[Ints, Ints]]) -> bool:
    odd: set[Ints] = set()
    zero = (0,) * len(shape)
    for offsets, sizes in ((zero, shape), *boxes):
        if 0 in sizes:
            continue
        ends = ((o, o + n) for o, n in zip(offsets, sizes, strict=True))
        odd.symmetric_difference_update(set(product(*ends)))
    return not odd


def _first_overlap(boxes: Sequence[tuple[Ints, Ints]]) -> str:
    ordered = sorted(boxes)[:2000]  # enough to name a place; the verdict does not depend on it
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if box[0] and other[0][0] >= box[0][0] + box[1][0]:
                break  # sorted by the first offset: nothing further can meet this box
            common = intersect(box, other)
            if common:
                return f"two parts overlap at {list(common[0])}, {list(common[1])}"
    return ""


# --- boxes in bytes -----------------------------------------------------------------------------


def strides_of(shape: Ints) -> Ints:
    """Strides, in elements, of a dense row-major tensor."""
    out = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        out[dim] = out[dim + 1] * max(shape[dim + 1], 1)
    return tuple(out)


def hull(shape: Ints, sizes: Ints) -> int:
    """Elements from the first to the last of a box, in the row-major order of `shape`."""
    if 0 in sizes:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides_of(shape), strict=True))


def is_dense(shape: Ints, sizes: Ints) -> bool:
    """Whether a box of a row-major tensor is one run of elements."""
    return hull(shape, sizes) == math.prod(sizes)


def split_box(
    shape: Ints, offsets: Ints, sizes: Ints, limit: int, align: Ints | None = None
) -> Iterator[tuple[Ints, Ints]]:
    """Cut a box into parts of at most `limit` elements (or as small as can be), in byte order.

    Without `align` it is the hull that counts, since a hull is what is read. With `align` cuts fall
    on its multiples, counted from the whole's origin, and the elements count. Every dimension
    before the one that is cut has size one, so a part of a dense target is dense.
    """
    measure = math.prod(sizes) if align else hull(shape, sizes)
    dim = next((d for d, n in enumerate(sizes) if n > (align[d] if align else 1)), None)
    if measure <= limit or dim is None:
        yield offsets, sizes
        return
    unit = align[dim] if align else 1
    inner = sizes[dim + 1 :]
    if align:
        rows = limit // max(math.prod(sizes[:dim]) * math.prod(inner), 1)
    else:
        rows = (
            1 + max(limit - hull(shape, (*(1,) * (dim + 1), *inner)), 0) // strides_of(shape)[dim]
        )
    rows = max(rows // unit, 1) * unit
    at, end = offsets[dim], offsets[dim] + sizes[dim]
    while at < end:
        stop = min((at // unit * unit) + rows, end)
        part_offsets = (*offsets[:dim], at, *offsets[dim + 1 :])
        part_sizes = (*sizes[:dim], stop - at, *inner)
        if stop - at <= unit:
            yield from split_box(shape, part_offsets, part_sizes, limit, align)
        else:
            yield part_offsets, part_sizes
        at = stop
