"""Helpers of the checks for wording findings; not a chapter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from conformance.fingerprint import State, same_bits, settled
from conformance.subject import template_of

T = TypeVar("T")
OTHER = "another value"


def by_template(keys: Iterable[str]) -> dict[str, list[str]]:
    """Keys grouped by template, in order of appearance."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(template_of(key), []).append(key)
    return groups


def by_words(items: Mapping[str, T]) -> Iterator[tuple[T, list[str]]]:
    """Group keys whose template and description are equal: one root cause, one finding."""
    groups: dict[tuple[str, T], list[str]] = {}
    for key, words in items.items():
        groups.setdefault((template_of(key), words), []).append(key)
    for (_, words), keys in groups.items():
        yield words, keys


def otherwise(wanted: State, have: State) -> dict[str, str]:
    """Key -> how `have` differs from `wanted`: absent, another shape, dtype or bits, or new."""
    wrong = {}
    for key, value in wanted.items():
        if key not in have:
            wrong[key] = "left out"
        elif tuple(have[key].shape) != tuple(value.shape):
            wrong[key] = f"shape {tuple(have[key].shape)}"
        elif have[key].dtype != value.dtype:
            wrong[key] = f"dtype {str(have[key].dtype).removeprefix('torch.')}"
        elif not same_bits(value, have[key]):
            wrong[key] = OTHER
    return wrong | {k: "a new key" for k in have if k not in wanted}


@dataclass(frozen=True, slots=True)
class Otherwise:
    """Keys of one template that differ alike, and the first element of the first of them."""

    words: str
    keys: tuple[str, ...]
    coordinate: str = ""
    wanted: str = ""
    found: str = ""

    @property
    def actual(self) -> str:
        return f"{self.words}: {self.found} for {self.wanted}" if self.coordinate else self.words


def differences(wanted: State, have: State) -> Iterator[Otherwise]:
    """How `have` differs from `wanted`, one root cause at a time."""
    for words, keys in by_words(otherwise(wanted, have)):
        place = first_difference(wanted[keys[0]], have[keys[0]]) if words == OTHER else ()
        yield Otherwise(words, tuple(keys), *place)


def first_difference(wanted: torch.Tensor, have: torch.Tensor) -> tuple[str, str, str]:
    """Coordinate of the first element whose bits differ, and both values; blank where none can be.

    Other shapes and dtypes have no such element.
    """
    if wanted.shape != have.shape or wanted.dtype != have.dtype or same_bits(wanted, have):
        return "", "", ""
    flat, other = wanted.reshape(-1), have.reshape(-1)
    # A complex element has two words of bits.
    differ = (settled(flat) != settled(other)).reshape(len(flat), -1).any(dim=1)
    first = int(differ.int().argmax())
    at = torch.unravel_index(torch.tensor(first), wanted.shape) if wanted.dim() else ()
    return str([int(i) for i in at]), str(flat[first].item()), str(other[first].item())


def unfilled(wanted: torch.Tensor, have: torch.Tensor) -> bool:
    """Whether NaN is left where another value should be: nobody wrote there."""
    wide = have.is_floating_point() and have.element_size() > 1
    return wide and bool((have.isnan() & ~wanted.isnan()).any())


def count(number: int, noun: str) -> str:
    """`1 key`, `2 keys`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
