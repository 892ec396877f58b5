"""Whether boxes tile a tensor: every element exactly once, no gap and no overlap.

Exact and in time proportional to the number of boxes: the signed corners of a tiling cancel in its
inside and leave the corners of the whole. Pure arithmetic on offsets and sizes in elements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Ints = tuple[int, ...]
Box = tuple[Ints, Ints]  # offsets, sizes

_MAX_CUT_DIMS = 10
_MAX_PAIRS = 300_000


def explain_cover(shape: Ints, boxes: Sequence[Box]) -> str:
    """An empty string when `boxes` tile `shape` exactly, else what is wrong in words."""
    zero = (0,) * len(shape)
    if len(boxes) == 1 and boxes[0] == (zero, shape):
        return ""
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"a shard of {len(sizes)} dimensions of a tensor of {len(shape)}"
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
            return (
                f"the shard at {list(offsets)} of size {list(sizes)} reaches beyond {list(shape)}"
            )
    total = math.prod(shape)
    filled = [box for box in boxes if math.prod(box[1])]
    if not total:
        return ""
    cut = [d for d, n in enumerate(shape) if any(o[d] != 0 or s[d] != n for o, s in filled)]
    if len(cut) > _MAX_CUT_DIMS:
        return f"it is split along {len(cut)} dimensions, which no trainer does"
    covered = sum(math.prod(sizes) for _, sizes in filled)
    if covered == total and _corners_cancel([shape[d] for d in cut], cut, filled):
        return ""
    overlap = _first_overlap(filled)
    if overlap:
        return overlap
    return f"its shards hold {covered} of {total} elements: {_first_gap(shape, filled)}"


def _corners_cancel(whole: list[int], cut: list[int], boxes: Sequence[Box]) -> bool:
    corners: Counter[Ints] = Counter()
    _add_corners(corners, [0] * len(cut), whole, -1)
    for offsets, sizes in boxes:
        start = [offsets[d] for d in cut]
        _add_corners(corners, start, [offsets[d] + sizes[d] for d in cut], 1)
    return not any(corners.values())


def _add_corners(corners: Counter[Ints], start: list[int], stop: list[int], sign: int) -> None:
    points: list[tuple[Ints, int]] = [((), sign)]
    for a, b in zip(start, stop, strict=True):
        points = [q for p, s in points for q in (((*p, a), s), ((*p, b), -s))]
    for point, s in points:
        corners[point] += s


def _first_overlap(boxes: Sequence[Box]) -> str:
    ordered = sorted(boxes)
    pairs = 0
    for i, (offsets, sizes) in enumerate(ordered):
        for other, other_sizes in ordered[i + 1 :]:
            pairs += 1
            if pairs > _MAX_PAIRS or (offsets and other[0] >= offsets[0] + sizes[0]):
                break
            if all(
                o < p + m and p < o + n
                for o, n, p, m in zip(offsets, sizes, other, other_sizes, strict=True)
            ):
                return f"the shards at {list(offsets)} and {list(other)} overlap"
    return ""


def _first_gap(shape: Ints, boxes: Sequence[Box]) -> str:
    """Where the first missing row of the first split dimension is, for a message."""
    for d, whole in enumerate(shape):
        reached = 0
        for start, stop in sorted((o[d], o[d] + s[d]) for o, s in boxes):
            if start > reached:
                return f"nothing holds {reached} to {start - 1} of dimension {d}"
            reached = max(reached, stop)
        if reached < whole:
            return f"nothing holds {reached} to {whole - 1} of dimension {d}"
    return "they do not tile it"
