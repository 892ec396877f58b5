"""Chapter `keys`, fifth part: what comes of a model or of files that lack a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

from conformance.checks._words import by_template, count
from conformance.fingerprint import blank
from conformance.lab import AdapterRaised, Direction, Lab, NotApplicable
from conformance.layers import Layer, layers_of
from conformance.subject import numbers_of, template_of
from conformance.template import Leaf, leaf_of
from conformance.trace import Trace
from conformance.verdict import Finding

_OTHER, _WHOLE = "of another shape", "of full size"


class Side:
    """One direction: what it is given, and what it makes of it."""

    def __init__(
        self, direction: Direction, given: Mapping[str, Leaf], made: Trace, *, partial: bool
    ) -> None:
        self.direction, self.given, self.made = direction, given, made
        self._layers = layers_of(given) if partial else {}
        self._near: dict[frozenset[Layer], set[str]] = {}

    def near(self, keys: Set[str]) -> dict[str, Leaf]:
        """What is given in the layers of these keys and outside layers, and converts alone.

        A default is made up where the neighbours are there; further layers cost time only. All that
        is given where no part is converted by itself.
        """
        at = frozenset(one for one, members in self._layers.items() if keys & set(members))
        if at not in self._near:
            far = (k for one, members in self._layers.items() if one not in at for k in members)
            found = set(self.given) - set(far)
            while more := [s for s in self.made.sources.values() if s & found and not s <= found]:
                found = found.union(*more) & self.given.keys()
            self._near[at] = found
        return {key: leaf for key, leaf in self.given.items() if key in self._near[at]}


class Lack(NamedTuple):
    """What came of a tensor without one that it is made from."""

    outcome: str
    target: str
    gone: str
    members: int


def half_group(lab: Lab) -> Iterator[Finding]:
    """What lacks a member raises, and what lacks its only source is not there; none is made up."""
    partial = lab.may.partial
    sides = (
        Side("to_hf", lab.native, lab.export, partial=partial),
        Side("from_hf", lab.export.leaves, lab.imported, partial=partial),
    )
    asked = [(side, key, gone) for side in sides for key, gone in _absences(lab, side)]
    if not asked:
        raise NotApplicable("no tensor is made from others")
    found: dict[tuple[Direction, bool], dict[str, Lack]] = {}
    for side, target, gone in asked:
        sources = side.made.sources[target]
        lacks = found.setdefault((side.direction, len(sources) > 1), {})
        if template_of(target) not in lacks and (outcome := _outcome(lab, side, target, gone)):
            lacks[template_of(target)] = Lack(outcome, target, gone[0], len(sources))
    for (direction, group), lacks in found.items():
        if lacks:
            yield from (_half if group else _made_up)(direction, [*lacks.values()])


def _absences(lab: Lab, side: Side) -> Iterator[tuple[str, tuple[str, ...]]]:
    """For the last tensor of each kind, sources to leave out.

    Of a group the last, the first, those of each kind, and one in the middle of each: what a loop
    over "what is there", over numbers or over names forgets.
    """
    tied = {*lab.may.tied, *lab.may.tied.values()}
    kinds = by_template(
        key for key, sources in side.made.sources.items() if sources and not tied & {key, *sources}
    )
    for target in (keys[-1] for keys in kinds.values()):
        if lab.native_only(target) or lab.hf_only(target):
            continue
        members = sorted(
            side.made.sources[target], key=lambda key: (template_of(key), numbers_of(key))
        )
        parts = [tuple(part) for part in by_template(members).values()]
        whole = parts if len(parts) > 1 else []
        middles = [(part[len(part) // 2],) for part in parts]
        for gone in dict.fromkeys([(members[-1],), (members[0],), *whole, *middles]):
            yield target, gone


def _outcome(lab: Lab, side: Side, target: str, gone: tuple[str, ...]) -> str:
    """What became of a tensor without some of its sources; an empty string where all is well."""
    leaves = {k: v for k, v in side.near(side.made.sources[target]).items() if k not in gone}
    few = sum(leaf.numel for leaf in leaves.values()) <= lab.max_elements // 4
    # Zeros, where there are few: a default made on the CPU does not go with meta tensors.
    state = blank(leaves, "cpu") if few else lab.blank(side.direction, leaves)
    try:
        out = lab.outputs(side.direction, state)
    except AdapterRaised:
        return ""
    if target not in out:
        return "is left out without a word" if len(side.made.sources[target]) > 1 else ""
    leaf = leaf_of(out[target])
    same = leaf is not None and leaf.shape == side.made.leaves[target].shape
    return f"is made without it, {_WHOLE if same else _OTHER}"


def _half(direction: Direction, lacks: list[Lack]) -> Iterator[Finding]:
    for outcome in dict.fromkeys(lack.outcome for lack in lacks):
        found = [lack for lack in lacks if lack.outcome == outcome]
        yield Finding(
            what=f"{direction} accepts {count(len(found), 'group')} with members missing",
            keys=tuple(key for lack in found for key in (lack.target, lack.gone)),
            expected=f"an error that names {found[0].gone}, 1 of {found[0].members}",
            actual=f"{found[0].target} {outcome}",
            cause="an incomplete group is taken for a part of the model",
            remedy="raise when some but not all members of a group are there",
        )


def _made_up(direction: Direction, lacks: list[Lack]) -> Iterator[Finding]:
    yield Finding(
        what=f"{direction} makes up {count(len(lacks), 'tensor')} that it was not given",
        keys=tuple(key for lack in lacks for key in (lack.target, lack.gone)),
        expected=f"without {lacks[0].gone}, no {lacks[0].target} or an error",
        actual=f"{lacks[0].target} {lacks[0].outcome}",
        cause="a default stands in for what is missing",
        remedy="leave it out or raise; declare what files need not hold (native_only)",
    )
