"""`Mapping`: a table of rules that converts whole and partial state dicts, both ways.

Construction proves that no two entries can match one key. Conversion is pure: it keeps no state,
does not change the caller's dict, and gives outputs that share no element. What is left out is only
what an entry declares. Streaming plans are in `plan.py`, DTensors in `dtensor.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_ckpt.errors import MappingError, Problem, list_keys
from torchtitan_ckpt.mapping import apply, dtensor
from torchtitan_ckpt.mapping.group import Group, gather, half_groups, odd_values, shape_problem
from torchtitan_ckpt.mapping.index import Index, raise_all
from torchtitan_ckpt.mapping.rule import HF, NATIVE, SIDES, Entry, HfOnly, NativeOnly, Rule, Tied
from torchtitan_ckpt.mapping.template import Binding
from torchtitan_ckpt.mapping.view import ShapeError

_LAYER = re.compile(r".*\.[0-9]+(?=\.)")
# Codes of quantized files: as plain values they would be wrong by their scale.
_CODES = ("float8", "float4", "int8", "uint8")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Keys that a conversion leaves out on purpose, and the reason written in the table."""

    side: str
    keys: tuple[str, ...]
    why: str
    switch: str = ""

    def __str__(self) -> str:
        text = f"{list_keys(self.keys)}: {self.why}"
        return f"{text} (switch on: {self.switch})" if self.switch else text


