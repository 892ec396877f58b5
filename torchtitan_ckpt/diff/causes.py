"""Why two tensors differ, where the reason is an order: rows or columns permuted, dimensions
transposed, tensors exchanged, rotary halves interleaved.

Works on sums of bit patterns, gathered in one pass over each tensor in windows: a sum for every
row, for every column and for the whole. Equal sums of 64 bits are taken for equal data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchtitan_ckpt.manifest import ITEM_SIZE

Ints = tuple[int, ...]
Sums = NDArray[np.uint64]
_SIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MAX_HEAD = 4096


@dataclass(frozen=True, slots=True)
class Signature:
    """`rows` [matrices, rows] and `columns` [matrices, columns] sum each line, weighted by place;
    `whole` sums all elements, weighted by their number in row-major order."""

    shape: Ints
    rows: Sums
    columns: Sums
    whole: int


class Signing:
    """Gathers the signature of one tensor from boxes in any order."""

    def __init__(self, shape: Ints) -> None:
        self.shape = shape
        self.matrix = (1, *shape)[-2:] if shape else (1, 1)
        self.count = math.prod(shape[:-2])
        self._rows = np.zeros((self.count, self.matrix[0]), dtype=np.uint64)
        self._columns = np.zeros((self.count, self.matrix[1]), dtype=np.uint64)
        self._whole = 0

    def add(self, tensor: torch.Tensor, offsets: Ints) -> None:
        """A box in its dense CPU tensor."""
        lead_shape, lead_offsets = self.shape[:-2], offsets[:-2]
        row0, column0 = (0, *offsets)[-2:] if offsets else (0, 0)
        rows, columns = (1, *tensor.shape)[-2:] if tensor.dim() else (1, 1)
        flat = tensor.contiguous().reshape(-1)
        kind = _SIGNED[min(ITEM_SIZE[str(tensor.dtype).removeprefix("torch.")], 8)]
        words = flat.view(torch.uint8).numpy().view(kind).astype(np.uint64)
        if words.size != flat.numel():  # complex128: two words an element
            words = words.reshape(flat.numel(), -1).sum(axis=1, dtype=np.uint64)
        boxes = words.reshape(-1, rows, columns)
        leads = np.arange(self.count).reshape(lead_shape or (1,))
        chosen = tuple(slice(o, o + n) for o, n in zip(lead_offsets, tensor.shape, strict=False))
        numbers = leads[chosen].reshape(-1) if lead_shape else leads
        across = _weights(column0, columns)
        down = _weights(row0, rows)
        for number, box in zip(numbers, boxes, strict=True):
            sums = (box * across).sum(axis=1, dtype=np.uint64)
            self._rows[number, row0 : row0 + rows] += sums
            self._columns[number, column0 : column0 + columns] += (box * down[:, None]).sum(
                axis=0, dtype=np.uint64
            )
            first = (int(number) * self.matrix[0] + row0) * self.matrix[1] + column0
            step = np.arange(rows, dtype=np.uint64) * np.uint64(self.matrix[1])
            place = step[:, None] + np.arange(columns, dtype=np.uint64) + np.uint64(first)
            self._whole = (self._whole + int((box * _mix(place)).sum(dtype=np.uint64))) % 2**64

    def result(self) -> Signature:
        return Signature(self.shape, self._rows, self._columns, self._whole)


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers that look random, one for each (splitmix64), odd so that none is lost."""
    with np.errstate(over="ignore"):
        x = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return mixed


def _weights(start: int, count: int) -> NDArray[np.uint64]:
    return _mix(np.arange(start, start + count, dtype=np.uint64))


def explain(a: Signature, b: Signature) -> str:
    """Why two tensors differ, in words; empty when no order explains it."""
    if a.shape != b.shape:
        return _other_shape(a, b)
    if a.rows.shape[0] > 1:
        matrices = [_fold(s) for s in (a, b)]
        order = _order(*matrices)
        if order is not None:
            return f"the first dimension is in another order: {_describe(order, 'entry')}"
    order = _order(a.rows.reshape(-1), b.rows.reshape(-1))
    if order is not None and len(set(order.tolist())) > 1:
        return f"rows are in another order: {_describe(order, 'row')}"
    if a.rows.shape == b.columns.shape and np.array_equal(a.rows, b.columns):
        return "the last two dimensions are transposed"
    orders = [_order(x, y) for x, y in zip(a.columns, b.columns, strict=True)]
    first = orders[0]
    if first is not None and all(o is not None and np.array_equal(o, first) for o in orders):
        return f"columns are in another order: {_describe(first, 'column')}"
    return ""


