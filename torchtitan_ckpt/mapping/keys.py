"""Key lists and manifests of both sides, from a table alone: no tensors, no files.

Works for mappings whose rules carry shapes and finite domains, as those of families do. Also
`coverage`: the proof that a table and real keys fit, both ways, with no dead rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from torchtitan_ckpt.errors import MappingError, Problem, list_keys
from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.mapping.group import gather, half_groups
from torchtitan_ckpt.mapping.index import raise_all
from torchtitan_ckpt.mapping.mapping import LeftOut
from torchtitan_ckpt.mapping.mapping import Mapping as KeyMapping
from torchtitan_ckpt.mapping.quant import Layout
from torchtitan_ckpt.mapping.rule import HF, NATIVE, SIDES, HfOnly, NativeOnly, Rule, Tied
from torchtitan_ckpt.mapping.template import Binding
from torchtitan_ckpt.mapping.view import Shape


def hf_entries(mapping: KeyMapping, *, declared: bool = False) -> dict[str, TensorEntry]:
    """Key, logical shape and dtype of every Hugging Face tensor that `to_hf` writes.

    `declared` adds the keys that are left out on purpose (HfOnly, Tied keys that are not emitted).
    """
    out: dict[str, TensorEntry] = {}
    for entry in mapping.entries:
        if isinstance(entry, Rule):
            for template in entry.hf:
                for binding in _all(entry, template.names):
                    _add(out, template.render(binding), entry.shape, entry.dtype)
        elif isinstance(entry, Tied):
            if entry.side == "hf" and (declared or mapping.emits(entry)):
                for binding in _all(entry, entry.template.names):
                    _add(out, entry.template.render(binding), entry.shape, entry.dtype)
        elif isinstance(entry, HfOnly) and declared and entry.shape is not None:
            for binding in _all(entry, entry.template.names):
                _add(out, entry.template.render(binding), entry.shape, entry.dtype)
    return out


def native_entries(mapping: KeyMapping, *, dtype: str | None = "float32") -> dict[str, TensorEntry]:
    """Key, shape and dtype of every native tensor.

    Floating tensors get `dtype` (None: that of the Hugging Face file), but for those that a rule
    pins, and integer tables keep theirs.
    """
    out: dict[str, TensorEntry] = {}
    for entry in mapping.entries:
        if isinstance(entry, Rule):
            kind = _native_dtype(entry, dtype)
            shapes = native_shapes(entry)
            for template, shape in zip(entry.native, shapes, strict=True):
                for binding in _all(entry, template.names):
                    _add(out, template.render(binding), shape, kind)
        elif isinstance(entry, NativeOnly):
            for binding in _all(entry, entry.template.names):
                _add(out, entry.template.render(binding), entry.shape, entry.dtype)
    for entry in mapping.entries:
        if isinstance(entry, Tied) and entry.side == "native":
            for binding in _all(entry, entry.template.names):
                source = out[entry.target.render(binding)]
                _add(out, entry.template.render(binding), source.shape, source.dtype)
    return out


def _native_dtype(rule: Rule, dtype: str | None) -> str | None:
    if rule.casts:
        return rule.casts[0].before
    if rule.dtype is not None and not rule.dtype.startswith(("float", "bfloat")):
        return rule.dtype
    return rule.dtype if dtype is None or rule.pinned else dtype


def native_shapes(rule: Rule) -> list[Shape]:
    """The shape of each native tensor of a rule that carries its Hugging Face shape."""
    if rule.shape is None:
        raise _no_shape(str(rule))
    counts = {name: len(rule.where[name]) for name in rule.key_names if name in rule.where}
    if rule.big == NATIVE:
        return [rule.big_shape([rule.shape] * len(rule.hf), counts)]
    return [link.small.shape for link in rule.links(rule.shape)]


def stored_entries(
    mapping: KeyMapping, layouts: Mapping[str, Layout], *, declared: bool = False
) -> dict[str, TensorEntry]:
    """What lies in a quantized file: codes and scales for the rows that name a layout."""
    logical = hf_entries(mapping, declared=declared)
    quant: dict[str, Layout] = {}
    for entry in mapping.entries:
        if isinstance(entry, (Rule, HfOnly)) and entry.quant is not None:
            templates = entry.hf if isinstance(entry, Rule) else (entry.template,)
            for template in templates:
                for binding in _all(entry, template.names):
                    quant[template.render(binding)] = layouts[entry.quant]
    out: dict[str, TensorEntry] = {}
    for key, tensor in logical.items():
        layout = quant.get(key)
        if layout is None:
            out[key] = tensor
            continue
        weight, scale = layout.keys(key)
        codes, scales = layout.shapes(tensor.shape)
        out[weight] = TensorEntry(weight, codes, layout.weight_dtype)
        out[scale] = TensorEntry(scale, scales, layout.scale_dtype)
    return out


def _all(entry: Rule | NativeOnly | HfOnly | Tied, names: Iterable[str]) -> Iterator[Binding]:
    row = list(names)
    missing = [name for name in row if name not in entry.where]
    if missing:
        where = str(entry) if isinstance(entry, Rule) else entry.key
        raise MappingError(
            Problem(
                code="mapping.unbounded",
                what=f"placeholder {{{missing[0]}}} has no finite domain",
                where=where,
                fix="give the rule `where`, or list keys from a manifest instead",
            )
        )
    domains = [sorted(entry.where[name]) for name in row]
    for values in product(*domains):
        yield dict(zip(row, values, strict=True))


def _add(out: dict[str, TensorEntry], key: str, shape: Shape | None, dtype: str | None) -> None:
    if shape is None or dtype is None:
        raise _no_shape(key)
    out[key] = TensorEntry(key, shape, dtype)


def _no_shape(where: str) -> MappingError:
    return MappingError(
        Problem(
            code="mapping.no-shape",
            what="the rule gives no shape or dtype, so no manifest can be made from it",
            where=where,
            fix="give the rule `shape` and `dtype`",
        )
    )


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a proof has covered: keys a side, rules used, and what is left out with reasons."""

    native: int
    hf: int
    rules: int
    left_out: tuple[LeftOut, ...]


