"""Comparing what was written with what was made, right behind the writing.

What is written is read back while the system still has it in memory: to compare only at the end,
the whole result would have to stay there, or come from the disk. Each box is read where its writer
says that it lies; that the target's own reader finds it there too is for the end (`run.compare`).
A box that reads back differently counts as not compared, and the end looks at it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import xxhash

from torchtitan_ckpt.convert.units import Place
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.formats.hf_boxes import Ints, split_box
from torchtitan_ckpt.formats.tensor_bytes import memory
from torchtitan_ckpt.manifest import ITEM_SIZE, Shard
from torchtitan_ckpt.mapping.apply import dtype_of

_BATCH = 4 * 2**20  # bytes that wait for one another: small tensors are flushed together
_PART = 4 * 2**20  # read at a time, so that it is digested while the processor has it


class Reader(Protocol):
    """Reads boxes of tensors; `DcpReader` is one."""

    def fill(self, key: str, offsets: Ints, out: torch.Tensor) -> None: ...


class Written(Protocol):
    """What a target says about boxes that were handed to it."""

    def shard(self, place: Place) -> Shard:
        """Where the item with this box lies, in the file's final name."""
        ...

    def reader(self, places: list[tuple[Place, str]]) -> AbstractContextManager[Reader]:
        """Hand everything to the system and read these boxes (with dtypes) where they lie now."""
        ...


class Behind:
    """`compared` says where boxes lie that are equal; of the others made, `digests` has digests."""

    def __init__(self) -> None:
        self.digests: dict[Place, int] = {}
        self.compared: dict[Place, Shard] = {}
        self._waiting: list[tuple[Place, str]] = []
        self._bytes = 0
        self._pool = ThreadPoolExecutor(1, "compare")
        self._running: Future[None] | None = None

    def made(self, place: Place, tensor: torch.Tensor) -> None:
        """Remember what is to be written. May be called by several threads."""
        self.digests[place] = xxhash.xxh3_64_intdigest(memory(tensor.contiguous()))

    def written(self, target: Written, place: Place, dtype: str) -> None:
        """Compare a box that was written, with others, while the next are written."""
        nbytes = math.prod(place[2]) * ITEM_SIZE[dtype]
        if nbytes:
            self._waiting.append((place, dtype))
            self._bytes += nbytes
            if self._bytes >= _BATCH:
                self._start(target)

    def catch_up(self, target: Written) -> None:
        """Compare what waits, and wait for that: before a file gets its name."""
        self._start(target)
        self._finish()

    def _start(self, target: Written) -> None:
        self._finish()
        if self._waiting:
            reader = target.reader(self._waiting)
            shards = [target.shard(place) for place, _ in self._waiting]
            self._running = self._pool.submit(self._compare, reader, self._waiting, shards)
            self._waiting, self._bytes = [], 0

    def _finish(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _compare(
        self,
        opened: AbstractContextManager[Reader],
        boxes: list[tuple[Place, str]],
        shards: list[Shard],
    ) -> None:
        with opened as reader:
            for (place, dtype), shard in zip(boxes, shards, strict=True):
                try:
                    found = digest(reader.fill, place, dtype)
                except CheckpointError:
                    continue
                if found == self.digests[place]:
                    self.compared[place] = shard
                    del self.digests[place]


def digest(fill: Callable[[str, Ints, torch.Tensor], None], place: Place, dtype: str) -> int:
    """The digest of a stored box, read part by part in the order of its bytes."""
    key, offsets, sizes = place
    width = ITEM_SIZE[dtype]
    total = xxhash.xxh3_64()
    buffer = torch.empty(0, dtype=torch.uint8)
    for at, part in _parts(offsets, sizes, width):
        nbytes = math.prod(part) * width
        if buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        out = buffer[:nbytes].view(dtype_of(dtype)).view(part)
        if nbytes:
            fill(key, at, out)
            total.update(memory(out))
    return total.intdigest()


def _parts(offsets: Ints, sizes: Ints, width: int) -> Iterator[tuple[Ints, Ints]]:
    zero = (0,) * len(sizes)
    for at, part in split_box(sizes, zero, sizes, max(_PART // width, 1)):
        yield tuple(a + o for a, o in zip(at, offsets, strict=True)), part
