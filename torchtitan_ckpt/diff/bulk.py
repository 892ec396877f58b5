"""Small tensors that are the same bytes on both sides, found many at a time.

A checkpoint can hold tens of thousands of tensors of a few kilobytes; to place, read and compare
them one by one costs a hundred times what their bytes cost. Where both sides store a tensor in one
format, dtype and cut, long stretches of both files are read in file order and compared as memory.
Equal bytes are equal values. What is not proved equal here is left to `run`, also every fault.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain

from torchtitan_ckpt.convert.run import in_order
from torchtitan_ckpt.convert.units import Stored
from torchtitan_ckpt.diff.pairs import Pair
from torchtitan_ckpt.diff.values import same_at
from torchtitan_ckpt.errors import InputError
from torchtitan_ckpt.formats.dcp_layout import Layouts
from torchtitan_ckpt.formats.dcp_plain import is_plain
from torchtitan_ckpt.formats.folders import File, open_folder
from torchtitan_ckpt.manifest import Manifest, Shard

_SMALL = 2**18  # bytes of a piece; a larger one is quick enough by itself
_STRETCH = 2**22
_GAP = 4096
_FORMATS = ("dcp", "hf")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A shard that both sides store."""

    pair: Pair
    left: Shard
    right: Shard


class _Reader:
    """One side: its files, and for each thread a buffer and the layouts of items it has met."""

    def __init__(self, manifest: Manifest) -> None:
        self.folder = open_folder(manifest.path)
        self.archives = manifest.format == "dcp" and not is_plain(manifest)
        self._files: dict[str, File] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def read(self, first: Shard, last: Shard) -> tuple[bytearray, int]:
        """The bytes from one shard to another of a file, in a buffer that is used again, and
        their number."""
        with self._lock:
            file = self._files.get(first.file)
            if file is None:
                file = self._files[first.file] = self.folder.open(first.file)
        size = last.byte_offset + last.byte_length - first.byte_offset
        held: bytearray | None = getattr(self._local, "buffer", None)
        if held is None or len(held) < size:
            held = self._local.buffer = bytearray(size)
        file.read_into(first.byte_offset, memoryview(held)[:size])
        return held, size

    def place(self, data: bytearray, at: int, shard: Shard, dtype: str) -> int | None:
        """Where in `data` the elements of the shard at `at` begin; None where they do not lie
        there one after the other, as the manifest says."""
        if not self.archives:
            return at
        layouts: Layouts | None = getattr(self._local, "layouts", None)
        if layouts is None:
            layouts = self._local.layouts = Layouts()
        payload = layouts.find(data, at, shard.byte_length, shard.file)
        fits = payload.is_plain and (payload.dtype, payload.size) == (dtype, shard.sizes)
        return at + payload.start if fits else None


def equal_pairs(pairs: Iterable[Pair], right: Manifest, threads: int) -> Iterator[Pair]:
    """The pairs of small tensors whose stored bytes are the same on both sides."""
    stored = [pair for pair in pairs if _comparable(pair)]
    if not stored:
        return
    left = stored[0].unit.source.manifest
    if left.format != right.format or left.format not in _FORMATS:
        return
    missing: dict[str, int] = {}
    with closing(_Sides(left, right)) as sides:
        jobs = (partial(sides.proved, stretch) for stretch in _stretches(_pieces(stored)))
        for pair in chain.from_iterable(in_order(jobs, threads)):
            rest = missing[pair.key] = missing.get(pair.key, len(pair.made.shards)) - 1
            if not rest:
                yield pair


class _Sides:
    """Both sides of a comparison, open."""

    def __init__(self, left: Manifest, right: Manifest) -> None:
        self._left, self._right = _Reader(left), _Reader(right)

    def close(self) -> None:
        self._left.close()
        self._right.close()

    def proved(self, pieces: list[_Piece]) -> list[Pair]:
        """The pair of every piece that is the same bytes on both sides."""
        try:
            return [piece.pair for piece in self._same(pieces)]
        except InputError:
            return []

    def _same(self, pieces: list[_Piece]) -> Iterable[_Piece]:
        first, last = pieces[0], pieces[-1]
        a, size = self._left.read(first.left, last.left)
        b, other = self._right.read(first.right, last.right)
        at_a, at_b = _address(a), _address(b)
        base_a, base_b = first.left.byte_offset, first.right.byte_offset
        shift = base_b - base_a
        alike = all(
            p.right.byte_offset - p.left.byte_offset == shift
            and p.right.byte_length == p.left.byte_length
            for p in pieces
        )
        if alike and size == other and same_at(at_a, at_b, size):
            yield from pieces
            return
        for piece in pieces:
            dtype = piece.pair.entry.dtype
            one = self._left.place(a, piece.left.byte_offset - base_a, piece.left, dtype)
            two = self._right.place(b, piece.right.byte_offset - base_b, piece.right, dtype)
            nbytes = piece.pair.nbytes_of(piece.left.sizes)
            if one is not None and two is not None and same_at(at_a + one, at_b + two, nbytes):
                yield piece


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _comparable(pair: Pair) -> bool:
    """Whether both sides store a tensor as small pieces, cut alike."""
    one, two = pair.made, pair.entry
    if type(pair.unit) is not Stored or not one.shards:
        return False
    if (one.dtype, one.shape, len(one.shards)) != (two.dtype, two.shape, len(two.shards)):
        return False
    return all(
        (a.offsets, a.sizes) == (b.offsets, b.sizes)
        and pair.nbytes_of(a.sizes) <= min(a.byte_length, b.byte_length)
        and max(a.byte_length, b.byte_length) <= _SMALL
        for a, b in zip(one.shards, two.shards, strict=True)
    )


def _pieces(pairs: Iterable[Pair]) -> list[_Piece]:
    """Their shards, in the order of the left side's bytes."""
    found: list[_Piece] = []
    for pair in pairs:
        found += map(partial(_Piece, pair), pair.made.shards, pair.entry.shards)
    return sorted(found, key=lambda p: (p.left.file, p.left.byte_offset))


def _stretches(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that follow each other in one file on both sides, within the size of a read."""
    stretch: list[_Piece] = []
    for piece in pieces:
        if stretch and not _follows(stretch, piece):
            yield stretch
            stretch = []
        stretch.append(piece)
    if stretch:
        yield stretch


def _follows(stretch: list[_Piece], piece: _Piece) -> bool:
    for first, last, new in (
        (stretch[0].left, stretch[-1].left, piece.left),
        (stretch[0].right, stretch[-1].right, piece.right),
    ):
        gap = new.byte_offset - last.byte_offset - last.byte_length
        span = new.byte_offset + new.byte_length - first.byte_offset
        if new.file != first.file or not 0 <= gap <= _GAP or span > _STRETCH:
            return False
    return True
