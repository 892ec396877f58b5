"""Finds words for a difference: swapped, transposed, sorted as text, a rotary permutation, ...

Works on element numbers (`fingerprint.Positions`), only after a comparison has failed; judging is
the checks' business.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from conformance.fingerprint import Positions


@dataclass(frozen=True, slots=True)
class Difference:
    """The first bad element of a tensor and the likely cause of all of them."""

    coordinate: str
    expected: str
    actual: str
    cause: str
    count: int


def explain(positions: Positions, expected: torch.Tensor, actual: torch.Tensor) -> Difference:
    """Explain how `actual` differs from `expected`; both hold element numbers, one shape each."""
    if actual.shape != expected.shape:
        actual = actual.reshape(expected.shape)
    wrong = actual != expected
    first = int(wrong.reshape(-1).int().argmax()) if wrong.numel() else 0
    coordinate = _coordinate(first, tuple(expected.shape))
    return Difference(
        coordinate=str(list(coordinate)),
        expected=_place(positions, int(expected.reshape(-1)[first])),
        actual=_place(positions, int(actual.reshape(-1)[first])),
        cause=_cause(positions, expected, actual),
        count=int(wrong.sum()),
    )


def _coordinate(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for size in reversed(shape):
        out.append(flat % size)
        flat //= size
    return tuple(reversed(out))


def _place(positions: Positions, number: int) -> str:
    place = positions.place(number)
    return str(place) if place else "a value that no input holds"


def _cause(positions: Positions, expected: torch.Tensor, actual: torch.Tensor) -> str:
    flat_e, flat_a = expected.reshape(-1), actual.reshape(-1)
    unknown = int(((flat_a == 0) & (flat_e != 0)).sum())
    if unknown == flat_a.numel():
        return "no element comes from the input: computed, constant, or left as it was"
    if unknown:
        return f"{unknown} of {flat_a.numel()} elements come from no input: computed or unfilled"
    shift = flat_a - flat_e
    if bool((shift == shift[0]).all()):
        return _moved(positions, flat_e, flat_a)
    if torch.equal(flat_a.sort().values, flat_e.sort().values):
        return _permutation(expected, actual)
    want, have = positions.owners(flat_e), positions.owners(flat_a)
    if torch.unique(flat_a).numel() < flat_a.numel():
        return "some elements are there twice and others are lost"
    if have != want:
        return "made from " + ", ".join(sorted(have)) + " instead of " + ", ".join(sorted(want))
    return "other elements of the same tensor"


def _moved(positions: Positions, flat_e: torch.Tensor, flat_a: torch.Tensor) -> str:
    want, have = positions.place(int(flat_e[0])), positions.place(int(flat_a[0]))
    if want is None or have is None:
        return "moved"
    if want.key != have.key:
        return f"holds {have.key} where {want.key} belongs: two tensors are swapped or shifted"
    places = [
        i for i, (a, b) in enumerate(zip(want.coordinate, have.coordinate, strict=True)) if a != b
    ]
    index = places[0] if places else 0
    a, b = want.coordinate[index], have.coordinate[index]
    hint = ""
    if sorted(range(positions.leaves[want.key].shape[index]), key=str)[a] == b:
        hint = " (numbers sorted as text)"
    elif abs(a - b) == 1:
        hint = " (off by one)"
    return f"slice {b} of {want.key} where slice {a} belongs{hint}"


def _permutation(expected: torch.Tensor, actual: torch.Tensor) -> str:
    shape = tuple(expected.shape)
    for axes in itertools.permutations(range(len(shape))):
        if axes == tuple(range(len(shape))):
            continue
        turned = expected.permute(axes)
        if torch.equal(turned.reshape(-1), actual.reshape(-1)):
            return f"transposed (axes {axes})"
        source = tuple(shape[axis] for axis in axes)
        if torch.equal(expected.reshape(source).permute(axes).reshape(-1), actual.reshape(-1)):
            return f"transposed (axes {axes})"
    for axis in range(len(shape)):
        order = _rows(expected, actual, axis)
        if order is not None:
            name = ("rows", "columns")[axis] if len(shape) == 2 else f"slices of axis {axis}"
            return f"{name} reordered: {_order(order)}"
    return "elements of this tensor reordered"


def _rows(expected: torch.Tensor, actual: torch.Tensor, axis: int) -> list[int] | None:
    want = expected.movedim(axis, 0).reshape(expected.shape[axis], -1)
    have = actual.movedim(axis, 0).reshape(actual.shape[axis], -1)
    index = {int(number): i for i, number in enumerate(want[:, 0].tolist())}
    order = [index.get(number, -1) for number in have[:, 0].tolist()]
    if -1 in order or not torch.equal(want[order], have):
        return None
    return order


def _order(order: list[int]) -> str:
    count = len(order)
    line = torch.arange(count)
    if order == sorted(range(count), key=str):
        return "numbers sorted as text (10 before 2)"
    if order == list(range(count))[::-1]:
        return "reversed"
    for step in (1, count - 1, count // 2):
        if order == torch.roll(line, step).tolist():
            return "halves exchanged" if 2 * step == count else f"shifted by {step}"
    for heads in range(1, count // 2 + 1):
        if count % (2 * heads):
            continue
        split = line.view(heads, 2, count // heads // 2).transpose(1, 2).reshape(-1)
        merge = line.view(heads, count // heads // 2, 2).transpose(1, 2).reshape(-1)
        if order == merge.tolist():
            return _halves("interleaved to half-split", heads)
        if order == split.tolist():
            return _halves("half-split to interleaved", heads)
    for block in (n for n in range(count // 4, 1, -1) if count % n == 0):
        for groups in (n for n in range(2, count // block // 2 + 1) if count // block % n == 0):
            each = count // block // groups
            if order == line.view(groups, each, block).transpose(0, 1).reshape(-1).tolist():
                return (
                    f"blocks of {block} regrouped: {groups} groups of {each} "
                    f"taken for {each} of {groups}"
                )
    wrong = [i for i, j in enumerate(order) if i != j]
    if len(wrong) == 2:
        return f"{wrong[0]} and {wrong[1]} exchanged"
    return ", ".join(f"{i}<-{order[i]}" for i in wrong[:4]) + (" …" if len(wrong) > 4 else "")


def _halves(change: str, heads: int) -> str:
    """A rotary permutation has heads; of one head it is any two halves that are laid otherwise."""
    if heads == 1:
        return f"two halves, {change} (gate and up, or one head's rotary order)"
    return f"the rotary permutation ({change}, {heads} heads)"
