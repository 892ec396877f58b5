"""Reading byte ranges of safetensors files straight into the memory of tensors.

Dense parts of one file that follow each other are read with one `preadv` into many tensors; parts
with gaps are read run by run, or through small gaps. Staging is bounded by `STAGING` a thread.
Nothing here decides what is read where; `hf_read` does.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch

from torchtitan_ckpt.errors import DamagedError, Problem
from torchtitan_ckpt.formats.hf_boxes import Ints, split_box, strides_of
from torchtitan_ckpt.formats.strangers import open_regular
from torchtitan_ckpt.manifest import ITEM_SIZE, TensorEntry

STAGING = 16 << 20
BATCH_BYTES = 32 << 20
BATCH_ITEMS = 1000  # below the system's limit of 1024 buffers a call
GAP = 4096  # a page: a disk reads it anyway, and one call costs more than copying it

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZE}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# One dense range: where in the file, how many bytes, to which address.
Direct = tuple[int, int, int]


@dataclass(slots=True)
class Files:
    """The open files of one load; counts what it reads. Close it, or use it as a context."""

    root: Path
    progress: Callable[[int], None] | None = None
    bytes_read: int = 0
    _open: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def fd(self, name: str) -> int:
        with self._lock:
            if name not in self._open:
                try:
                    self._open[name] = open_regular(self.root / name)
                except OSError as error:
                    raise DamagedError(_unreadable(name, error)) from error
            return self._open[name]

    def read(self, name: str, offset: int, buffers: Sequence[ctypes.Array[ctypes.c_char]]) -> None:
        """Fill the buffers, one after the other, from one range of a file."""
        wanted = sum(map(len, buffers))
        descriptor = self.fd(name)
        try:
            got = os.preadv(descriptor, buffers, offset)
            while got < wanted:
                more = os.preadv(descriptor, _rest(buffers, got), offset + got)
                if not more:
                    raise DamagedError(_ended(name, offset + got, wanted - got))
                got += more
        except OSError as error:
            raise DamagedError(_unreadable(name, error)) from error
        with self._lock:
            self.bytes_read += wanted
        if self.progress is not None:
            self.progress(wanted)


def memory(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a dense CPU tensor, as a buffer that does not keep it alive."""
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(
        tensor.data_ptr()
    )


def read_batch(files: Files, name: str, offset: int, parts: Sequence[Direct]) -> None:
    """Read ranges that follow each other in a file, gaps of up to GAP bytes left out."""
    buffers = []
    at = offset
    scratch = (ctypes.c_char * GAP)()
    for start, length, address in parts:
        if start > at:
            buffers.append((ctypes.c_char * (start - at)).from_buffer(scratch))
        buffers.append((ctypes.c_char * length).from_address(address))
        at = start + length
    files.read(name, offset, buffers)


def batches(parts: list[Direct]) -> Iterator[tuple[int, list[Direct]]]:
    """Group the dense ranges of one file into calls; large ranges are cut."""
    parts.sort()
    group: list[Direct] = []
    start = at = size = 0
    for offset, length, address in parts:
        while length:
            if group and (
                not 0 <= offset - at <= GAP or size >= BATCH_BYTES or len(group) >= BATCH_ITEMS // 2
            ):
                yield start, group
                group, size = [], 0
            if not group:
                start = offset
            take = min(length, BATCH_BYTES - size)
            group.append((offset, take, address))
            size += take
            offset, address, length = offset + take, address + take, length - take
            at = offset
    if group:
        yield start, group


def read_box(
    files: Files, entry: TensorEntry, offsets: Ints, sizes: Ints, out: torch.Tensor
) -> None:
    """Read a box of a stored tensor into `out`, a dense CPU tensor of its dtype and `sizes`."""
    shard = entry.shards[0]
    width = ITEM_SIZE[entry.dtype]
    strides = strides_of(entry.shape)
    level, span = _level(entry.shape, sizes, width)
    dense = span == math.prod(sizes[level:])
    if dense and level == 0:
        start = shard.byte_offset + _at(offsets, strides) * width
        files.read(shard.file, start, [memory(out)])
        return
    if not dense and span * width > STAGING:
        for part_offsets, part_sizes in split_box(entry.shape, offsets, sizes, STAGING // width):
            part = out[_slices(part_offsets, part_sizes, offsets)]
            if part_sizes == sizes or not part.is_contiguous():
                _read_runs(files, entry, part_offsets, part_sizes, part)
            else:
                read_box(files, entry, part_offsets, part_sizes, part)
        return
    _read_runs(files, entry, offsets, sizes, out)


def _read_runs(
    files: Files, entry: TensorEntry, offsets: Ints, sizes: Ints, out: torch.Tensor
) -> None:
    shard = entry.shards[0]
    width = ITEM_SIZE[entry.dtype]
    strides = strides_of(entry.shape)
    level, span = _level(entry.shape, sizes, width)
    dense = span == math.prod(sizes[level:]) and out.is_contiguous()
    staging = None if dense else torch.empty(span, dtype=out.dtype)
    first = shard.byte_offset + _at(offsets, strides) * width
    target, run = out.data_ptr(), span * width
    for number, index in enumerate(product(*map(range, sizes[:level]))):
        start = first + sum(map(int.__mul__, index, strides)) * width
        if staging is None:
            buffer = (ctypes.c_char * run).from_address(target + number * run)
            files.read(shard.file, start, [buffer])
            continue
        files.read(shard.file, start, [memory(staging)])
        out[index].copy_(staging.as_strided(sizes[level:], strides[level:]))


def _level(shape: Ints, sizes: Ints, width: int) -> tuple[int, int]:
    """(level, span): dimensions from `level` on are read in one go of `span` elements."""
    strides = strides_of(shape)
    span = 1
    for dim in range(len(shape) - 1, -1, -1):
        if sizes[dim] > 1 and (strides[dim] - span) * width > GAP:
            return dim + 1, span
        span += (sizes[dim] - 1) * strides[dim]
    return 0, span


def _at(offsets: Ints, strides: Ints) -> int:
    return sum(map(int.__mul__, offsets, strides))


def _slices(offsets: Ints, sizes: Ints, origin: Ints) -> tuple[slice, ...]:
    rows = zip(offsets, sizes, origin, strict=True)
    return tuple(slice(at - zero, at - zero + size) for at, size, zero in rows)


def _rest(buffers: Sequence[ctypes.Array[ctypes.c_char]], got: int) -> list[memoryview]:
    out = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if got < len(view):
            out.append(view[got:])
        got = max(got - len(view), 0)
    return out


def _ended(name: str, offset: int, missing: int) -> Problem:
    return Problem(
        code="hf.file-cut",
        what="the file ended while it was read",
        where=f"{name}, byte {offset}",
        expected=f"{missing} more bytes",
        actual="end of file",
        cause="another process is writing or replacing the checkpoint",
        fix="wait until the save is over and load again",
    )


def _unreadable(name: str, error: OSError) -> Problem:
    return Problem(
        code="hf.file-unreadable",
        what="a safetensors file cannot be read",
        where=name,
        actual=error.strerror or str(error),
        fix="check the permissions and the disk, then load again",
    )
