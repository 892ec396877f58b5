"""How the elements of one tensor lie in another, as strides: the algebra under every op.

A `View` is a small tensor seen inside a big one: each of its dimensions is a list of `Axis`, and an
axis moves along one dimension of the big tensor by a fixed step. Splitting, permuting and narrowing
axes describes every op that only moves values (stack, fuse, transpose, rope, interleave), in both
directions, for any box and without data. Nothing here knows keys, files or torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

Shape = tuple[int, ...]
Ranges = tuple[tuple[int, int], ...]  # one half-open range an axis


class ShapeError(ValueError):
    """A shape that an op cannot take; the mapping turns it into a MappingError with the keys."""


@dataclass(frozen=True, slots=True)
class Axis:
    """`extent` positions, each `step` further along dimension `dim` of the big tensor."""

    extent: int
    dim: int
    step: int


Axes = tuple[Axis, ...]


def size(axes: Axes) -> int:
    return math.prod(axis.extent for axis in axes)


def factor(axes: Axes, inner: int) -> tuple[Axes, Axes]:
    """Cut a row-major list of axes into (outer, inner) so that the inner part counts `inner`."""
    tail: list[Axis] = []
    rest = list(axes)
    need = inner
    while need > 1 and rest:
        axis = rest.pop()
        if axis.extent == 0 or need % axis.extent == 0:
            tail.insert(0, axis)
            need = 1 if axis.extent == 0 else need // axis.extent
        elif axis.extent % need == 0:
            rest.append(Axis(axis.extent // need, axis.dim, axis.step * need))
            tail.insert(0, Axis(need, axis.dim, axis.step))
            need = 1
        else:
            raise ShapeError(f"{size(axes)} does not split into blocks of {inner}")
    if need != 1:
        raise ShapeError(f"{size(axes)} does not split into blocks of {inner}")
    return tuple(rest), tuple(tail)


@dataclass(frozen=True, slots=True)
class View:
    """A small tensor inside a big one. `keys` are the axes that became part of the key."""

    base: Shape
    dims: tuple[Axes, ...]
    keys: tuple[tuple[str, Axis], ...]
    start: Shape

    @classmethod
    def whole(cls, shape: Shape) -> View:
        dims = tuple((Axis(n, d, 1),) for d, n in enumerate(shape))
        return cls(shape, dims, (), (0,) * len(shape))

    @property
    def shape(self) -> Shape:
        return tuple(size(axes) for axes in self.dims)

    def with_dim(self, dim: int, axes: Axes) -> View:
        return replace(self, dims=(*self.dims[:dim], axes, *self.dims[dim + 1 :]))

    def narrow(self, dim: int, first: int, length: int) -> View:
        """Keep `length` positions of a dimension from `first` on."""
        axes = self.dims[dim]
        if not axes:
            return self
        head, tail = axes[0], axes[1:]
        inner = size(tail)
        if inner and (first % inner or length % inner):
            head, tail = self._merged(axes)
            inner = 1
        inner = max(inner, 1)
        start = list(self.start)
        start[head.dim] += head.step * (first // inner)
        kept = Axis(length // inner, head.dim, head.step)
        return replace(self.with_dim(dim, (kept, *tail)), start=tuple(start))

    @staticmethod
    def _merged(axes: Axes) -> tuple[Axis, Axes]:
        for outer, inner in pairwise(axes):
            if outer.dim != inner.dim or outer.step != inner.step * inner.extent:
                raise ShapeError("a permuted dimension cannot be cut inside a block")
        return Axis(size(axes), axes[-1].dim, axes[-1].step), ()


@dataclass(frozen=True, slots=True)
class Side:
    """Where a link's positions lie in one tensor: per axis the dimension and step, from `first`.

    `dim` -1 marks an axis that is part of this tensor's key and not of its coordinates.
    """

    shape: Shape
    first: Shape
    terms: tuple[tuple[int, int], ...]

    def axes_of(self, dim: int) -> list[int]:
        """The axes that move along a dimension, outermost (longest step) first."""
        found = [i for i, (d, _) in enumerate(self.terms) if d == dim]
        return sorted(found, key=lambda i: -self.terms[i][1])


@dataclass(frozen=True, slots=True)
class Link:
    """One small tensor's correspondence with the big one: equal positions hold equal values.

    The first `len(names)` axes are key axes: fixed numbers on the small side, a dimension on the
    big side.
    """

    names: tuple[str, ...]
    extents: Shape
    big: Side
    small: Side

    @classmethod
    def of(cls, view: View) -> Link:
        axes = [axis for _, axis in view.keys]
        small: list[tuple[int, int]] = [(-1, 0)] * len(axes)
        for dim, members in enumerate(view.dims):
            step = size(members)
            for axis in members:
                step = step // axis.extent if axis.extent else step
                small.append((dim, step))
                axes.append(axis)
        return cls(
            tuple(name for name, _ in view.keys),
            tuple(axis.extent for axis in axes),
            Side(view.base, view.start, tuple((axis.dim, axis.step) for axis in axes)),
            Side(view.shape, (0,) * len(view.dims), tuple(small)),
        )

    def ranges(self, side: Side, offsets: Shape, sizes: Shape, keys: Shape = ()) -> list[Ranges]:
        """The positions whose place on `side` is inside a box, as disjoint boxes of positions.

        On the small side `keys` fixes the key axes; on the big side they are free.
        """
        per_dim: list[list[dict[int, tuple[int, int]]]] = []
        for dim in range(len(side.shape)):
            members = side.axes_of(dim)
            low = offsets[dim] - side.first[dim]
            spans = [(self.extents[i], side.terms[i][1]) for i in members]
            cuts = _cuts(spans, low, low + sizes[dim])
            per_dim.append([dict(zip(members, cut, strict=True)) for cut in cuts])
        fixed = {i: (key, key + 1) for i, key in enumerate(keys)}
        out: list[Ranges] = []
        for combination in product(*per_dim):
            merged = dict(fixed)
            for part in combination:
                merged.update(part)
            out.append(tuple(merged.get(i, (0, n)) for i, n in enumerate(self.extents)))
        return [box for box in out if all(high > low for low, high in box)]

    def solid(self, side: Side, box: Ranges) -> Iterator[Ranges]:
        """Cut a box of positions until its place on `side` is a box too, or nearly.

        A place with gaps of at most one element in two is left whole: cutting it would give a
        piece a row.
        """
        for dim in range(len(side.shape)):
            members = side.axes_of(dim)
            needed = math.prod(box[i][1] - box[i][0] for i in members)
            span = 1 + sum((box[i][1] - box[i][0] - 1) * side.terms[i][1] for i in members)
            if span <= 2 * needed:
                continue
            outer = next(i for i in members if box[i][1] - box[i][0] > 1)
            for index in range(*box[outer]):
                yield from self.solid(side, (*box[:outer], (index, index + 1), *box[outer + 1 :]))
            return
        yield box

    def place(self, side: Side, box: Ranges) -> tuple[Shape, Shape]:
        """The bounding box (offsets, sizes) of a box of positions on one side."""
        offsets = list(side.first)
        sizes = [1] * len(side.shape)
        for (low, high), (dim, step) in zip(box, side.terms, strict=True):
            if dim >= 0:
                offsets[dim] += low * step
                sizes[dim] += (high - low - 1) * step
        return tuple(offsets), tuple(sizes)


def _cuts(spans: Sequence[tuple[int, int]], low: int, high: int) -> list[Ranges]:
    """Index ranges, outermost first, with `low <= sum(index * step) < high`, as disjoint boxes."""
    if not spans:
        return [()] if low <= 0 < high else []
    (extent, step), rest = spans[0], spans[1:]
    reach = sum((n - 1) * s for n, s in rest)
    whole = tuple((0, n) for n, _ in rest)
    full_from = min(max(-(-low // step), 0), extent)
    full_to = min(max((high - 1 - reach) // step + 1, full_from), extent)
    touched_from = min(max(-(-(low - reach) // step), 0), extent)
    touched_to = min(max((high - 1) // step + 1, 0), extent)
    out: list[Ranges] = []
    for index in range(touched_from, min(full_from, touched_to)):
        inner = _cuts(rest, low - index * step, high - index * step)
        out.extend(((index, index + 1), *cut) for cut in inner)
    if full_to > full_from:
        out.append(((full_from, full_to), *whole))
    for index in range(max(full_to, full_from), touched_to):
        inner = _cuts(rest, low - index * step, high - index * step)
        out.extend(((index, index + 1), *cut) for cut in inner)
    return out
