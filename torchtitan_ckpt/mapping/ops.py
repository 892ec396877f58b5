"""The ops: how native tensors become Hugging Face tensors, each with its inverse derived.

An op moves values and never computes them, except `Cast`, which declares what it loses. Splitting
ops are written as views (see `view.py`); the joining ones (`Stack`, `Fuse`) are the same views read
from the other end, so no inverse is written by hand. Slicing, sharding and streaming follow from
the views. Ops know nothing of keys beyond the placeholder that `Stack` consumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from torchtitan_ckpt.mapping.view import Shape, ShapeError, View, factor, size


@runtime_checkable
class Op(Protocol):
    """What the engine needs of an op.

    `joins` is +1 for an op that makes one tensor of many, -1 for one that makes many of one, else
    0. `split` and `whole` speak of the op in its splitting form (for `Stack`: of `Unstack`).
    """

    joins: ClassVar[int]

    @property
    def inverse(self) -> Op: ...

    def split(self, view: View) -> tuple[View, ...]: ...

    def whole(self, shapes: Sequence[Shape], counts: dict[str, int]) -> Shape: ...


def _same(shapes: Sequence[Shape]) -> Shape:
    if len(shapes) != 1:
        raise ShapeError(f"takes one tensor, not {len(shapes)}")
    return shapes[0]


def _dim(dim: int, shape: Shape) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"has no dimension {dim} in shape {list(shape)}")
    return dim % len(shape)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Swap two dimensions. Its own inverse."""

    a: int = 0
    b: int = 1
    joins: ClassVar[int] = 0

    @property
    def inverse(self) -> Transpose:
        return self

    def split(self, view: View) -> tuple[View, ...]:
        a, b = _dim(self.a, view.shape), _dim(self.b, view.shape)
        dims = list(view.dims)
        dims[a], dims[b] = dims[b], dims[a]
        return (replace(view, dims=tuple(dims)),)

    def whole(self, shapes: Sequence[Shape], counts: dict[str, int]) -> Shape:
        shape = list(_same(shapes))
        a, b = _dim(self.a, tuple(shape)), _dim(self.b, tuple(shape))
        shape[a], shape[b] = shape[b], shape[a]
        return tuple(shape)


@dataclass(frozen=True, slots=True)
class Regroup:
    """In blocks of `block` along `dim` (None: the whole), turn [rows, cols] into [cols, rows].

    One of `rows` and `cols` may be None and follows from the block; with both given, the cells of
    the grid are runs of equal length.
    """

    dim: int
    rows: int | None
    cols: int | None
    block: int | str | None = None
    joins: ClassVar[int] = 0

    @property
    def inverse(self) -> Regroup:
        return replace(self, rows=self.cols, cols=self.rows)

    def split(self, view: View) -> tuple[View, ...]:
        dim = _dim(self.dim, view.shape)
        axes = view.dims[dim]
        if isinstance(self.block, str):
            raise ShapeError(f"{self.block} was not bound to a config")
        block = self.block if self.block is not None else size(axes)
        outer, inner = factor(axes, block) if self.block is not None else ((), axes)
        known = (self.rows or 1) * (self.cols or 1)
        if known == 0 or block % known:
            raise ShapeError(f"{block} does not split into {known} parts")
        cols = self.cols if self.cols is not None else block // known
        unit = block // known if self.rows is not None and self.cols is not None else 1
        if not size(inner):
            return (view,)
        grid, cell = factor(inner, unit)
        left, right = factor(grid, cols)
        return (view.with_dim(dim, (*outer, *right, *left, *cell)),)

    def whole(self, shapes: Sequence[Shape], counts: dict[str, int]) -> Shape:
        return _same(shapes)


def RopeToHalf(head_dim: int | str, dim: int = 0) -> Regroup:
    """Interleaved rope rows (x0 y0 x1 y1 ...) of each head to half-split (x0 x1 ... y0 y1 ...).

    `head_dim` may name a config field, in a family's table.
    """
    return Regroup(dim, None, 2, head_dim)


def RopeToInterleaved(head_dim: int | str, dim: int = 0) -> Regroup:
    """The inverse of `RopeToHalf`."""
    return Regroup(dim, 2, None, head_dim)


def Deinterleave(dim: int, parts: int = 2) -> Regroup:
    """Along `dim`, [a0 b0 a1 b1 ...] to [a0 a1 ... b0 b1 ...]."""
    return Regroup(dim, None, parts)


def Interleave(dim: int, parts: int = 2) -> Regroup:
    """The inverse of `Deinterleave`."""
    return Regroup(dim, parts, None)


@dataclass(frozen=True, slots=True)
class Squeeze:
    """Drop a dimension of size 1."""

    dim: int
    joins: ClassVar[int] = 0

    @property
    def inverse(self) -> Unsqueeze:
        return Unsqueeze(self.dim)

    def split(self, view: View) -> tuple[View, ...]:
        dim = _dim(self.dim, view.shape)
        if view.shape[dim] != 1:
            raise ShapeError(f"squeezes dimension {self.dim} of shape {list(view.shape)}")
        return (replace(view, dims=(*view.dims[:dim], *view.dims[dim + 1 :])),)

    def whole(self, shapes: Sequence[Shape], counts: dict[str, int]) -> Shape:
        return _insert(_same(shapes), self.dim, 1)


@dataclass(frozen=True, slots=True)
class Unsqueeze:
    """Add a dimension of size 1."""

    dim: int
    joins: ClassVar[int] = 0

    @property
    def inverse(self) -> Squeeze:
        return Squeeze(self.dim)

    def split(self, view: View) -> tuple[View, ...]:
        dim = self.dim % (len(view.dims) + 1)
        return (replace(view, dims=(*view.dims[:dim], (), *view.dims[dim:])),)

    def whole(self, shapes: Sequence[Shape], counts: dict[str, int]) -> Shape:
        shape = _same(shapes)
        dim = _dim(self.dim, shape)
        if shape[dim] != 1:
            raise ShapeError(f"squeezes dimension {self.dim} of shape {list(shape)}")
        return (*shape[:dim], *shape[dim + 1 :])


