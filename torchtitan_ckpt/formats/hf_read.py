"""Loading a Hugging Face checkpoint into tensors that are already there.

Everything is compared first - keys, shapes, dtypes, quantization - and all differences are raised
in one error before a byte moves. Then exactly the ranges that this rank's tensors need are read.
The values land in the tensors given (of any placement and device); nothing is allocated for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan_ckpt.errors import DamagedError, Problem
from torchtitan_ckpt.formats import hf_io
from torchtitan_ckpt.formats.collector import collector_paused
from torchtitan_ckpt.formats.hf_boxes import (
    Box,
    Ints,
    intersect,
    is_dense,
    local_boxes,
    local_tensor,
    split_box,
    strides_of,
)
from torchtitan_ckpt.formats.hf_compare import compare
from torchtitan_ckpt.formats.hf_index import read_manifest
from torchtitan_ckpt.formats.hf_io import DTYPES, Files
from torchtitan_ckpt.formats.quantized import BLOCK, GROUP, Quantized
from torchtitan_ckpt.formats.quantized_math import dequantize as to_values
from torchtitan_ckpt.manifest import ITEM_SIZE, Manifest, TensorEntry

_DEQUANTIZE_CHUNK = 1 << 20  # elements of codes in memory at once


@dataclass(slots=True)
class _Plan:
    """What is to be read: dense ranges by file, and everything else as calls."""

    direct: dict[str, list[hf_io.Direct]]
    calls: list[Callable[[], None]]


def load(
    folder: str | Path,
    state: Mapping[str, Any],
    *,
    manifest: Manifest | None = None,
    dequantize: bool = False,
    widen: bool = False,
    narrow: bool = False,
    raw: bool = False,
    expected_keys: Collection[str] | None = None,
    excused: Collection[str] = (),
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill the tensors and DTensors of `state`, in place, from a folder or file.

    dequantize: unpack quantized weights (`quantized.py`) into the targets' floating dtypes; refused
        where nothing is quantized. Without it a quantized checkpoint is refused, unless `raw` asks
        for the stored codes and scales themselves.
    widen: let a float of the file fill a wider float (bfloat16 into float32). narrow: let it fill
        any float. Floats and integers never mix.
    expected_keys: the keys wanted by all ranks together, where this one holds a part of the model;
        keys of the file beyond these are an error.
    excused: patterns (`*` as in a shell) of keys that may lack on either side.

    Raises MismatchError or RefusedError before data moves; DamagedError also while it does.
    """
    root = Path(folder)
    manifest = read_manifest(root) if manifest is None else manifest
    with Files(Path(manifest.path), progress) as files, torch.no_grad():
        plan = _Plan({}, [])
        with collector_paused():
            wanted = compare(
                manifest,
                state,
                dequantize=dequantize,
                widen=widen,
                narrow=narrow,
                raw=raw,
                expected_keys=expected_keys,
                excused=excused,
            )
            for _, item, target in wanted:
                if isinstance(item, Quantized):
                    _plan_quantized(plan, files, item, local_tensor(target), local_boxes(target))
                else:
                    _plan_plain(plan, files, item, target)
            jobs: list[Callable[[], None]] = [
                partial(hf_io.read_batch, files, name, start, group)
                for name, parts in plan.direct.items()
                for start, group in hf_io.batches(parts)
            ]
        _run(jobs + plan.calls, threads or min(4, os.cpu_count() or 1))


def _run(jobs: list[Callable[[], None]], threads: int) -> None:
    if threads == 1 or len(jobs) < 2:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_quietly, job) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def _quietly(job: Callable[[], None]) -> None:
    with torch.no_grad():  # the mode is each thread's own
        job()


def fill(files: Files, item: TensorEntry | Quantized, offsets: Ints, out: torch.Tensor) -> None:
    """Fill a plain tensor with the box of a stored one that begins at `offsets`."""
    plan = _Plan({}, [])
    box = Box(offsets, tuple(out.shape), (0,) * len(offsets))
    if isinstance(item, Quantized):
        _plan_quantized(plan, files, item, out, (box,))
    else:
        _plan_boxes(plan, files, item, out, (box,))
    for name, parts in plan.direct.items():
        for start, group in hf_io.batches(parts):
            hf_io.read_batch(files, name, start, group)
    for call in plan.calls:
        call()


# --- plain tensors ------------------------------------------------------------------------------


def _plan_plain(plan: _Plan, files: Files, entry: TensorEntry, target: torch.Tensor) -> None:
    same = DTYPES[entry.dtype] == target.dtype and target.device.type == "cpu"
    simple = same and entry.dtype != "bool"
    if (
        type(target) in _PLAIN_TYPES
        and simple
        and len(entry.shards) == 1
        and target.is_contiguous()
    ):
        shard = entry.shards[0]
        if shard.byte_length:
            row = (shard.byte_offset, shard.byte_length, target.data_ptr())
            plan.direct.setdefault(shard.file, []).append(row)
        return
    _plan_boxes(plan, files, entry, local_tensor(target), local_boxes(target))