def _fold(signature: Signature) -> Sums:
    """A sum for each matrix."""
    weights = _weights(0, signature.rows.shape[1])
    folded: Sums = (signature.rows * weights).sum(axis=1, dtype=np.uint64)
    return folded


def _other_shape(a: Signature, b: Signature) -> str:
    same_lead = a.shape[:-2] == b.shape[:-2] and len(a.shape) == len(b.shape) > 1
    swapped = same_lead and a.shape[-2:] == b.shape[-2:][::-1]
    if swapped and np.array_equal(a.rows, b.columns):
        return "the last two dimensions are transposed"
    if math.prod(a.shape) == math.prod(b.shape) and a.whole == b.whole:
        return "the same elements in the same order, in another shape"
    if a.shape[1:] == b.shape[1:] and a.rows.size and len(a.shape) == 2:
        short = min(a.shape[0], b.shape[0])
        if np.array_equal(a.rows[:, :short], b.rows[:, :short]):
            more = "b" if b.shape[0] > short else "a"
            return f"the first {short} rows are equal: {more} has more (a padded vocabulary?)"
    return ""


def _order(a: Sums, b: Sums) -> NDArray[np.intp] | None:
    """`order` such that b[i] is a[order[i]]; None when b is no other order of a."""
    if np.array_equal(a, b):
        return None
    by_a, by_b = np.argsort(a, kind="stable"), np.argsort(b, kind="stable")
    if not np.array_equal(a[by_a], b[by_b]):
        return None
    order = np.empty(len(a), dtype=np.intp)
    order[by_b] = by_a
    return order


def _describe(order: NDArray[np.intp], what: str) -> str:
    count = len(order)
    numbers = np.arange(count)
    moved = np.nonzero(order != numbers)[0]
    if len(moved) == 2:
        return f"{what} {moved[0]} and {what} {moved[1]} are exchanged"
    shift = int(order[0])
    if shift and np.array_equal(order, (numbers + shift) % count):
        if shift * 2 == count:
            return "the two halves are exchanged (such as gate and up, w1 and w3)"
        return f"moved by {shift}"
    if np.array_equal(order, count - 1 - numbers):
        return "reversed"
    texts = np.array(sorted(range(count), key=str))
    if np.array_equal(order, texts) or np.array_equal(np.argsort(texts), order):
        return "sorted as text (0, 1, 10, 11, 2, …) on one side, as numbers on the other"
    rope = _rope(order)
    if rope:
        return rope
    i = int(moved[0])
    return f"{len(moved)} of {count}; {what} {i} of b is {what} {int(order[i])} of a"


def _rope(order: NDArray[np.intp]) -> str:
    """Rotary halves interleaved or the reverse, in every head or in a part of every head."""
    count = len(order)
    for head in range(2, min(count, _MAX_HEAD) + 1, 2):
        if count % head:
            continue
        inside = order.reshape(-1, head) - np.arange(0, count, head)[:, None]
        if (inside != inside[0]).any() or inside.min() < 0 or inside.max() >= head:
            continue
        moved = np.nonzero(inside[0] != np.arange(head))[0]
        # The first and the last of a rotary part stay where they are.
        start, stop = int(moved[0]) - 1, int(moved[-1]) + 2
        size = stop - start
        if start < 0 or stop > head or size % 2 or size < 4:
            continue
        halves = np.arange(size).reshape(2, -1).T.ravel()
        pairs = np.arange(size).reshape(-1, 2).T.ravel()
        part = inside[0][start:stop] - start
        where = f"heads of {head}" + ("" if size == head else f", {size} of them from {start}")
        if np.array_equal(part, halves):
            return f"the rotary permutation ({where}): a has halves, b has them interleaved"
        if np.array_equal(part, pairs):
            return f"the rotary permutation ({where}): a is interleaved, b has halves"
    return ""


def exchanged(a: dict[str, Signature], b: dict[str, Signature]) -> Iterable[tuple[str, str]]:
    """(key, other): b's tensor at `key` is a's tensor at `other`."""
    by_whole: dict[tuple[Ints, int], Any] = {(s.shape, s.whole): key for key, s in a.items()}
    for key, signature in b.items():
        other = by_whole.get((signature.shape, signature.whole))
        if other is not None and other != key:
            yield key, other
