"""Which layers of a model values are checked on, where the whole model is too large.

Knows keys and sizes; the tensors are `lab.py`'s.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conformance.subject import template_of
from conformance.template import Leaf

# The name of the layers and a number: `layers`, 3.
Layer = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model, and what is to be said of it; or why there is none."""

    leaves: dict[str, Leaf]
    note: str = ""
    refused: str = ""


def part_of(
    native: dict[str, Leaf],
    *,
    most: int,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    divisible: bool = True,
) -> Part:
    """The whole model up to `most` elements; else what is outside layers, and some layers.

    These are the first, the last and a drawn one of each kind, or as many of them as `most`
    elements allow; `layers` are the numbers of others.
    """
    total = _size(native, native)
    if total <= most and layers is None:
        return Part(native)
    found = layers_of(native)
    kinds = _kinds(native, found)
    if layers is not None:
        choices = [[at for at in found if at[1] in layers]]
    else:
        draw = random.Random(seed)
        drawn = [draw.choice(places[1:-1] or places) for places in kinds]
        firsts, lasts = ([places[end] for places in kinds] for end in (0, -1))
        choices = [[*firsts, *lasts, *drawn], [*firsts, *lasts], firsts]
    for chosen in choices:
        keys = _keys(native, found, chosen)
        count = _size(native, keys)
        if divisible and count <= most:
            names = ", ".join(f"{prefix}.{number}" for prefix, number in sorted(set(chosen)))
            return Part(
                {key: leaf for key, leaf in native.items() if key in keys},
                note=f"values are checked on {names} and what is outside layers: "
                f"{count / 1e6:.1f}M of {total / 1e6:.0f}M elements",
            )
    if total <= most:
        return Part(native)
    return Part(
        {},
        refused=f"{total / 1e6:.0f}M elements (one layer of each kind: {count / 1e6:.0f}M); "
        f"values are checked on up to {most / 1e6:.0f}M",
    )


def _kinds(
    native: Mapping[str, Leaf], found: Mapping[Layer, Sequence[str]]
) -> Iterable[list[Layer]]:
    """The layers, in order, that hold the same."""
    kinds: dict[object, list[Layer]] = {}
    for at in sorted(found):
        kind = frozenset((template_of(key), native[key]) for key in found[at])
        kinds.setdefault(kind, []).append(at)
    return kinds.values()


def layers_of(native: Iterable[str]) -> dict[Layer, list[str]]:
    """The keys of each layer; what comes once only has no layers."""
    found: dict[Layer, list[str]] = {}
    for key in native:
        parts = key.split(".")
        index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if index is not None:
            found.setdefault((".".join(parts[:index]), int(parts[index])), []).append(key)
    several = Counter(name for name, _ in found)
    return {at: keys for at, keys in found.items() if several[at[0]] > 1}


def _keys(
    native: Iterable[str], layers: Mapping[Layer, Sequence[str]], at: Iterable[Layer]
) -> set[str]:
    """The keys outside layers, and those of some layers."""
    inside = {key for keys in layers.values() for key in keys}
    return {key for key in native if key not in inside}.union(*(layers[one] for one in at))


def _size(native: Mapping[str, Leaf], keys: Iterable[str]) -> int:
    return sum(native[key].numel for key in keys)
