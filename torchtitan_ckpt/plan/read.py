"""What each rank of another job reads of a planned save, through DCP's reader and through ours.

DCP's reader fetches the whole stored item for every part of it that a rank needs; ours fetches
items of up to 1 MiB whole, and of larger ones the bytes from the first to the last that it needs,
cut into pieces. Nothing is read here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from torchtitan_ckpt.errors import Problem, list_keys
from torchtitan_ckpt.formats.box_reads import pieces
from torchtitan_ckpt.manifest import ITEM_SIZE
from torchtitan_ckpt.parallel import ParallelDegrees
from torchtitan_ckpt.plan.state import Entry
from torchtitan_ckpt.plan.write import Box, Kind, Written, kinds_of
from torchtitan_ckpt.state import rng

# As `formats/dcp_load.py` has them: items read whole, and what is read to find a payload.
_SMALL = 2**20
_ENDS = 4096


@dataclass(slots=True)
class Reader:
    """What one rank reads: bytes it needs, and what the two readers fetch for them."""

    rank: int
    needed: int = 0
    by_dcp: int = 0
    by_ours: int = 0
    parts: int = 0
    files: int = 0


@dataclass(slots=True)
class ReadPlan:
    """A planned load. `reads_from[r, w]` says whether rank `r` reads the file of writer `w`."""

    degrees: ParallelDegrees
    readers: list[Reader]
    reads_from: NDArray[np.bool_]
    problems: list[Problem] = field(default_factory=list)


@dataclass(slots=True)
class _Match:
    """How the boxes of one kind of target meet the chunks of one kind of source."""

    pairs: NDArray[np.int64]  # (rank, chunk), one row a part
    sums: NDArray[np.int64]  # needed, by_dcp, by_ours, parts; one column a rank
    gap: bool


def plan_reads(written: Written, entries: Sequence[Entry], degrees: ParallelDegrees) -> ReadPlan:
    """Plan the load of `entries`, laid out under `degrees`, from a planned save."""
    world = degrees.world_size
    source = {e.key: n for n, e in enumerate(written.entries)}
    targets = kinds_of(entries, degrees)
    totals = np.zeros((4, world), dtype=np.int64)
    reads_from = np.zeros((world, written.degrees.world_size), dtype=np.bool_)
    matches: dict[tuple[int, int], _Match] = {}
    missing, differing, gaps = [], [], []
    for entry, kind in zip(entries, targets, strict=True):
        number = source.get(entry.key)
        if number is None:
            # Loaders and generators are kept by rank, and another job has other ranks.
            if not entry.key.startswith(("dataloader.dp_rank_", rng.PREFIX)):
                missing.append(entry.key)
            continue
        stored = written.entries[number]
        if (stored.shape, stored.dtype) != (entry.shape, entry.dtype):
            differing.append(entry.key)
            continue
        mark = (id(written.kinds[number]), id(kind))
        if mark not in matches:
            matches[mark] = _match(entry, written.kinds[number], kind, world)
        match = matches[mark]
        if match.gap:
            gaps.append(entry.key)
        totals += match.sums
        owners = np.asarray(written.owners[number], dtype=np.int64)
        reads_from[match.pairs[:, 0], owners[match.pairs[:, 1]]] = True
    readers = [
        Reader(
            rank,
            needed=int(totals[0, rank]),
            by_dcp=int(totals[1, rank]),
            by_ours=int(totals[2, rank]),
            parts=int(totals[3, rank]),
            files=int(reads_from[rank].sum()),
        )
        for rank in range(world)
    ]
    problems = [
        Problem(code=f"plan.{code}", what=f"{what}: {list_keys(keys)}")
        for code, what, keys in (
            ("missing", "not in the planned checkpoint", missing),
            ("differs", "of another shape or dtype in the planned checkpoint", differing),
            ("gap", "elements that no stored chunk holds", gaps),
        )
        if keys
    ]
    return ReadPlan(degrees, readers, reads_from, problems)


def _match(entry: Entry, source: Kind, target: Kind, world: int) -> _Match:
    rows: list[tuple[int, int]] = []
    sums = np.zeros((4, world), dtype=np.int64)
    gap = False
    if not entry.is_tensor:
        size = source.stored[0]
        for rank in target.chunk_of:
            rows.append((rank, 0))
            sums[:, rank] += (size, size, size, 1)
        return _Match(np.array(rows, dtype=np.int64).reshape(-1, 2), sums, gap=False)
    ranks_of: dict[int, list[int]] = {}
    for rank, box in target.chunk_of.items():
        ranks_of.setdefault(box, []).append(rank)
    item = ITEM_SIZE[entry.dtype]
    for number, ranks in ranks_of.items():
        wanted = target.boxes[number]
        needed = by_dcp = by_ours = 0
        chunks = _meeting(wanted, source.boxes)
        for chunk in chunks:
            offsets, sizes = source.boxes[chunk]
            begin = tuple(max(a, b) for a, b in zip(wanted[0], offsets, strict=True))
            common = tuple(
                min(a + n, b + m) - o
                for a, n, b, m, o in zip(*wanted, offsets, sizes, begin, strict=True)
            )
            needed += math.prod(common) * item
            by_dcp += source.stored[chunk]
            inside = tuple(a - b for a, b in zip(begin, offsets, strict=True))
            by_ours += _ours(sizes, inside, common, entry.dtype, source.stored[chunk])
        gap |= needed != target.payload[number]
        for rank in ranks:
            rows += [(rank, chunk) for chunk in chunks]
            sums[:, rank] += (needed, by_dcp, by_ours, len(chunks))
    return _Match(np.array(rows, dtype=np.int64).reshape(-1, 2), sums, gap=gap)


def _meeting(wanted: Box, boxes: Sequence[Box]) -> list[int]:
    """The boxes that share elements with `wanted`."""
    if 0 in wanted[1]:
        return []
    if not wanted[0]:
        return list(range(len(boxes)))
    starts, ends = _edges(tuple(boxes))
    low = np.array(wanted[0], dtype=np.int64)
    high = low + np.array(wanted[1], dtype=np.int64)
    meet = ((starts < high) & (ends > low) & (ends > starts)).all(axis=1)
    return [int(n) for n in np.flatnonzero(meet)]


@lru_cache(maxsize=256)
def _edges(boxes: tuple[Box, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    starts = np.array([offsets for offsets, _ in boxes], dtype=np.int64)
    return starts, starts + np.array([sizes for _, sizes in boxes], dtype=np.int64)


@lru_cache(maxsize=65536)
def _ours(
    chunk: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    dtype: str,
    stored: int,
) -> int:
    if stored <= _SMALL:
        return stored
    item = ITEM_SIZE[dtype]
    strides = [math.prod(chunk[d + 1 :]) for d in range(len(chunk))]
    total = 2 * _ENDS
    for _, part in pieces(chunk, offsets, sizes, item):
        total += (1 + sum((n - 1) * s for n, s in zip(part, strides, strict=True))) * item
    return total
