"""Helpers of the checks for wording findings; not a chapter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from conformance.fingerprint import State, same_bits
from conformance.subject import template_of

T = TypeVar("T")


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
    """Key -> how `have` differs from `wanted`: absent, of another shape, other bits, or new."""
    wrong = {}
    for key, value in wanted.items():
        if key not in have:
            wrong[key] = "left out"
        elif tuple(have[key].shape) != tuple(value.shape):
            wrong[key] = f"shape {tuple(have[key].shape)}"
        elif not same_bits(value, have[key]):
            wrong[key] = "another value"
    return wrong | {k: "a new key" for k in have if k not in wanted}


def count(number: int, noun: str) -> str:
    """`1 key`, `2 keys`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