def _plan_boxes(
    plan: _Plan, files: Files, entry: TensorEntry, local: torch.Tensor, boxes: Sequence[Box]
) -> None:
    """Read the stored boxes that fill `boxes` of the whole, which lie in the memory `local`."""
    width = ITEM_SIZE[entry.dtype]
    same = DTYPES[entry.dtype] == local.dtype and local.device.type == "cpu"
    simple = same and entry.dtype != "bool"
    for part, offsets, sizes, view in _parts(entry, local, boxes):
        shard = part.shards[0]
        if simple and view.is_contiguous():
            if is_dense(part.shape, sizes):
                at = sum(map(int.__mul__, offsets, strides_of(part.shape))) * width
                row = (shard.byte_offset + at, view.numel() * width, view.data_ptr())
                plan.direct.setdefault(shard.file, []).append(row)
            else:
                plan.calls.append(partial(hf_io.read_box, files, part, offsets, sizes, view))
        else:
            plan.calls.append(partial(_read_converted, files, part, offsets, sizes, view))


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _parts(
    entry: TensorEntry, local: torch.Tensor, boxes: Sequence[Box]
) -> Iterator[tuple[TensorEntry, Ints, Ints, torch.Tensor]]:
    """Pairs of a stored box and the view of the target that it fills."""
    for box in boxes:
        for shard in entry.shards:
            common = intersect((box.offsets, box.sizes), (shard.offsets, shard.sizes))
            if common is None:
                continue
            offsets, sizes = common
            rows = zip(offsets, sizes, box.offsets, box.local, strict=True)
            view = local[tuple(slice(at - o + own, at - o + own + n) for at, n, o, own in rows)]
            part = TensorEntry(entry.key, shard.sizes, entry.dtype, (shard,))
            yield (
                part,
                tuple(a - b for a, b in zip(offsets, shard.offsets, strict=True)),
                sizes,
                view,
            )


def _read_converted(
    files: Files, entry: TensorEntry, offsets: Ints, sizes: Ints, view: torch.Tensor
) -> None:
    """Through a bounded buffer: another dtype or device, a strided target, or bool."""
    limit = hf_io.STAGING // ITEM_SIZE[entry.dtype]
    for part_offsets, part_sizes in split_box(entry.shape, offsets, sizes, limit):
        stored = torch.empty(part_sizes, dtype=DTYPES[entry.dtype])
        hf_io.read_box(files, entry, part_offsets, part_sizes, stored)
        if entry.dtype == "bool" and int(stored.view(torch.uint8).max()) > 1:
            raise DamagedError(_not_bool(entry))
        rows = zip(part_offsets, part_sizes, offsets, strict=True)
        view[tuple(slice(at - o, at - o + n) for at, n, o in rows)].copy_(stored)


# --- quantized tensors --------------------------------------------------------------------------


def _plan_quantized(
    plan: _Plan, files: Files, item: Quantized, local: torch.Tensor, boxes: Sequence[Box]
) -> None:
    shape = item.shape
    if item.transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
        local = local.transpose(-1, -2)
    align = (*(1,) * (len(shape) - 2), BLOCK if item.scheme == "fp8" else 1, 1)
    for box in boxes:
        offsets, sizes, start = box.offsets, box.sizes, box.local
        if item.transposed:
            offsets, sizes, start = _swap(offsets), _swap(sizes), _swap(start)
        view = local[tuple(slice(own, own + n) for own, n in zip(start, sizes, strict=True))]
        for part_offsets, part_sizes in split_box(shape, offsets, sizes, _DEQUANTIZE_CHUNK, align):
            rows = zip(part_offsets, part_sizes, offsets, strict=True)
            part = view[tuple(slice(at - o, at - o + n) for at, n, o in rows)]
            plan.calls.append(partial(_read_values, files, item, part_offsets, part_sizes, part))


def _read_values(
    files: Files, item: Quantized, offsets: Ints, sizes: Ints, view: torch.Tensor
) -> None:
    """Read the codes and scales of one part, in the order of the bytes, and unpack them."""
    *head, row, column = offsets
    *head_sizes, rows, columns = sizes
    if item.scheme == "fp8":
        first = (row // BLOCK, column // BLOCK)
        grid = (-(-(row + rows) // BLOCK) - first[0], -(-(column + columns) // BLOCK) - first[1])
        codes = _read(files, item.weight, offsets, sizes)
    else:
        # Whole groups of 32 are read; what lies before and after the part is cut off again.
        group = column // GROUP
        groups = -(-(column + columns) // GROUP) - group
        first, grid = (row, group), (rows, groups)
        if item.scheme == "fp4":
            half = GROUP // 2
            codes = _read(
                files, item.weight, (*head, row, group * half), (*head_sizes, rows, groups * half)
            )
        else:
            codes = _read(
                files, item.weight, (*head, row, group, 0), (*head_sizes, rows, groups, GROUP // 2)
            )
    scale = _read(files, item.scale, (*head, *first), (*head_sizes, *grid))
    exact = item.scheme == "fp8" or columns == grid[1] * GROUP
    in_place = exact and view.is_contiguous() and view.device.type == "cpu"
    values = to_values(
        codes,
        scale,
        item.scheme,
        offsets=offsets,
        dtype=view.dtype,
        out=view if in_place else None,
    )
    if not in_place:
        before = 0 if item.scheme == "fp8" else column - first[1] * GROUP
        view.copy_(values[..., before : before + columns])


def _read(files: Files, entry: TensorEntry, offsets: Ints, sizes: Ints) -> torch.Tensor:
    out = torch.empty(sizes, dtype=DTYPES[entry.dtype])
    hf_io.read_box(files, entry, offsets, sizes, out)
    return out


def _swap(values: Ints) -> Ints:
    return (*values[:-2], values[-1], values[-2])


def _not_bool(entry: TensorEntry) -> Problem:
    return Problem(
        code="hf.not-bool",
        what=f"{entry.key!r} is stored as bool and holds bytes other than 0 and 1",
        where=entry.shards[0].file,
        cause="the file was damaged or made by a faulty writer",
        fix="get the file again from its source",
    )
