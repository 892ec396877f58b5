"""Which layers of a model values are checked on, where the whole model is too large.

Knows keys and sizes; the tensors are `lab.py`'s.
"""

from __future__ import annotations

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
    layers: Sequence[int] | None = None,
    divisible: bool = True,
) -> Part:
    """The whole model up to `most` / 2 elements; else what is outside layers, and some layers.

    These are the first and the last of each kind, or the first only, and never more than `most`
    elements; `layers` are the numbers of others. What is not divisible is taken whole up to `most`.
    """
    total = _size(native, native)
    whole = Part(native)
    if total <= most // 2 and layers is None:
        return whole
    found = _layers(native)
    inside = {key for keys in found.values() for key in keys}
    rest = [key for key in native if key not in inside]
    kinds: dict[object, list[Layer]] = {}
    for at in sorted(found):
        kind = frozenset((template_of(key), native[key]) for key in found[at])
        kinds.setdefault(kind, []).append(at)
    ends = [at for places in kinds.values() for at in sorted({places[0], places[-1]})]
    if layers is not None:
        ends = [at for at in found if at[1] in layers]
    elif _size(native, _keys(rest, found, ends)) > most // 2:
        ends = [places[0] for places in kinds.values()]
    keys = _keys(rest, found, ends)
    count = _size(native, keys)
    if divisible and count <= most:
        names = ", ".join(f"{prefix}.{number}" for prefix, number in sorted(ends))
        return Part(
            {key: leaf for key, leaf in native.items() if key in keys},
            note=f"values are checked on {names} and what is outside layers: "
            f"{count / 1e6:.1f}M of {total / 1e6:.0f}M elements",
        )
    if total <= most:
        return whole
    return Part(
        {},
        refused=f"{total / 1e6:.0f}M elements (one layer of each kind: {count / 1e6:.0f}M); "
        f"values are checked on up to {most / 1e6:.0f}M",
    )


def _layers(native: Mapping[str, Leaf]) -> dict[Layer, list[str]]:
    """The keys of each layer; what comes once only has no layers."""
    found: dict[Layer, list[str]] = {}
    for key in native:
        parts = key.split(".")
        index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if index is not None:
            found.setdefault((".".join(parts[:index]), int(parts[index])), []).append(key)
    several = Counter(name for name, _ in found)
    return {at: keys for at, keys in found.items() if several[at[0]] > 1}


def _keys(rest: Iterable[str], layers: Mapping[Layer, list[str]], at: Iterable[Layer]) -> set[str]:
    return {*rest, *(key for one in at for key in layers[one])}


def _size(native: Mapping[str, Leaf], keys: Iterable[str]) -> int:
    return sum(native[key].numel for key in keys)
