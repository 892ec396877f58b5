"""Making plans: from a native manifest to Hugging Face, and to native from either side's manifest.

The groups come from the same table and the same proof as a conversion in memory; nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.mapping.apply import Part
from torchtitan_ckpt.mapping.group import Group, gather, half_groups, shape_problem
from torchtitan_ckpt.mapping.index import raise_all
from torchtitan_ckpt.mapping.mapping import Mapping as KeyMapping
from torchtitan_ckpt.mapping.mapping import bindings, parents
from torchtitan_ckpt.mapping.plan import Plan, PlanGroup, target_dtype
from torchtitan_ckpt.mapping.rule import HF, NATIVE, NativeOnly, Tied
from torchtitan_ckpt.mapping.view import Shape, ShapeError

# Chooses a target's dtype from its key and the dtype that the rule gives.
ChooseDtype = Callable[[str, str], str]
Entries = Mapping[str, TensorEntry]


def plan_to_hf(mapping: KeyMapping, native: Entries, *, dtype: ChooseDtype | None = None) -> Plan:
    """Native to Hugging Face. `dtype` picks each target's dtype (an export dtype, say)."""
    groups = _convert(mapping, native, NATIVE, dtype)
    return Plan((*groups, *_copies(mapping, groups, HF)))


def plan_to_native(mapping: KeyMapping, hf: Entries, *, dtype: ChooseDtype | None = None) -> Plan:
    """Hugging Face (logical shapes, dequantized) to native, with declared constants filled in."""
    groups = _convert(mapping, hf, HF, dtype)
    groups += _copies(mapping, groups, NATIVE)
    present = parents(entry.key for group in groups for entry in group.targets)
    return Plan((*groups, *_constants(mapping, lambda key: key.rpartition(".")[0] in present)))


def plan_load(mapping: KeyMapping, native: Entries) -> Plan:
    """What a model that wants exactly these native tensors reads of a Hugging Face checkpoint.

    Sources have the shapes that the rules imply. Keys that Hugging Face lacks become constants
    where the table declares one, and are left out where it does not.
    """
    wanted = dict(native)
    aliases: dict[str, list[str]] = {}
    for key in native:
        match = mapping.index(NATIVE).match(key)
        entry = None if match is None else mapping.entries[match.entry]
        if isinstance(entry, Tied) and match is not None:
            target = entry.target.render(match.binding)
            aliases.setdefault(target, []).append(key)
            own = wanted.pop(key)
            wanted.setdefault(target, replace(own, key=target))
    groups, _, unknown = gather(mapping.entries, mapping.index(NATIVE), wanted, NATIVE)
    problems = mapping.index(NATIVE).unknown(unknown)
    out: list[PlanGroup] = []
    for group in groups.values():
        entries = {part: wanted[key] for part, key in group.keys.items()}
        try:
            made = _group(group, entries, NATIVE, _loading_shape(group, entries))
        except ShapeError as error:
            shapes = {tensor.key: tensor.shape for tensor in entries.values()}
            problems.append(shape_problem(group, str(error), shapes))
            continue
        for tensor in entries.values():
            for alias in aliases.get(tensor.key, ()):
                copy = replace(tensor, key=alias)
                out.append(replace(made, targets=(copy,), copy_of=tensor.key))
        kept = tuple(tensor for tensor in made.targets if tensor.key in native)
        if kept:
            out.append(replace(made, targets=kept))
    raise_all(problems)
    return Plan((*out, *_constants(mapping, native.__contains__)))


def _loading_shape(group: Group, entries: Mapping[Part, TensorEntry]) -> Shape:
    rule = group.rule
    if rule.big == NATIVE:
        return entries[0, ()].shape
    if group.missing():
        if rule.shape is None:
            raise ShapeError("a part of the group alone does not tell the whole tensor's shape")
        return rule.shape
    return _big_shape(group, entries)


def _big_shape(group: Group, entries: Mapping[Part, TensorEntry]) -> Shape:
    shapes: dict[int, Shape] = {}
    for (index, _), entry in entries.items():
        if shapes.setdefault(index, entry.shape) != entry.shape:
            raise ShapeError(
                f"parts differ in shape: {list(shapes[index])} and {list(entry.shape)}"
            )
    if len({entry.dtype for entry in entries.values()}) > 1:
        raise ShapeError("parts differ in dtype")
    return group.rule.big_shape([shapes[index] for index in sorted(shapes)], group.counts())


def _group(
    group: Group, entries: Mapping[Part, TensorEntry], toward: int, shape: Shape
) -> PlanGroup:
    """A group whose targets are `entries`, which lie on the side `toward`."""
    rule = group.rule
    rule.links(shape)
    dtype = next(iter(entries.values())).dtype
    source = target_dtype(rule, 1 - toward, dtype)
    keys = Group(rule, group.binding, 1 - toward)
    return PlanGroup(keys, tuple(entries.values()), source, shape, rule.big == toward)


def _convert(
    mapping: KeyMapping, entries: Entries, side: int, choose: ChooseDtype | None
) -> list[PlanGroup]:
    present = dict(entries)
    for tied, key, target in mapping.bound_ties(side, list(present)):
        own = present.pop(key)
        if side == HF and not tied.import_loss:
            present.setdefault(target, own)
    groups, _, unknown = gather(mapping.entries, mapping.index(side), present, side)
    problems = mapping.index(side).unknown(unknown)
    problems += half_groups(groups.values())
    raise_all(problems)
    out: list[PlanGroup] = []
    for group in groups.values():
        parts = {part: present[key] for part, key in group.keys.items()}
        try:
            out.append(_planned(group, parts, side, choose))
        except ShapeError as error:
            shapes = {entry.key: entry.shape for entry in parts.values()}
            problems.append(shape_problem(group, str(error), shapes))
    raise_all(problems)
    return out


def _planned(
    group: Group, parts: Mapping[Part, TensorEntry], side: int, choose: ChooseDtype | None
) -> PlanGroup:
    rule = group.rule
    source = next(iter(parts.values())).dtype
    given = target_dtype(rule, 1 - side, source)

    def entry(key: str, shape: Shape) -> TensorEntry:
        return TensorEntry(key, shape, choose(key, given) if choose else given)

    if side != rule.big:
        shape = _big_shape(group, parts)
        rule.links(shape)
        return PlanGroup(group, (entry(group.big_key, shape),), source, shape, True)
    shape = parts[0, ()].shape
    targets = [
        entry(group.part_key((index, coords)), link.small.shape)
        for index, link in enumerate(rule.links(shape))
        for coords in product(*(range(n) for n in link.extents[: len(link.names)]))
    ]
    return PlanGroup(group, tuple(targets), source, shape, False)


def _copies(mapping: KeyMapping, groups: list[PlanGroup], side: int) -> list[PlanGroup]:
    """Tied keys of the target side that are written, as copies of what their target is made of."""
    made = {entry.key: (group, entry) for group in groups for entry in group.targets}
    out = []
    for key, target in mapping.copies(made, side):
        group, entry = made[target]
        out.append(replace(group, targets=(replace(entry, key=key),), copy_of=target))
    return out


def _constants(mapping: KeyMapping, wanted: Callable[[str], bool]) -> list[PlanGroup]:
    out = []
    for entry in mapping.entries:
        if not isinstance(entry, NativeOnly) or entry.default is None or entry.shape is None:
            continue
        for binding in bindings(entry.template.names, entry.where):
            key = entry.template.render(binding)
            if wanted(key):
                target = TensorEntry(key, entry.shape, entry.dtype)
                out.append(PlanGroup(None, (target,), entry.dtype, fill=entry.default))
    return out
