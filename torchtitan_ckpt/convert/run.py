"""Running a conversion: pieces computed by threads, written in order, read back and compared.

In flight are at most `threads` pieces being computed and two that wait, so that memory is the
window's, whatever the model's size.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from torchtitan_ckpt.convert.behind import Behind, digest
from torchtitan_ckpt.convert.sink import Sink
from torchtitan_ckpt.convert.source import Source
from torchtitan_ckpt.convert.units import Made, Piece, Place, Stored, Unit
from torchtitan_ckpt.errors import MismatchError, Problem, SaveError, list_keys
from torchtitan_ckpt.manifest import ITEM_SIZE, TensorEntry
from torchtitan_ckpt.mapping.apply import same_bytes

T = TypeVar("T")
Count = Callable[[int], None]  # told the bytes of target tensors that are done


def threads_of(asked: int | None) -> int:
    return asked or min(4, os.cpu_count() or 1)


# Larger pieces are no faster: their memory goes back to the system and is cleared again each time.
# A piece of a DCP becomes an item of its own, and a checkpoint should not have too many.
_LARGEST = {"hf": 8 * 2**20, "pt": 8 * 2**20, "dcp": 16 * 2**20}


def piece_bytes(window: int, threads: int, target: str) -> int:
    """Bytes of one piece, so that all in flight fit the window."""
    return max(min(window // (threads + 2), _LARGEST[target]), 2**12)


def in_order(jobs: Iterable[Callable[[], T]], threads: int) -> Iterator[T]:
    """Results of jobs in their order, computed by threads, few at a time."""
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, "convert") as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(_quietly, job))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _quietly(job: Callable[[], T]) -> T:
    with torch.no_grad():  # a setting of each thread
        return job()


def write(
    units: Iterable[Unit],
    sink: Sink,
    max_bytes: int,
    threads: int,
    count: Count,
    behind: Behind | None = None,
) -> None:
    """Make every piece that the sink does not have yet, and write it.

    `behind` compares each with what the sink then has.
    """

    def job(unit: Unit, piece: Piece) -> Callable[[], tuple[Piece, Made]]:
        def made() -> tuple[Piece, Made]:
            values = piece.make()
            if behind is not None:
                for place, (_, _, tensor) in zip(piece.places, values, strict=True):
                    behind.made(place, tensor)
            return piece, values

        return made

    def jobs() -> Iterator[Callable[[], tuple[Piece, Made]]]:
        for unit in units:
            for piece in unit.pieces(max_bytes):
                if all(sink.done(place) for place in piece.places):
                    count(_bytes(unit, piece.places))
                else:
                    yield job(unit, piece)

    for piece, made in in_order(jobs(), threads):
        for place, (key, offsets, tensor) in zip(piece.places, made, strict=True):
            sink.write(key, offsets, tensor)
            if behind is not None and not sink.done(place):
                behind.written(sink, place, str(tensor.dtype).removeprefix("torch."))
            count(tensor.numel() * tensor.element_size())
    if behind is not None:
        behind.catch_up(sink)


def _bytes(unit: Unit, places: Sequence[Place]) -> int:
    sizes = {entry.key: ITEM_SIZE[entry.dtype] for entry in unit.entries}
    return sum(math.prod(shape) * sizes[key] for key, _, shape in places)


def compare(
    units: Iterable[Unit],
    target: Source,
    max_bytes: int,
    threads: int,
    count: Count,
    behind: Behind,
) -> None:
    """Compare every box of the target, as its own reader sees it, with what the source gave.

    What was compared `behind` the writing is equal if it is found where it was then; the rest is
    read: a box that this run made is compared by its digest, one of an earlier run is made again.
    Raises `SaveError` with the tensors that differ.
    """

    def job(piece: Piece, dtypes: dict[str, str]) -> Callable[[], list[str]]:
        def checked() -> list[str]:
            if any(place not in behind.digests for place in piece.places):
                for place, (_, _, tensor) in zip(piece.places, piece.make(), strict=True):
                    behind.made(place, tensor)
            return [
                place[0]
                for place in piece.places
                if digest(target.fill, place, dtypes[place[0]]) != behind.digests[place]
            ]

        return checked

    def jobs() -> Iterator[Callable[[], list[str]]]:
        for unit in units:
            dtypes = {entry.key: entry.dtype for entry in unit.entries}
            found = {key: target.manifest.tensors.get(key) for key in dtypes}
            lies = {key: frozenset(entry.shards) if entry else () for key, entry in found.items()}
            for piece in unit.pieces(max_bytes):
                if not all(behind.compared.get(place) in lies[place[0]] for place in piece.places):
                    yield job(piece, dtypes)
                count(_bytes(unit, piece.places))

    bad = dict.fromkeys(key for keys in in_order(jobs(), threads) for key in keys)
    if bad:
        raise SaveError(
            Problem(
                code="convert.verify",
                what=f"{len(bad)} tensors read back differently from what was converted",
                where=list_keys(bad),
                cause="a failing disk or memory, or a source that changed meanwhile",
                fix="convert again to another disk; nothing was put in place",
            )
        )


def compare_manifest(entries: Iterable[TensorEntry], target: Source) -> None:
    """Raise `SaveError` unless the target describes exactly these tensors."""
    found = target.manifest.tensors
    wanted = {entry.key: entry for entry in entries}
    bad = sorted(set(wanted) ^ set(found))
    bad += [
        key
        for key, entry in wanted.items()
        if key in found and (entry.shape, entry.dtype) != (found[key].shape, found[key].dtype)
    ]
    if bad:
        raise SaveError(
            Problem(
                code="convert.verify",
                what=f"{len(bad)} tensors are described otherwise than they were written",
                where=list_keys(bad),
                fix="report this: it is a fault of torchtitan-ckpt; nothing was put in place",
            )
        )


def compare_ties(ties: Sequence[tuple[str, str]], source: Source, max_bytes: int) -> None:
    """Tied tensors, of which one is converted, must be equal. Raises `MismatchError`."""
    bad = []
    for key, target in ties:
        mine, other = source.manifest.tensors[key], source.manifest.tensors[target]
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            bad.append(key)
            continue
        one, two = Stored(source, key, mine), Stored(source, target, other)
        for left, right in zip(one.pieces(max_bytes), two.pieces(max_bytes), strict=True):
            if not same_bytes(left.make()[0][2], right.make()[0][2]):
                bad.append(key)
                break
    if bad:
        raise MismatchError(
            Problem(
                code="convert.tied-differ",
                what="tensors that the model ties hold different values",
                where=list_keys(bad),
                expected=f"the values of {dict(ties)[bad[0]]}",
                cause="the tie was broken in training, or the config is of another model",
                fix="convert with a config that does not tie them (tie_word_embeddings)",
            )
        )