class Mapping:
    """A proved table. `emit` switches groups of Tied entries on (`"all"` for every group)."""

    def __init__(
        self, entries: Iterable[Entry], *, name: str = "mapping", emit: Collection[str] = ()
    ) -> None:
        kept = [e for e in entries if not (isinstance(e, Tied) and not e.when)]
        kept = [e for e in kept if all(len(domain) for domain in e.where.values())]
        self.entries: tuple[Entry, ...] = tuple(kept)
        self.name = name
        self.emit = frozenset(emit)
        self._index = (Index(self.entries, NATIVE), Index(self.entries, HF))
        groups = {e.group for e in self.entries if isinstance(e, Tied)}
        problems = [p for index in self._index for p in index.collisions(self.entries)]
        problems += self._unresolved_ties()
        unknown = sorted(self.emit - groups - {"all"})
        if unknown and groups:
            problems.append(
                Problem(
                    code="mapping.unknown-switch",
                    what=f"nothing is switched on by {', '.join(unknown)}",
                    where=name,
                    expected=f"one of {', '.join(sorted(groups))}, or all",
                    fix="correct the name",
                )
            )
        raise_all(problems)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(e for e in self.entries if isinstance(e, Rule))

    def index(self, side: int) -> Index:
        return self._index[side]

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        """Native to Hugging Face. Raises MappingError with every problem."""
        return self._convert(state, NATIVE, None)

    def from_hf(
        self, state: dict[str, Any], *, like: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Hugging Face to native. DTensors get the placements of `like`'s, where it has the key."""
        return self._convert(state, HF, like)

    def _convert(
        self, state: dict[str, Any], side: int, like: dict[str, Any] | None
    ) -> dict[str, Any]:
        with torch.no_grad():
            values = dict(state)
            self._check_ties(values, side)
            groups, _, unknown = gather(self.entries, self._index[side], values, side)
            problems = self._index[side].unknown(unknown)
            problems += half_groups(groups.values())
            problems += odd_values(groups.values(), values, torch.Tensor)
            problems += _dtype_problems(groups.values(), values, side)
            raise_all(problems)
            out: dict[str, Any] = {}
            for group in groups.values():
                try:
                    out.update(_run(group, values, like or {}))
                except ShapeError as error:
                    shapes = {key: tuple(values[key].shape) for key in group.keys.values()}
                    problems.append(shape_problem(group, str(error), shapes))
            raise_all(problems)
            self._fill_ties(out, 1 - side)
            if side == HF:
                self._fill_defaults(out, like)
            return out

    def emits(self, tied: Tied) -> bool:
        """Whether a Tied entry's key is written on its side."""
        switched = tied.group in self.emit or "all" in self.emit
        return tied.side == "native" or tied.emit or switched

    def copies(self, keys: Collection[str], side: int) -> list[tuple[str, str]]:
        """Tied keys that are written beside these, each with the key that it repeats.

        A copy that belongs to a layer is written only where another key of that layer is.
        """
        ties = [tied for tied in self._ties(side) if self.emits(tied)]
        present = parents(keys) if ties else {}
        out = []
        for tied in ties:
            for binding in bindings(tied.template.names, tied.where):
                key, target = tied.template.render(binding), tied.target.render(binding)
                layer = _LAYER.match(key)
                if target in keys and (layer is None or layer[0] in present):
                    out.append((key, target))
        return out

    def _ties(self, side: int) -> list[Tied]:
        return [e for e in self.entries if isinstance(e, Tied) and e.side == SIDES[side]]

    def _unresolved_ties(self) -> list[Problem]:
        problems = []
        for tied in (e for e in self.entries if isinstance(e, Tied)):
            side = SIDES.index(tied.side)
            binding = {n: min(tied.where.get(n, range(1))) for n in tied.target.names}
            match = self._index[side].match(tied.target.render(binding))
            if match is None or not isinstance(self.entries[match.entry], Rule):
                problems.append(
                    Problem(
                        code="mapping.tie-unresolved",
                        what=f"Tied({tied.key}) copies a key that no rule has",
                        where=tied.to,
                        fix="tie it to a key of a rule on the same side",
                    )
                )
        return problems

    def bound_ties(self, side: int, keys: Collection[str]) -> list[tuple[Tied, str, str]]:
        """Tied entries with the tied key and its target, for the tied keys that are present."""
        if not any(True for _ in self._ties(side)):
            return []
        out = []
        for key in keys:
            match = self._index[side].match(key)
            entry = None if match is None else self.entries[match.entry]
            if isinstance(entry, Tied) and match is not None:
                out.append((entry, key, entry.target.render(match.binding)))
        return out

    def _check_ties(self, values: dict[str, Any], side: int) -> None:
        """Compare tied keys with their targets and take them out of `values`."""
        problems = []
        for tied, key, target in self.bound_ties(side, list(values)):
            mine = values.pop(key)
            if target not in values:
                if side == HF and not tied.import_loss:
                    values[target] = mine
                    continue
                if tied.import_loss:
                    continue
                problems.append(
                    Problem(
                        code="mapping.tied-alone",
                        what=f"{key} is tied to {target}, which is not there",
                        where=key,
                        expected="both keys of a tied pair",
                        fix="pass both, or configure the model as untied",
                    )
                )
            elif not tied.import_loss and not _equal(mine, values[target]):
                problems.append(
                    Problem(
                        code="mapping.tied-differ",
                        what=f"{key} and {target} are tied and hold different values",
                        where=key,
                        cause="the tie was broken in training, or the config is of another model",
                        fix="configure the model as untied, or drop the key that is wrong",
                    )
                )
        raise_all(problems)

    def _fill_ties(self, out: dict[str, Any], side: int) -> None:
        for key, target in self.copies(out, side):
            out[key] = out[target].clone()

    def _fill_defaults(self, out: dict[str, Any], like: dict[str, Any] | None) -> None:
        defaults = [
            e
            for e in self.entries
            if isinstance(e, NativeOnly) and e.default is not None and e.shape is not None
        ]
        if not defaults or not out:
            return
        present = parents(out)
        for entry in defaults:
            for binding in bindings(entry.template.names, entry.where):
                key = entry.template.render(binding)
                beside = present.get(key.rpartition(".")[0])
                if entry.shape is None or entry.default is None or beside is None:
                    continue
                if like is not None:
                    if isinstance(like.get(key), torch.Tensor):
                        out[key] = torch.full_like(like[key], entry.default)
                else:
                    dtype, device = apply.dtype_of(entry.dtype), out[beside].device
                    out[key] = torch.full(entry.shape, entry.default, dtype=dtype, device=device)

    def left_out(self, keys: Iterable[str], side: int) -> list[LeftOut]:
        """What a conversion of these keys of `side` leaves out on purpose, with the reasons.

        For a native side that is also the tied Hugging Face keys that are not written.
        """
        found: dict[tuple[int, str, str], list[str]] = {}
        present = list(keys)
        for key in present:
            match = self._index[side].match(key)
            entry = None if match is None else self.entries[match.entry]
            if isinstance(entry, (NativeOnly, HfOnly, Tied)):
                found.setdefault((side, entry.why, ""), []).append(key)
        if side == NATIVE:
            for tied in self._ties(HF):
                if not self.emits(tied):
                    bound = bindings(tied.template.names, tied.where)
                    names = [tied.template.render(binding) for binding in bound]
                    found.setdefault((HF, tied.why, f"emit={tied.group!r}"), []).extend(names)
        return [LeftOut(SIDES[s], tuple(k), why, sw) for (s, why, sw), k in found.items()]


def parents(keys: Iterable[str]) -> dict[str, str]:
    """Every module path above these keys, with one key below it."""
    out: dict[str, str] = {}
    for key in keys:
        path = key
        while "." in path:
            path = path.rpartition(".")[0]
            if path in out:
                break
            out[path] = key
    return out


def bindings(names: Sequence[str], where: Any) -> list[Binding]:
    """Every binding of these names within finite domains; none where a domain is not finite."""
    domains = [where.get(name) for name in names]
    if any(domain is None for domain in domains):
        return []
    return [dict(zip(names, values, strict=True)) for values in product(*map(sorted, domains))]


def _run(group: Group, values: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    parts = {part: values[key] for part, key in group.keys.items()}
    sharded = [isinstance(value, DTensor) for value in parts.values()]
    if any(sharded):
        if not all(sharded):
            raise ShapeError("some parts are DTensors and others are not")
        return dtensor.run(group, parts, like)
    if group.side == group.rule.big:
        small = apply.take(group.rule, parts[0, ()])
        return {group.part_key(part): value for part, value in small.items()}
    return {group.big_key: apply.join(group.rule, parts, group.counts())}


def _dtype_problems(groups: Iterable[Group], values: dict[str, Any], side: int) -> list[Problem]:
    codes: list[str] = []
    wrong: list[tuple[str, str, str]] = []
    for group in groups:
        want = apply.expected_dtype(group.rule, side)
        floats = group.rule.dtype is not None and group.rule.dtype.startswith(("float", "bfloat"))
        for key in group.keys.values():
            value = values[key]
            if not isinstance(value, torch.Tensor):
                continue
            name = apply.dtype_name(value.dtype)
            if want is not None and name != want:
                wrong.append((key, want, name))
            elif side == HF and floats and name.startswith(_CODES):
                codes.append(key)
    problems = []
    if codes:
        problems.append(
            Problem(
                code="mapping.raw-codes",
                what=f"{len(codes)} tensors hold the codes of a quantized file",
                where=list_keys(codes),
                expected="dequantized floating-point weights",
                actual=apply.dtype_name(values[codes[0]].dtype),
                fix="load with initial_load_in_hf_quantized (dequantize=True)",
            )
        )
    if wrong:
        problems.append(
            Problem(
                code="mapping.dtype",
                what=f"{len(wrong)} tensors have another dtype than their rule's cast",
                where=list_keys([key for key, _, _ in wrong]),
                expected=wrong[0][1],
                actual=wrong[0][2],
                fix="correct the Cast, or cast the tensors first",
            )
        )
    return problems


def _equal(a: Any, b: Any) -> bool:
    """Bitwise equality of a tied pair; of DTensors, of this rank's shards."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        if a.placements != b.placements or a.device_mesh != b.device_mesh:
            return tuple(a.shape) == tuple(b.shape)
        a, b = a.to_local(), b.to_local()
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return apply.same_bytes(a, b)


__all__ = ["HF", "NATIVE", "LeftOut", "Mapping", "MappingError"]
