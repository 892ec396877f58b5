"""Composing two tables through the Hugging Face keys they share: a migration, derived.

`compose(a, b)` maps a's native names to b's. Where both sides of a key go through ops that undo
each other (unstack, then stack) nothing is left of them; what is left becomes the rule's ops. Keys
without a Hugging Face name are paired by the `peer` that their declarations share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_ckpt.errors import MappingError, Problem
from torchtitan_ckpt.mapping.mapping import Mapping
from torchtitan_ckpt.mapping.ops import Op
from torchtitan_ckpt.mapping.rule import HF, Entry, HfOnly, NativeOnly, Rule, Tied
from torchtitan_ckpt.mapping.template import Template


@dataclass(frozen=True, slots=True)
class _Joint:
    """Rules of both tables whose Hugging Face templates are the same set."""

    left: tuple[Rule, ...]
    right: tuple[Rule, ...]


def compose(a: Mapping, b: Mapping, *, name: str = "") -> Mapping:
    """The table from a's native side to b's. Raises MappingError where it cannot be derived."""
    problems: list[Problem] = []
    entries: list[Entry] = []
    for joint in _joints(a.rules, b.rules):
        if not joint.left or not joint.right:
            entries += _alone(joint, b if joint.left else a)
            continue
        found = _rule(joint)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            entries.append(found)
    entries += _peers(a, b)
    entries += _ties(a, b)
    if problems:
        raise MappingError(*problems)
    return Mapping(entries, name=name or f"{a.name} -> {b.name}")


def _keys(templates: Sequence[Template], rule: Rule) -> frozenset[tuple[object, ...]]:
    return frozenset(
        (t.signature, t.slots, tuple((n, _fixed(rule.where.get(n))) for n in t.names))
        for t in templates
    )


def _fixed(domain: object) -> object:
    return frozenset(domain) if isinstance(domain, (range, frozenset)) else None


def _joints(left: Sequence[Rule], right: Sequence[Rule]) -> list[_Joint]:
    """Group rules whose Hugging Face keys touch, until both groups hold the same keys."""
    owner: dict[tuple[object, ...], list[Rule]] = {}
    for rule in (*left, *right):
        for key in _keys(rule.hf, rule):
            owner.setdefault(key, []).append(rule)
    order = {id(rule): place for place, rule in enumerate((*left, *right))}
    seen: set[int] = set()
    out = []
    for first in (*left, *right):
        if id(first) in seen:
            continue
        queue, members = [first], []
        while queue:
            rule = queue.pop()
            if id(rule) in seen:
                continue
            seen.add(id(rule))
            members.append(rule)
            for key in _keys(rule.hf, rule):
                queue.extend(other for other in owner[key] if id(other) not in seen)
        members.sort(key=lambda rule: order[id(rule)])
        mine = tuple(rule for rule in members if order[id(rule)] < len(left))
        out.append(_Joint(mine, tuple(rule for rule in members if order[id(rule)] >= len(left))))
    return out


def _alone(joint: _Joint, other: Mapping) -> list[Entry]:
    """Declared losses for rules whose Hugging Face keys the other table declares as HfOnly.

    Where it does not even know them, nothing is declared and the keys are refused as unknown.
    """
    out: list[Entry] = []
    for rule in (*joint.left, *joint.right):
        template = rule.hf[0]
        sample = template.render({name: min(rule.where.get(name, (0,))) for name in template.names})
        match = other.index(HF).match(sample)
        entry = None if match is None else other.entries[match.entry]
        if not isinstance(entry, HfOnly):
            continue
        for native in rule.native:
            where = {n: d for n, d in rule.where.items() if n in native.names}
            if joint.left:
                out.append(NativeOnly(native.text, None, entry.why, where))
            else:
                out.append(HfOnly(native.text, entry.why, where))
    return out


def _rule(joint: _Joint) -> Rule | Problem:
    left, right = joint.left, joint.right
    where = " + ".join(str(rule) for rule in (*left, *right))
    if len(left) > 1 and len(right) > 1:
        return _problem(where, "several rules on both sides share keys")
    many, one = (left, right[0]) if len(right) == 1 else (right, left[0])
    ordered = _in_order(many, one)
    chains = {rule.ops for rule in ordered}
    if len(chains) != 1:
        return _problem(where, "the parts go through different ops")
    own = next(iter(chains))
    inner = own if many is left else one.ops
    outer = one.ops if many is left else own
    ops = _simplify([*inner, *(op.inverse for op in reversed(outer))])
    native = [rule.native[0].text for rule in (ordered if many is left else (one,))]
    other = [rule.native[0].text for rule in (ordered if many is right else (one,))]
    names = set().union(*(t.names for rule in (*left, *right) for t in rule.native))
    limits = {n: d for n, d in one.where.items() if n in names}
    try:
        return Rule(
            native[0] if len(native) == 1 else native,
            other[0] if len(other) == 1 else other,
            *ops,
            where=limits,
            dtype=one.dtype,
            pinned=one.pinned,
        )
    except MappingError as error:
        return _problem(where, error.problems[0].what)


def _in_order(many: Sequence[Rule], one: Rule) -> tuple[Rule, ...]:
    """The rules in the order in which `one` lists their Hugging Face keys."""
    texts = [template.text for template in one.hf]
    return tuple(sorted(many, key=lambda rule: texts.index(rule.hf[0].text)))


def _simplify(ops: Sequence[Op]) -> list[Op]:
    out: list[Op] = []
    for op in ops:
        if out and out[-1].inverse == op:
            out.pop()
        else:
            out.append(op)
    return out


def _peers(a: Mapping, b: Mapping) -> list[Entry]:
    """Rules for native-only keys that both tables have under different names."""
    right = {e.peer: e for e in b.entries if isinstance(e, NativeOnly) and e.peer}
    out: list[Entry] = []
    for entry in a.entries:
        if not isinstance(entry, NativeOnly):
            continue
        other = right.pop(entry.peer, None)
        if other is None:
            out.append(entry)
        else:
            out.append(Rule(entry.key, other.key, where=entry.where, dtype=entry.dtype))
    for extra in right.values():
        out.append(HfOnly(extra.key, extra.why, extra.where, extra.shape, extra.dtype))
    return out


def _ties(a: Mapping, b: Mapping) -> list[Entry]:
    """Rules for tied native keys that exist on both sides."""
    left = [e for e in a.entries if isinstance(e, Tied) and e.side == "native"]
    right = {e.group: e for e in b.entries if isinstance(e, Tied) and e.side == "native"}
    return [Rule(e.key, right[e.group].key) for e in left if e.group in right]


def _problem(where: str, what: str) -> Problem:
    return Problem(
        code="mapping.cannot-compose",
        what=f"two tables cannot be composed here: {what}",
        where=where,
        fix="convert through Hugging Face instead, or write the rule by hand",
    )
