"""Streaming plans: which box of which source tensor each box of a target tensor is made of.

A plan is made from a manifest alone. Its groups (a rule at one binding) give their targets in tiles
of a bounded number of bytes, in the order of the target's bytes; a tile names the source boxes it
needs and computes itself from them. So one stacked expert tensor of 34 GB converts in a window of
any size. The same moves tell a rank which parts of a file its local shards need.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from torchtitan_ckpt.errors import MappingError, Problem
from torchtitan_ckpt.manifest import ITEM_SIZE, TensorEntry
from torchtitan_ckpt.mapping import apply
from torchtitan_ckpt.mapping.apply import Part
from torchtitan_ckpt.mapping.group import Group as KeyGroup
from torchtitan_ckpt.mapping.rule import NATIVE, Rule
from torchtitan_ckpt.mapping.view import Link, Ranges, Shape, Side

# read(key, offsets, sizes) gives that box of a source tensor.
Read = Callable[[str, Shape, Shape], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor, in elements of the whole tensor."""

    key: str
    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Move:
    """Equal elements in a source region and a target region; both may be permuted or have gaps."""

    source: Region
    target: Region
    link: Link
    box: Ranges
    from_big: bool

    def views(
        self, source: torch.Tensor, target: torch.Tensor, at: Shape | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The elements in both tensors, in one order. `source` holds exactly the source region.

        `at` is where `target` begins in the whole target tensor (default: at the target region).
        """
        here, there = self._sides()
        origin = self.target.offsets if at is None else at
        return (
            apply.strided(source, here, self.box, self.source.offsets),
            apply.strided(target, there, self.box, origin),
        )

    def copy(self, source: torch.Tensor, target: torch.Tensor, at: Shape | None = None) -> None:
        """Put the source's elements where they belong in `target`; casts to its dtype."""
        mine, yours = self.views(source, target, at)
        yours.copy_(mine)

    def direct(self, target: torch.Tensor, at: Shape | None = None) -> torch.Tensor | None:
        """A view of `target` that the source region can be read into as it is, or None.

        Such a view exists where nothing is permuted and nothing lies between the elements.
        """
        here, there = self._sides()
        origin = self.target.offsets if at is None else at
        axes = [axis for dim in range(len(here.shape)) for axis in here.axes_of(dim)]
        if math.prod(high - low for low, high in self.box) != self.source.numel:
            return None
        view = apply.strided(target, there, self.box, origin)
        rest = [axis for axis in range(len(self.box)) if axis not in axes]
        view = view.permute([*axes, *rest])
        try:
            return view.view(self.source.sizes)
        except RuntimeError:
            return None

    def _sides(self) -> tuple[Side, Side]:
        link = self.link
        return (link.big, link.small) if self.from_big else (link.small, link.big)


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of one target tensor and the moves that fill it."""

    target: Region
    dtype: str
    moves: tuple[Move, ...]
    fill: float | None = None

    @property
    def sources(self) -> tuple[Region, ...]:
        return tuple(move.source for move in self.moves)

    def apply(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """The tile from its source boxes, in the order of `sources`. One at a time is enough."""
        out = torch.empty(self.target.sizes, dtype=apply.dtype_of(self.dtype))
        if self.fill is not None:
            return out.fill_(self.fill)
        with torch.no_grad():
            for move, tensor in zip(self.moves, tensors, strict=True):
                move.copy(tensor, out, self.target.offsets)
        return out

    def read(self, read: Read) -> torch.Tensor:
        """The tile, with each source box read just before it is needed."""
        return self.apply(read(s.key, s.offsets, s.sizes) for s in self.sources)


@dataclass(frozen=True)
class PlanGroup:
    """One rule at one binding: its source keys, its target tensors, and the tiles of the targets.

    `shape` is the big tensor's. Without `keys` it is the constant `fill`. `copy_of` is set where
    the one target is a copy, under another key, of the tensor that the rule makes.
    """

    keys: KeyGroup | None
    targets: tuple[TensorEntry, ...]
    source_dtype: str = "float32"
    shape: Shape = ()
    to_big: bool = False
    copy_of: str = ""
    fill: float | None = None

    @property
    def rule(self) -> Rule | None:
        return None if self.keys is None else self.keys.rule

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return () if self.keys is None else self.keys.rule.links(self.shape)

    @cached_property
    def _parts(self) -> dict[str, Part]:
        if self.keys is None:
            return {}
        parts = (
            (index, coords)
            for index, link in enumerate(self.links)
            for coords in apply.coordinates(link)
        )
        return {self.keys.part_key(part): part for part in parts}

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The keys of the source tensors."""
        if self.keys is None:
            return ()
        return tuple(self._parts) if self.to_big else (self.keys.big_key,)

    def source_shapes(self) -> Iterator[tuple[str, Shape]]:
        """The keys of the source tensors, each with its shape."""
        for key in self.sources:
            yield key, self.links[self._parts[key][0]].small.shape if self.to_big else self.shape

    def box(self, key: str, offsets: Shape, sizes: Shape) -> tuple[Move, ...]:
        """The moves that fill one box of one target tensor."""
        return tuple(self._moves(Region(key, offsets, sizes)))

    def _moves(self, target: Region) -> Iterator[Move]:
        if self.keys is None:
            return
        if not self.to_big:
            index, coords = self._parts[self.copy_of or target.key]
            link = self.links[index]
            for box in link.ranges(link.small, target.offsets, target.sizes, coords):
                for solid in link.solid(link.big, box):
                    yield self._move(link, solid, self.keys.big_key, target.key, from_big=True)
            return
        for index, link in enumerate(self.links):
            count = len(link.names)
            for box in link.ranges(link.big, target.offsets, target.sizes):
                for coords in _each(box[:count]):
                    key = self.keys.part_key((index, coords))
                    fixed = (*((c, c + 1) for c in coords), *box[count:])
                    for solid in link.solid(link.small, fixed):
                        yield self._move(link, solid, key, target.key, from_big=False)

    @staticmethod
    def _move(link: Link, box: Ranges, source: str, target: str, *, from_big: bool) -> Move:
        here, there = (link.big, link.small) if from_big else (link.small, link.big)
        return Move(
            Region(source, *link.place(here, box)),
            Region(target, *link.place(there, box)),
            link,
            box,
            from_big,
        )

    def tiles(self, max_bytes: int) -> Iterator[Tile]:
        """Tiles of all targets, each with its largest source box in at most `max_bytes`.

        The tiles of a target come in the order of its bytes and cover it once.
        """
        for entry in self.targets:
            yield from self.tiles_of(entry, (0,) * len(entry.shape), entry.shape, max_bytes)

    def tiles_of(
        self, entry: TensorEntry, offsets: Shape, sizes: Shape, max_bytes: int
    ) -> Iterator[Tile]:
        """Tiles of one box of one target."""
        own = math.prod(sizes) * ITEM_SIZE[entry.dtype]
        if own <= max_bytes:
            moves = self.box(entry.key, offsets, sizes)
            item = ITEM_SIZE[self.source_dtype]
            if own + max((m.source.numel * item for m in moves), default=0) <= max_bytes:
                yield Tile(Region(entry.key, offsets, sizes), entry.dtype, moves, self.fill)
                return
        dim = next((d for d, n in enumerate(sizes) if n > 1), None)
        if dim is None:
            raise MappingError(
                Problem(
                    code="mapping.window",
                    what=f"a window of {max_bytes} bytes does not hold one element",
                    where=entry.key,
                    fix="use a larger window",
                )
            )
        # As many rows as half the window holds, so that the pieces are few and even.
        row = own // sizes[dim]
        step = max(1, min(-(-sizes[dim] // 2), max_bytes // 2 // row if row else 1))
        for start in range(0, sizes[dim], step):
            length = min(step, sizes[dim] - start)
            yield from self.tiles_of(
                entry,
                (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
                (*sizes[:dim], length, *sizes[dim + 1 :]),
                max_bytes,
            )


def _each(box: Ranges) -> Iterator[Shape]:
    return itertools.product(*(range(low, high) for low, high in box))


@dataclass(frozen=True)
class Plan:
    """A whole conversion: groups in the order of the source's keys."""

    groups: tuple[PlanGroup, ...]

    @cached_property
    def _by_target(self) -> dict[str, PlanGroup]:
        return {entry.key: group for group in self.groups for entry in group.targets}

    @property
    def targets(self) -> Mapping[str, TensorEntry]:
        return {entry.key: entry for group in self.groups for entry in group.targets}

    def group(self, key: str) -> PlanGroup:
        """The group that makes a target tensor."""
        try:
            return self._by_target[key]
        except KeyError:
            raise MappingError(
                Problem(
                    code="mapping.unknown-target",
                    what="the plan does not make this tensor",
                    where=key,
                    fix="ask for a key of Plan.targets",
                )
            ) from None

    def box(self, key: str, offsets: Shape, sizes: Shape) -> tuple[Move, ...]:
        """The moves that fill one box of one target tensor (a rank's local shard, say)."""
        return self.group(key).box(key, offsets, sizes)

    def tiles(self, max_bytes: int) -> Iterator[Tile]:
        """All tiles of all groups."""
        for group in self.groups:
            yield from group.tiles(max_bytes)


def target_dtype(rule: Rule, toward: int, source: str) -> str:
    """The dtype that a rule gives a target: its cast's, else the source's."""
    if not rule.casts:
        return source
    return rule.casts[0].before if toward == NATIVE else rule.casts[-1].after
