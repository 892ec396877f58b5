"""Chapter `values`, fifth part: what an independent implementation of the conversion gives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from conformance.checks._words import by_template, by_words, count, first_difference
from conformance.checks.values_traced import otherwise_made, told
from conformance.compare import explain
from conformance.fingerprint import Positions, code_of, same_bits
from conformance.lab import Direction, Lab
from conformance.subject import template_of
from conformance.verdict import Finding, Told

# What the reference gave for a key, and what the adapter gave, digit by digit.
Pair = tuple[list[torch.Tensor], list[torch.Tensor]]


def pinned_export(lab: Lab) -> Iterator[Finding | Told]:
    """What is written, and its elements, against what the reference writes."""
    yield from _pinned(lab, "to_hf", lab.positions, lab.value_native.keys())


def pinned_import(lab: Lab) -> Iterator[Finding | Told]:
    """What is read, and its elements, against what the reference reads from the same files."""
    whole = lab.value_native is lab.native
    written = (lab.asked if whole else lab.trace("to_hf", lab.value_native, lab.ask)).leaves
    # What the adapter leaves out, or writes in another shape, is as the reference has it: files are
    # what both read, and what the adapter makes of them instead is told by `keys` and `shapes`.
    theirs = {
        key: leaf
        for key, leaf in written.items()
        if key not in lab.value_hf or lab.value_hf[key].shape != leaf.shape
    }
    positions = Positions({**lab.value_hf, **theirs}, lab.hf_tied)
    yield from _pinned(lab, "from_hf", positions, written.keys())


def _pinned(
    lab: Lab, direction: Direction, positions: Positions, known: Collection[str]
) -> Iterator[Finding | Told]:
    """Compare what tensors are made from, on all layers; then the others, digit by digit.

    `known` are the keys that the reference takes. Only what differs is decoded to elements.
    """
    oracle = f"reference {lab.reference.name}"
    others = otherwise_made(lab, direction)
    yield from told(others, f"{direction} makes", oracle)
    ours_take = _taken(lab, direction)
    sources = lab.export.sources if direction == "to_hf" else lab.imported.sources
    digits: dict[str, Pair] = {}
    differ: set[str] = set()
    for which in range(positions.passes):
        state = positions.state(which)
        ours = lab.convert(direction, {k: v for k, v in state.items() if k in ours_take})
        theirs = lab.ask(direction, {k: v for k, v in state.items() if k in known})
        for key, value in theirs.items():
            if key not in ours or not sources.get(key, frozenset()) <= set(known):
                continue
            pair = digits.setdefault(key, ([], []))
            pair[0].append(value)
            pair[1].append(ours[key])
            if value.shape == ours[key].shape and not same_bits(value, ours[key]):
                differ.add(key)
    chosen = {
        key: pair
        for key, pair in digits.items()
        if key in differ
        and key not in others
        # A cast is the finding of `dtypes`.
        and not cast(lab, key, back=direction == "from_hf")
        and not (direction == "from_hf" and lab.alias(key))
    }
    lossy = frozenset(filter(lab.lossy, chosen))
    found = _differences(direction, positions, chosen, oracle, lossy)
    yield from steady(lab, direction, positions, chosen, found)


def steady(
    lab: Lab,
    direction: Direction,
    positions: Positions,
    keys: Collection[str],
    found: Iterable[Finding],
) -> Iterator[Finding | Told]:
    """The findings about some keys; of numbers that change from call to call, another's to tell.

    Digits of several passes are then no number, and name a cause that is none.
    """
    if not (findings := list(found)):
        return
    state = {k: v for k, v in positions.state(0).items() if k in _taken(lab, direction)}
    one, two = (lab.convert(direction, state) for _ in range(2))
    same = all(k in one and k in two and same_bits(one[k], two[k]) for k in keys)
    yield from findings if same else (Told(one, by="purity.stateless") for one in findings)


def _taken(lab: Lab, direction: Direction) -> Collection[str]:
    return lab.value_native if direction == "to_hf" else lab.value_hf


def _differences(
    direction: Direction,
    positions: Positions,
    pairs: Mapping[str, Pair],
    oracle: str,
    lossy: Collection[str] = (),
) -> Iterator[Finding]:
    wrong: dict[str, str] = {}
    details = {}
    made_up = []
    for key, (theirs, ours) in pairs.items():
        expected, actual = positions.decode(theirs), positions.decode(ours)
        # Another shape is the finding of `shapes`.
        if actual.shape != expected.shape:
            continue
        if key in lossy:
            # Values may be others by right; an element that both have in another place may not.
            actual = torch.where((expected == 0) | (actual == 0), expected, actual)
        if torch.equal(actual, expected):
            if theirs[0].dtype == ours[0].dtype and key not in lossy:
                made_up.append(key)
            continue
        found = explain(positions, expected, actual)
        # Numbers in the cause differ from layer to layer; the template of the words does not.
        wrong[key] = template_of(found.cause)
        details[key] = found
    for _, keys in by_words(wrong):
        first = details[keys[0]]
        yield Finding(
            what=f"{direction} puts other elements into {count(len(keys), 'tensor')}",
            keys=tuple(keys),
            coordinate=first.coordinate,
            expected=first.expected,
            actual=first.actual,
            cause=first.cause,
            remedy="compare this direction with the oracle alone: a round trip cannot see it",
            oracle=oracle,
        )
    for keys in by_template(made_up).values():
        places = (first_difference(*pair) for pair in zip(*pairs[keys[0]], strict=True))
        at, wanted, have = next(filter(any, places))
        yield Finding(
            what=f"{direction} makes up other values for {count(len(keys), 'tensor')}",
            keys=tuple(keys),
            coordinate=at,
            expected=wanted,
            actual=have,
            cause="a constant, or a value that is computed: no input holds it",
            remedy="fill it as the other implementation does, or declare it (lossy) with a reason",
            oracle=oracle,
        )


def cast(lab: Lab, key: str, *, back: bool = False) -> bool:
    """Whether a key changes to a dtype of another code: the finding of `dtypes`."""
    trace, inputs = (lab.imported, lab.export.leaves) if back else (lab.export, lab.native)
    if key not in trace.leaves:
        return False
    kinds = {code_of(inputs[s].dtype) for s in trace.sources[key] if s in inputs}
    return bool(kinds) and kinds != {code_of(trace.leaves[key].dtype)}
