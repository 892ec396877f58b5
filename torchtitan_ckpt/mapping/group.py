"""Keys gathered into groups: one rule at one binding, its big tensor and its parts.

A group is the unit that converts, streams and fails as a whole. This module gathers keys, finds
what is missing of a half group, and spells keys; it touches no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchtitan_ckpt.errors import Problem, list_keys
from torchtitan_ckpt.mapping.apply import Part, parts_in_order
from torchtitan_ckpt.mapping.index import Index
from torchtitan_ckpt.mapping.rule import SIDES, Entry, Rule, binding_key
from torchtitan_ckpt.mapping.template import Binding
from torchtitan_ckpt.mapping.view import Shape


@dataclass(slots=True)
class Group:
    """One rule at one binding, and the keys of the source side that belong to it."""

    rule: Rule
    binding: Binding
    side: int
    keys: dict[Part, str] = field(default_factory=dict)

    @property
    def big_key(self) -> str:
        return self.rule.sides[self.rule.big][0].render(self.binding)

    def part_key(self, part: Part) -> str:
        index, coords = part
        template = self.rule.sides[1 - self.rule.big][index]
        values = dict(zip(self.rule.key_names, coords, strict=True))
        return template.render({**self.binding, **values})

    def counts(self) -> dict[str, int]:
        """How many values each consumed placeholder has: by the rule's domain, else as found."""
        found = [coords for _, coords in self.keys] if self.side != self.rule.big else []
        out = {}
        for place, name in enumerate(self.rule.key_names):
            domain = self.rule.where.get(name)
            seen = 1 + max((coords[place] for coords in found), default=-1)
            out[name] = len(domain) if domain is not None else seen
        return out

    def missing(self) -> list[str]:
        """Keys of the source side that the group needs and does not have."""
        if self.side == self.rule.big:
            return []
        wanted = parts_in_order(self.rule, list(self.counts().values()))
        return [self.part_key(part) for part in wanted if part not in self.keys]

    def where(self) -> str:
        template = self.rule.sides[self.side][0]
        return template.partial(self.binding)


def gather(
    entries: Sequence[Entry], index: Index, keys: Iterable[str], side: int
) -> tuple[dict[tuple[int, tuple[int, ...]], Group], dict[str, tuple[int, Binding]], list[str]]:
    """Groups of rules, keys of the other entries (with entry and binding), and unknown keys."""
    groups: dict[tuple[int, tuple[int, ...]], Group] = {}
    others: dict[str, tuple[int, Binding]] = {}
    unknown: list[str] = []
    for key in keys:
        match = index.match(key)
        if match is None:
            unknown.append(key)
            continue
        entry = entries[match.entry]
        if not isinstance(entry, Rule):
            others[key] = (match.entry, match.binding)
            continue
        names = entry.sides[entry.big][0].names
        slot = (match.entry, binding_key(match.binding, names))
        group = groups.get(slot)
        if group is None:
            bound = {name: match.binding[name] for name in names}
            group = groups[slot] = Group(entry, bound, side)
        if side == entry.big:
            group.keys[0, ()] = key
        else:
            group.keys[match.index, binding_key(match.binding, entry.key_names)] = key
    return groups, others, unknown


def half_groups(groups: Iterable[Group]) -> Iterator[Problem]:
    """A Problem for every group of which some source keys are missing."""
    for group in groups:
        missing = group.missing()
        if missing:
            have = len(group.keys)
            yield Problem(
                code="mapping.half-group",
                what=f"{len(missing)} of {have + len(missing)} {SIDES[group.side]} tensors missing "
                f"for {group.big_key}",
                where=list_keys(missing),
                expected=f"all parts of the rule {group.rule}",
                actual=f"present: {list_keys(group.keys.values(), limit=3)}",
                fix="give the whole group, or none of it",
            )


def odd_values(groups: Iterable[Group], state: Mapping[str, object], kind: type) -> list[Problem]:
    """A Problem for values that are no tensors under keys that rules claim."""
    bad = [
        key
        for group in groups
        for key in group.keys.values()
        if key in state and not isinstance(state[key], kind)
    ]
    if not bad:
        return []
    names = sorted({type(state[key]).__name__ for key in bad})
    return [
        Problem(
            code="mapping.not-a-tensor",
            what=f"{len(bad)} values are no tensors",
            where=list_keys(bad),
            actual=", ".join(names),
            fix="pass a flat model state dict of tensors",
        )
    ]


def shape_problem(group: Group, why: str, shapes: Mapping[str, Shape]) -> Problem:
    """What an op could not take, in terms of keys."""
    shown = "; ".join(f"{key} {list(shape)}" for key, shape in list(shapes.items())[:3])
    return Problem(
        code="mapping.shape",
        what=f"the rule {group.rule} cannot take these shapes: {why}",
        where=group.where(),
        actual=shown,
        fix="check the config (heads, head_dim, experts) against the tensors",
    )
