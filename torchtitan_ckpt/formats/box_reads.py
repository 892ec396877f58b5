"""Read a box of a stored tensor into a target: the needed ranges only, through bounded windows.

What lies in row-major order is read by ranges, straight into the target's memory where its layout
allows it. What does not is read whole, then copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import torch

from torchtitan_ckpt.formats.dcp_plan import Job
from torchtitan_ckpt.formats.folders import File
from torchtitan_ckpt.formats.tensor_bytes import memory
from torchtitan_ckpt.formats.torch_zip import Payload
from torchtitan_ckpt.manifest import ITEM_SIZE

WINDOW = 8 * 2**20  # bytes of a window, and of one piece of a large item
GAP = 64 * 2**10  # bytes that are read and thrown away rather than skipped


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


def read_tasks(file: File, base: int, payload: Payload, job: Job) -> Iterator[Callable[[], None]]:
    """The reads that fill a job's target; `base` is where the archive starts in the file."""
    if not payload.is_row_major:
        yield partial(_read_whole, file, base, payload, job)
        return
    item = ITEM_SIZE[job.dtype]
    base += payload.start + payload.offset * item
    direct = job.target.is_cpu and dtype_name(job.target.dtype) == job.dtype
    strides = _strides(job.shard.sizes)
    for offsets, sizes in pieces(job.shard.sizes, job.offsets, job.sizes, item):
        start, length = _span(job.shard.sizes, offsets, sizes)
        part = job.target
        for d, n in enumerate(sizes):
            if n != part.shape[d]:
                part = part.narrow(d, offsets[d] - job.offsets[d], n)
        at = base + start * item
        if direct and length == math.prod(sizes) and part.is_contiguous():
            yield partial(_read_direct, file, at, part)
        else:
            yield partial(_read_window, file, at, length, job.dtype, strides, part)


def copy_box(data: bytearray, at: int, payload: Payload, job: Job) -> None:
    """Fill a job's target from an item that is in memory, `data[at:]`."""
    dtype: torch.dtype = getattr(torch, payload.dtype)
    count = payload.nbytes // dtype.itemsize
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=at + payload.start)
    whole = flat.as_strided(payload.size, payload.stride, payload.offset)
    if not job.is_whole:
        box = zip(job.offsets, job.sizes, strict=True)
        whole = whole[tuple(slice(o, o + n) for o, n in box)]
    job.target.copy_(whole)


def _read_whole(file: File, base: int, payload: Payload, job: Job) -> None:
    data = bytearray(payload.nbytes)
    file.read_into(base + payload.start, memoryview(data))
    copy_box(data, -payload.start, payload, job)


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    step = 1
    for n in reversed(sizes):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def _span(shape: tuple[int, ...], offsets: Iterable[int], sizes: Iterable[int]) -> tuple[int, int]:
    """First element of a box in a row-major tensor, and the elements from it to the last one."""
    strides = _strides(shape)
    start = sum(o * s for o, s in zip(offsets, strides, strict=True))
    return start, 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def pieces(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], item: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box into boxes whose bytes, from first to last, fit a window.

    Cuts go along the outermost dimension that suffices. Rows that are much shorter than the
    distance between them are read one by one, when each is worth a read of its own. `item` is the
    size of an element in bytes.
    """
    if not shape:
        yield (), ()
        return
    dim = 0
    while dim < len(shape) - 1:
        inner = (*offsets[:dim], *offsets[dim:]), (*(1,) * dim, *sizes[dim:])
        span = _span(shape, *inner)[1] * item
        used = math.prod(sizes[dim:]) * item
        sparse = span > 2 * used and math.prod(sizes[dim + 1 :]) * item >= GAP
        row = _span(shape, offsets, (*(1,) * (dim + 1), *sizes[dim + 1 :]))[1] * item
        if not sparse and (span <= WINDOW or row <= WINDOW):
            break
        dim += 1
    row = _span(shape, offsets, (*(1,) * (dim + 1), *sizes[dim + 1 :]))[1] * item
    pitch = _strides(shape)[dim] * item
    step = max(1, (WINDOW - row) // pitch + 1)
    for outer in product(
        *(range(o, o + n) for o, n in zip(offsets[:dim], sizes[:dim], strict=True))
    ):
        for first in range(offsets[dim], offsets[dim] + sizes[dim], step):
            count = min(step, offsets[dim] + sizes[dim] - first)
            yield (
                (*outer, first, *offsets[dim + 1 :]),
                (*(1,) * dim, count, *sizes[dim + 1 :]),
            )


def _read_direct(file: File, offset: int, target: torch.Tensor) -> None:
    file.read_into(offset, memory(target))


def _read_window(
    file: File,
    offset: int,
    count: int,
    dtype: str,
    strides: tuple[int, ...],
    target: torch.Tensor,
) -> None:
    data = bytearray(count * ITEM_SIZE[dtype])
    file.read_into(offset, memoryview(data))
    flat = torch.frombuffer(data, dtype=getattr(torch, dtype))
    target.copy_(flat.as_strided(tuple(target.shape), strides))