def coverage(mapping: KeyMapping, native: Iterable[str], hf: Iterable[str]) -> Coverage:
    """Prove that every key of both sides is covered once, groups are whole, and no rule is dead.

    Raises MappingError with every problem: unknown keys, half groups, keys that one side lacks,
    rules without a key.
    """
    sides = (list(native), list(hf))
    problems: list[Problem] = []
    used: set[int] = set()
    images: list[dict[tuple[int, tuple[int, ...]], str]] = []
    for side, keys in enumerate(sides):
        groups, _, unknown = gather(mapping.entries, mapping.index(side), keys, side)
        problems += mapping.index(side).unknown(unknown)
        problems += half_groups(groups.values())
        used |= {number for number, _ in groups}
        images.append({slot: group.where() for slot, group in groups.items()})
    for side in (NATIVE, HF):
        lost = [images[side][slot] for slot in images[side] if slot not in images[1 - side]]
        if lost:
            problems.append(
                Problem(
                    code="mapping.no-counterpart",
                    what=f"{len(lost)} {SIDES[side]} keys have no {SIDES[1 - side]} keys",
                    where=list_keys(lost),
                    fix="complete the key list, or declare the loss with a reason",
                )
            )
    dead = [
        str(entry)
        for number, entry in enumerate(mapping.entries)
        if isinstance(entry, Rule) and number not in used
    ]
    if dead:
        problems.append(
            Problem(
                code="mapping.dead-rule",
                what=f"{len(dead)} rules match no key",
                where="; ".join(dead[:6]),
                cause="a stale name, or a rule for a part that the model does not have",
                fix="correct the rule, limit it with `where`, or remove it",
            )
        )
    raise_all(problems)
    left = mapping.left_out(sides[HF], HF) + mapping.left_out(sides[NATIVE], NATIVE)
    return Coverage(len(sides[NATIVE]), len(sides[HF]), len(used), tuple(left))


__all__ = [
    "Coverage",
    "coverage",
    "hf_entries",
    "native_entries",
    "native_shapes",
    "stored_entries",
]