def _insert(shape: Shape, dim: int, extent: int) -> Shape:
    place = dim % (len(shape) + 1)
    return (*shape[:place], extent, *shape[place:])


@dataclass(frozen=True, slots=True)
class Unstack:
    """One tensor a value of the placeholder `name`, in numeric order, along `dim`."""

    name: str
    dim: int = 0
    joins: ClassVar[int] = -1

    @property
    def inverse(self) -> Stack:
        return Stack(self.name, self.dim)

    def split(self, view: View) -> tuple[View, ...]:
        dim = _dim(self.dim, view.shape)
        if len(view.dims[dim]) != 1:
            raise ShapeError(f"cannot unstack dimension {self.dim} after it was regrouped")
        keys = (*view.keys, (self.name, view.dims[dim][0]))
        return (replace(view, dims=(*view.dims[:dim], *view.dims[dim + 1 :]), keys=keys),)

    def whole(self, shapes: Sequence[Shape], counts: dict[str, int]) -> Shape:
        return _insert(_same(shapes), self.dim, counts[self.name])


@dataclass(frozen=True, slots=True)
class Split:
    """Cut along `dim` into tensors of `sizes`, or into `parts` equal ones, in the rule's order."""

    dim: int
    parts: int = 2
    sizes: tuple[int, ...] | None = None
    joins: ClassVar[int] = -1

    @property
    def inverse(self) -> Fuse:
        return Fuse(self.dim, self.parts, self.sizes)

    @property
    def count(self) -> int:
        return self.parts if self.sizes is None else len(self.sizes)

    def split(self, view: View) -> tuple[View, ...]:
        dim = _dim(self.dim, view.shape)
        total = view.shape[dim]
        sizes = self.sizes
        if sizes is None:
            if total % self.parts:
                raise ShapeError(f"{total} does not split into {self.parts} equal parts")
            sizes = (total // self.parts,) * self.parts
        if sum(sizes) != total:
            raise ShapeError(f"sizes {list(sizes)} do not add up to {total}")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(view.narrow(dim, s, n) for s, n in zip(starts, sizes, strict=True))

    def whole(self, shapes: Sequence[Shape], counts: dict[str, int]) -> Shape:
        if len(shapes) != self.count:
            raise ShapeError(f"fuses {self.count} tensors, not {len(shapes)}")
        dim = _dim(self.dim, shapes[0])
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        lengths = tuple(shape[dim] for shape in shapes)
        if len(rest) != 1 or (self.sizes is None and len(set(lengths)) != 1):
            raise ShapeError(f"cannot fuse shapes {[list(shape) for shape in shapes]}")
        if self.sizes is not None and lengths != self.sizes:
            raise ShapeError(f"sizes {list(lengths)} are not {list(self.sizes)}")
        return (*shapes[0][:dim], sum(lengths), *shapes[0][dim + 1 :])


@dataclass(frozen=True, slots=True)
class Stack:
    """The inverse of `Unstack`: gather the placeholder's values along a new dimension."""

    name: str
    dim: int = 0
    joins: ClassVar[int] = 1

    @property
    def inverse(self) -> Unstack:
        return Unstack(self.name, self.dim)

    def split(self, view: View) -> tuple[View, ...]:
        return self.inverse.split(view)

    def whole(self, shapes: Sequence[Shape], counts: dict[str, int]) -> Shape:
        return self.inverse.whole(shapes, counts)


@dataclass(frozen=True, slots=True)
class Fuse:
    """The inverse of `Split`: concatenate along `dim`, in the rule's order."""

    dim: int
    parts: int = 2
    sizes: tuple[int, ...] | None = None
    joins: ClassVar[int] = 1

    @property
    def inverse(self) -> Split:
        return Split(self.dim, self.parts, self.sizes)

    @property
    def count(self) -> int:
        return self.inverse.count

    def split(self, view: View) -> tuple[View, ...]:
        return self.inverse.split(view)

    def whole(self, shapes: Sequence[Shape], counts: dict[str, int]) -> Shape:
        return self.inverse.whole(shapes, counts)


@dataclass(frozen=True, slots=True)
class Cast:
    """Native `before`, Hugging Face `after` (torch dtype names). `loss` says what a cast loses.

    An empty `loss` claims that nothing is lost; it is accepted only where that is so.
    """

    before: str
    after: str
    loss: str = ""
    joins: ClassVar[int] = 0

    @property
    def inverse(self) -> Cast:
        return Cast(self.after, self.before, self.loss)

    def split(self, view: View) -> tuple[View, ...]:
        return (view,)

    def whole(self, shapes: Sequence[Shape], counts: dict[str, int]) -> Shape:
        return _same(shapes)


def bind(op: Op, resolve: Any) -> Op:
    """Replace the symbolic numbers of an op (`"head_dim"`) by those of a config.

    `resolve` turns a string into an int. Placeholder and dtype names are left alone.
    """
    keep = {"name", "before", "after", "loss"}
    changes = {}
    for entry in fields(op):  # type: ignore[arg-type]  # every op is a dataclass
        value = getattr(op, entry.name)
        if entry.name in keep:
            continue
        if isinstance(value, str):
            changes[entry.name] = resolve(value)
        elif isinstance(value, tuple):
            changes[entry.name] = tuple(resolve(v) if isinstance(v, str) else v for v in value)
    return replace(op, **changes) if changes else op  # type: ignore[type-var]
