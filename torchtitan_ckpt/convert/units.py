"""Units of a conversion: target tensors and how they are made from the source, piece by piece.

A unit's tensors go to one file; its pieces come in the order of its tensors' bytes and each is
computed on its own, from the source, in bounded memory. What cannot be cut (an adapter's output)
is one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from torchtitan_ckpt.convert.source import Source
from torchtitan_ckpt.errors import Problem, SaveError
from torchtitan_ckpt.formats.hf_boxes import Ints, split_box
from torchtitan_ckpt.formats.quantized import BLOCK
from torchtitan_ckpt.formats.quantized_math import (
    quantize_fp4,
    quantize_fp8,
    quantize_mxfp4,
    to_e8m0,
)
from torchtitan_ckpt.manifest import ITEM_SIZE, TensorEntry
from torchtitan_ckpt.mapping.apply import dtype_of
from torchtitan_ckpt.mapping.plan import PlanGroup
from torchtitan_ckpt.mapping.quant import Layout

Place = tuple[str, Ints, Ints]  # key, offsets, sizes
Made = list[tuple[str, Ints, torch.Tensor]]  # key, offsets, values


@dataclass(frozen=True, slots=True)
class Piece:
    """What `make` computes, and where it belongs."""

    places: tuple[Place, ...]
    make: Callable[[], Made]


class Unit(Protocol):
    """Target tensors that are made together."""

    @property
    def entries(self) -> tuple[TensorEntry, ...]: ...

    def pieces(self, max_bytes: int) -> Iterator[Piece]: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the source as it is, in the dtype of `entry`."""

    source: Source
    key: str
    entry: TensorEntry

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return (self.entry,)

    def values(self, offsets: Ints, sizes: Ints, dtype: str) -> torch.Tensor:
        out = torch.empty(sizes, dtype=dtype_of(dtype))
        if out.numel():
            self.source.fill(self.key, offsets, out)
        return out

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        item = max(
            ITEM_SIZE[self.entry.dtype], ITEM_SIZE[self.source.manifest.tensors[self.key].dtype]
        )
        zero = (0,) * len(self.entry.shape)
        for offsets, sizes in split_box(
            self.entry.shape, zero, self.entry.shape, max(max_bytes // item, 1)
        ):
            yield _piece(self, self.entry, offsets, sizes)


@dataclass(frozen=True, slots=True)
class Planned:
    """One target tensor of a group of a mapping's plan."""

    source: Source
    group: PlanGroup
    entry: TensorEntry

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return (self.entry,)

    def values(self, offsets: Ints, sizes: Ints, dtype: str) -> torch.Tensor:
        out = torch.empty(sizes, dtype=dtype_of(dtype))
        if self.group.fill is not None:
            return out.fill_(self.group.fill)
        with torch.no_grad():
            for move in self.group.box(self.entry.key, offsets, sizes):
                region = move.source
                direct = move.direct(out, offsets)
                if direct is not None:
                    self.source.fill(region.key, region.offsets, direct)
                    continue
                part = torch.empty(region.sizes, dtype=out.dtype)
                self.source.fill(region.key, region.offsets, part)
                move.copy(part, out, offsets)
        return out

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        zero = (0,) * len(self.entry.shape)
        for tile in self.group.tiles_of(self.entry, zero, self.entry.shape, max_bytes):
            yield _piece(self, self.entry, tile.target.offsets, tile.target.sizes)


Plain = Stored | Planned


def _piece(unit: Plain, entry: TensorEntry, offsets: Ints, sizes: Ints) -> Piece:
    def make() -> Made:
        return [(entry.key, offsets, unit.values(offsets, sizes, entry.dtype))]

    return Piece(((entry.key, offsets, sizes),), make)


@dataclass(frozen=True, slots=True)
class Quantizing:
    """Codes and scales of one tensor. `plain` gives its values, `layout` says how they are laid."""

    plain: Plain
    layout: Layout

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        codes, scale = self.layout.keys(self.plain.entry.key)
        shapes = self.layout.shapes(self.plain.entry.shape)
        return (
            TensorEntry(codes, shapes[0], self.layout.weight_dtype),
            TensorEntry(scale, shapes[1], self.layout.scale_dtype),
        )

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        shape = self.plain.entry.shape
        *lead, rows, columns = shape
        grouped = self.layout.grouped
        tall = rows if grouped else self.layout.block[0]
        align = (*(1,) * len(lead), tall, 1 if grouped else columns)
        # Quantizing holds about eight float32 copies of what it works on.
        limit = max(max_bytes // 32, 1)
        for offsets, sizes in split_box(shape, (0,) * len(shape), shape, limit, align):
            yield self._piece(offsets, sizes)

    def _piece(self, offsets: Ints, sizes: Ints) -> Piece:
        codes, scale = self.entries
        places = tuple(
            (entry.key, at, size)
            for entry, at, size in zip(
                (codes, scale), self._stored(offsets), self.layout.shapes(sizes), strict=True
            )
        )

        def make() -> Made:
            values = self.plain.values(offsets, sizes, "float32")
            pair = self._quantize(values)
            return [(key, at, tensor) for (key, at, _), tensor in zip(places, pair, strict=True)]

        return Piece(places, make)

    def _stored(self, offsets: Ints) -> tuple[Ints, Ints]:
        """Where a box of values begins in the codes and in the scales."""
        *lead, row, column = offsets
        down, across = self.layout.block
        if self.layout.grouped:
            row, column = column, row
            return (*lead, row, column // across, 0), (*lead, row // down, column // across)
        return (
            (*lead, row, column // self.layout.per_byte),
            (*lead, row // down, column // across),
        )

    def _quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.plain.entry.key
        if self.layout.grouped:
            return quantize_mxfp4(values, key=key)
        if self.layout.per_byte == 2:
            codes, scale = quantize_fp4(values, key=key)
            return codes, scale.view(dtype_of(self.layout.scale_dtype))
        codes, scale = quantize_fp8(values, key=key, block=BLOCK)
        kind = self.layout.scale_dtype
        return codes, to_e8m0(scale) if kind == "float8_e8m0fnu" else scale.to(dtype_of(kind))


@dataclass(frozen=True, slots=True)
class Adapted:
    """What a hand-written adapter makes of a set of source tensors; read and made in one go."""

    source: Source
    keys: tuple[str, ...]
    outputs: tuple[TensorEntry, ...]
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return self.outputs

    @property
    def nbytes(self) -> int:
        """Bytes in memory while it is made."""
        tensors = self.source.manifest.tensors
        return sum(tensors[k].nbytes for k in self.keys) + sum(e.nbytes for e in self.outputs)

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        def make() -> Made:
            state = {}
            for key in self.keys:
                entry = self.source.manifest.tensors[key]
                tensor = state[key] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
                if tensor.numel():
                    self.source.fill(key, (0,) * len(entry.shape), tensor)
            with torch.no_grad():
                made = self.convert(state)
            out: Made = []
            for entry in self.outputs:
                value = made.get(entry.key)
                if value is None or tuple(value.shape) != entry.shape:
                    raise SaveError(_changed(entry, value))
                zero = (0,) * len(entry.shape)
                plain = value.detach().to(dtype_of(entry.dtype)).contiguous()
                out.append((entry.key, zero, plain))
            return out

        yield Piece(tuple((e.key, (0,) * len(e.shape), e.shape) for e in self.outputs), make)


def _changed(entry: TensorEntry, value: torch.Tensor | None) -> Problem:
    return Problem(
        code="convert.adapter-changed",
        what="the adapter makes something else of values than of shapes",
        where=entry.key,
        expected=f"{list(entry.shape)}, as it made of meta tensors",
        actual="nothing" if value is None else str(list(value.shape)),
        cause="an adapter whose result depends on values or on what it converted before",
        fix="check it with `torchtitan-ckpt check`; convert with --family if one fits",
    )


def nbytes(unit: Unit) -> int:
    return sum(entry.nbytes for entry in unit.entries)
