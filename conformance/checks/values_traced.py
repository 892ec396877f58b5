"""Chapter `values`, fourth part: which tensors each is made from, on all layers of any model.

Traces need no data, so that what values are checked on, some layers of a large model, is not all
that is compared. They know keys: where in a tensor an element lies is for `values.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from conformance.checks._words import count
from conformance.lab import Direction, Lab
from conformance.subject import template_of
from conformance.verdict import Finding

_SHOWN = 3


class Source(NamedTuple):
    """What a tensor should be made from, what it is made from, and by way of what."""

    expected: frozenset[str]
    actual: frozenset[str]
    way: str = ""


def otherwise_made(lab: Lab, direction: Direction) -> dict[str, Source]:
    """Tensors that the reference makes from others than the adapter does."""
    theirs = lab.asked
    known: Set[str] = lab.native.keys()
    ours, tied = lab.export, lab.may.tied
    if direction == "from_hf":
        files = {k: leaf for k, leaf in lab.export.leaves.items() if k in theirs.leaves}
        ours, known, tied = lab.imported, theirs.leaves.keys(), lab.hf_tied
        theirs = lab.trace(direction, {**theirs.leaves, **files}, lab.ask)
    wrong = {}
    for key, sources in theirs.sources.items():
        mine = ours.sources.get(key, frozenset())
        pair = Source(_same(sources, tied), _same(mine, tied))
        if all(pair[:2]) and mine <= known and not lab.alias(key) and pair.expected != pair.actual:
            wrong[key] = pair
    return wrong


def strays(lab: Lab) -> dict[str, Source]:
    """Native tensors that import makes of a file's tensor that export makes of others."""
    wrong = {}
    for key, files in lab.imported.sources.items():
        own = _same((key,), lab.may.tied)
        if key not in lab.native or lab.lossy(key) or lab.native_only(key):
            continue
        for file in sorted(files):
            sources = _same(lab.export.sources.get(file, frozenset()), lab.may.tied)
            if sources and not own <= sources:
                wrong[key] = Source(own, sources, file)
                break
    return wrong


def _same(keys: Iterable[str], tied: Mapping[str, str]) -> frozenset[str]:
    """The keys, each tied one under one name."""
    return frozenset(tied.get(key, key) for key in keys)


def told(wrong: Mapping[str, Source], what: str, oracle: str = "") -> Iterator[Finding]:
    """One finding for all that is exchanged alike, on both sides of the exchange."""
    alike: dict[frozenset[str], list[str]] = {}
    for key, (expected, actual, _) in wrong.items():
        alike.setdefault(frozenset(map(template_of, expected ^ actual)), []).append(key)
    for templates, keys in alike.items():
        expected, actual, way = wrong[keys[0]]
        missing, new = expected - actual, actual - expected
        yield Finding(
            what=f"{what} {count(len(keys), 'tensor')} of other tensors",
            keys=tuple(keys),
            expected=f"made from {_shown(missing or expected)}",
            actual=f"made from {_shown(new or actual)}"
            + (f", which to_hf writes as {way}" if way else ""),
            cause=("a number is another" if len(templates) == 1 else "names are exchanged")
            + (" in one of the directions" if way else ""),
            remedy="give each name of one side one name of the other, with the same numbers",
            oracle=oracle,
        )


def _shown(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
