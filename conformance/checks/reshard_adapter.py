"""Chapter `reshard`, second part: an adapter on the ranks of a split model.

The splits are the subject's degrees, else `adapter_lab.DEGREES`; tensors are laid out as torch lays
them out under real names of torchtitan's models, other names as FSDP has them. Tolerated, since
right adapters do it: an expert that only the ranks write which hold it; outputs of `to_hf` wherever
they lie; a tensor that comes back plain, or whole on ranks that the model shards it over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

from conformance.adapted import Told, Wrong
from conformance.checks._conversions import conversions
from conformance.checks._words import count
from conformance.lab import Lab, NotApplicable
from conformance.subject import template_of
from conformance.verdict import Finding

Under = tuple[str, Wrong]  # the name of a split, and what is wrong on a rank of it
Clause = Callable[[Lab], Iterator[Finding]]


def _pictured(check: Clause) -> Clause:
    """The check, which leaves pictures as well: of what its findings name, if it has some."""

    @functools.wraps(check)
    def pictured(lab: Lab) -> Iterator[Finding]:
        named: list[str] = []
        for finding in check(lab):
            named += finding.keys[:1]
            yield finding
        lab.pictures[f"reshard.{check.__name__}"] = conversions(lab, named)

    return pictured


@_pictured
def shapes(lab: Lab) -> Iterator[Finding]:
    """A size that is computed from a DTensor is the size that a plain tensor gives."""
    _some_ran(lab)
    for found, words in _causes(lab, lambda told: told.shapes):
        yield _finding(
            found,
            words,
            what=f"{found.direction} gives {words.many} another shape where the model is split",
            cause="a rank's part was taken for the whole, or the whole for a rank's part: "
            "a DTensor's shape is that of the whole tensor",
            remedy="compute sizes from the configuration, or from the shape as it is",
        )


@_pictured
def convert(lab: Lab) -> Iterator[Finding]:
    """Both directions work under every split, and give the values that one rank gives."""
    for found, words in _causes(lab, lambda told: told.raised):
        yield _finding(
            found,
            words,
            what=f"{found.direction} raises where the model is split",
            keys=(found.key or next(iter(lab.native)),),
            cause="an operation that wants a whole axis, or shards that divide it",
            remedy="redistribute to Replicate before it, and back after it",
        )
    for found, words in _causes(lab, lambda told: told.values, _left_out(lab)):
        yield _finding(
            found,
            words,
            what=f"{found.direction} gives {words.many} otherwise where the model is split",
            cause="a rank's part was converted as if it were the whole tensor",
            remedy="redistribute to Replicate before what moves elements along a sharded axis",
        )


@_pictured
def placements(lab: Lab) -> Iterator[Finding]:
    """What comes back is split as the model is, or not at all."""
    _some_ran(lab)
    told = [ranks[0] for _, ranks in lab.ranks.results]
    if not any(one.ways["as it lay"] + one.ways["whole"] + len(one.placements) for one in told):
        raise NotApplicable("from_hf returns plain tensors only: to split them is the trainer's")
    whole = max(one.ways["whole"] for one in told)
    if whole:
        lab.notes.append(f"from_hf returns {count(whole, 'tensor')} whole that the model shards")
    for found, words in _causes(lab, lambda told: told.placements):
        yield _finding(
            found,
            words,
            what=f"{found.direction} returns {words.many} split otherwise than the model",
            oracle="the tensors that to_hf was given",
            cause="a rank's part has the shape and the rows of another split",
            remedy="redistribute what is returned to the model's mesh and placements",
        )


class _Words:
    """What all tensors with one cause have in common."""

    def __init__(self, found: list[Under]) -> None:
        self.keys = tuple(dict.fromkeys(wrong.key for _, wrong in found))
        self.splits = ", ".join(dict.fromkeys(split for split, _ in found))
        self.many = count(len(self.keys), "tensor")


def _finding(
    found: Wrong,
    words: _Words,
    *,
    what: str,
    cause: str,
    remedy: str,
    keys: tuple[str, ...] = (),
    oracle: str = "plain tensors on one rank",
) -> Finding:
    return Finding(
        what=what,
        keys=keys or words.keys,
        coordinate=words.splits,
        expected=found.expected,
        actual=found.actual,
        oracle=oracle,
        cause=cause,
        remedy=remedy,
    )


def _causes(
    lab: Lab, of: Callable[[Told], Iterable[Wrong]], more: Iterable[Under] = ()
) -> Iterator[tuple[Wrong, _Words]]:
    """What is wrong, over all splits and ranks: one for each direction and template of keys."""
    groups: dict[tuple[str, str], list[Under]] = {}
    every = [
        (split, wrong) for split, ranks in lab.ranks.results for told in ranks for wrong in of(told)
    ]
    for split, wrong in (*every, *more):
        groups.setdefault((wrong.direction, template_of(wrong.key)), []).append((split, wrong))
    for found in groups.values():
        yield found[0][1], _Words(found)


def _left_out(lab: Lab) -> Iterator[Under]:
    """Keys of files that no rank writes, and keys of the model that some rank does not get back."""
    for split, ranks in lab.ranks.results:
        told = [one for one in ranks if not one.raised]
        if told:
            written = frozenset().union(*(one.given["to_hf"] for one in told))
            for key in [key for key in lab.ranks.exported if key not in written]:
                yield split, Wrong("to_hf", key, "a tensor, on some rank", "left out on all")
            back = frozenset.intersection(*(one.given["from_hf"] for one in told))
            for key in [key for key in lab.ranks.imported if key not in back]:
                yield split, Wrong("from_hf", key, "a tensor, on every rank", "left out")


def _some_ran(lab: Lab) -> None:
    if all(ranks[0].raised for _, ranks in lab.ranks.results):
        raise NotApplicable("the adapter raises under every split: see reshard.convert")
