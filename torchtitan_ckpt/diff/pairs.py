"""Which tensor of one checkpoint corresponds to which of another, and how: by its key, through a
family's table, or through an adapter. Decided from manifests; reads no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchtitan_ckpt.config import TRAINING_STATES
from torchtitan_ckpt.convert import names
from torchtitan_ckpt.convert.options import Options as NameOptions
from torchtitan_ckpt.convert.probe import adapted_units
from torchtitan_ckpt.convert.source import Source
from torchtitan_ckpt.convert.units import Adapted, Planned, Stored
from torchtitan_ckpt.errors import ConfigError, Problem
from torchtitan_ckpt.formats.hf_boxes import Ints, split_box
from torchtitan_ckpt.guess import guess_family
from torchtitan_ckpt.manifest import ITEM_SIZE, TensorEntry
from torchtitan_ckpt.mapping.apply import dtype_of
from torchtitan_ckpt.mapping.compose import compose
from torchtitan_ckpt.mapping.mapping import Mapping as KeyMapping
from torchtitan_ckpt.mapping.planner import plan_to_hf
from torchtitan_ckpt.mapping.rule import HF, NATIVE

Made = tuple[str, Ints, torch.Tensor]
Buffer = Callable[[Ints, torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the right side and what the left side makes of it under the right's key.

    `left` is its key on the left where it has one there, `unit` how the left side is read.
    """

    key: str
    left: str
    unit: Stored | Planned
    entry: TensorEntry

    @property
    def made(self) -> TensorEntry:
        return self.unit.entry

    @property
    def same_shape(self) -> bool:
        return self.made.shape == self.entry.shape

    def nbytes_of(self, sizes: Ints) -> int:
        """Bytes of a box of the right side's tensor."""
        return math.prod(sizes) * ITEM_SIZE[self.entry.dtype]

    def boxes(self, window: int) -> Iterator[tuple[Ints, Ints]]:
        """Boxes of the tensor, in the order of its bytes, each within `window` bytes."""
        zero = (0,) * len(self.made.shape)
        if isinstance(self.unit, Planned):
            tiles = self.unit.group.tiles_of(self.made, zero, self.made.shape, window)
            for tile in tiles:
                yield tile.target.offsets, tile.target.sizes
            return
        widest = max(ITEM_SIZE[self.made.dtype], ITEM_SIZE[self.entry.dtype])
        yield from split_box(self.made.shape, zero, self.made.shape, max(window // widest, 1))

    def read_left(self, offsets: Ints, sizes: Ints, buffer: Buffer) -> torch.Tensor:
        unit = self.unit
        if isinstance(unit, Planned):
            return unit.values(offsets, sizes, self.made.dtype)
        out = buffer(sizes, dtype_of(self.made.dtype))
        if out.numel():
            unit.source.fill(unit.key, offsets, out)
        return out


@dataclass(slots=True)
class Alignment:
    """How two checkpoints correspond. `swapped` says that the left side is B.

    `only_left` and `only_right` are keys without a counterpart; `left_out` are those for which a
    table or a format says why. `bulk` are outputs of an adapter that come many at a time.
    """

    pairs: list[Pair] = field(default_factory=list)
    bulk: list[Adapted] = field(default_factory=list)
    only_left: list[str] = field(default_factory=list)
    only_right: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    route: str = "by their keys"
    swapped: bool = False
    objects: bool = True


@dataclass(frozen=True, slots=True)
class Side:
    """One checkpoint: its path, its format, its open source, and the keys that take part."""

    path: str
    format: str
    source: Source
    keys: tuple[str, ...]

    @property
    def model(self) -> dict[str, TensorEntry]:
        tensors = self.source.manifest.tensors
        return {k: tensors[k] for k in self.keys if self.format == "hf" or not _is_state(k)}

    @property
    def states(self) -> list[str]:
        return [k for k in self.keys if self.format != "hf" and _is_state(k)]


def _is_state(key: str) -> bool:
    return key.partition(".")[0] in TRAINING_STATES


def align(
    a: Side,
    b: Side,
    *,
    family: str | None = None,
    config: str | None = None,
    adapter: str | None = None,
    generation: str | None = None,
) -> Alignment:
    """Pair two checkpoints. Raises `ConfigError` or `MappingError` where names cannot be mapped."""
    options = NameOptions(
        src=a.path, dst="", family=family, config=config, adapter=adapter, generation=generation
    )
    if adapter is not None:
        return _by_adapter(a, b, adapter, options)
    mine, theirs = a.model, b.model
    alike = set(mine) == set(theirs) or a.format == b.format == "hf"
    if not mine or not theirs or (alike and family is None):
        return _by_key(a, b)
    model = None
    for side in (a, b):
        model = model or names.find_model(options, Path(side.path.removeprefix("file://")))
    if model is None and family is None:
        guesses = [guess_family(side.model) for side in (a, b)]
        if None in guesses or len({guess.names for guess in guesses if guess}) == 1:
            return _by_key(a, b)
    model = names.need_model(model, options, "the two checkpoints name their tensors differently")
    kinds = []
    for side in (a, b):
        native = names.native_names(side.model, model, options)
        hf = side.format == "hf" or names.has_hf_names(side.model, native)
        kinds.append((hf, native))
    (a_hf, a_native), (b_hf, b_native) = kinds
    if a_hf and b_hf:
        return _by_key(a, b)
    if a_hf:
        out = _by_table(b, a, b_native.adapter.mapping, to_hf=True)
        out.swapped = True
        return out
    if b_hf:
        return _by_table(a, b, a_native.adapter.mapping, to_hf=True)
    if a_native.adapter.mapping.name == b_native.adapter.mapping.name:
        return _by_key(a, b)
    table = compose(a_native.adapter.mapping, b_native.adapter.mapping)
    return _by_table(a, b, table, to_hf=False)


def _by_key(a: Side, b: Side) -> Alignment:
    out = Alignment()
    mine, theirs = a.source.manifest.tensors, b.source.manifest.tensors
    other = set(b.keys)
    for key in a.keys:
        if key in other:
            out.pairs.append(Pair(key, key, Stored(a.source, key, mine[key]), theirs[key]))
        else:
            out.only_left.append(key)
    here = set(a.keys)
    out.only_right = [key for key in b.keys if key not in here]
    return out


def _by_table(left: Side, right: Side, table: KeyMapping, *, to_hf: bool) -> Alignment:
    """`left` has the native names of the table, `right` those of its other side."""
    out = Alignment(route=f"through {table.name}" + (" to Hugging Face names" if to_hf else ""))
    index = table.index(NATIVE)
    known = {key: entry for key, entry in left.model.items() if index.match(key) is not None}
    out.only_left = [key for key in left.model if key not in known]
    plan = plan_to_hf(table, known)
    model = right.model
    units = {
        entry.key: Planned(left.source, group, entry)
        for group in plan.groups
        for entry in group.targets
    }
    for key, unit in units.items():
        if key in model:
            out.pairs.append(Pair(key, ", ".join(unit.group.sources[:1]), unit, model[key]))
        else:
            out.only_left.append(key)
    rest = [key for key in model if key not in units]
    ties = {key: target for _, key, target in table.bound_ties(HF, rest) if target in units}
    for key, target in ties.items():
        # A tied tensor that the other side stores all the same: it must equal what it is tied to.
        unit = units[target]
        out.pairs.append(Pair(key, ", ".join(unit.group.sources[:1]), unit, model[key]))
    rest = [key for key in rest if key not in ties]
    declared = table.left_out(rest, HF)
    out.left_out += [f"{side_of(to_hf)}: {left_out}" for left_out in declared]
    excused = {key for item in declared for key in item.keys}
    out.only_right = [key for key in rest if key not in excused]
    unmade = [x for x in table.left_out(known, NATIVE) if x.side == "native"]
    out.left_out += [str(item) for item in unmade]
    if right.format == "hf" or left.format == "hf":
        _states_left_out(out, left, right)
    else:
        _pair_states(out, left, right)
    return out


def side_of(to_hf: bool) -> str:
    return "Hugging Face" if to_hf else "the other names"


def _states_left_out(out: Alignment, left: Side, right: Side) -> None:
    for side in (left, right):
        counts: dict[str, int] = {}
        for key in (*side.states, *side.source.manifest.objects):
            head = key.partition(".")[0]
            counts[head] = counts.get(head, 0) + 1
        for state, count in counts.items():
            out.left_out.append(
                f"{state} ({count} entries): Hugging Face files hold the model only"
            )
    out.objects = False


def _pair_states(out: Alignment, left: Side, right: Side) -> None:
    theirs = set(right.states)
    for key in left.states:
        if key in theirs:
            entry = left.source.manifest.tensors[key]
            unit = Stored(left.source, key, entry)
            out.pairs.append(Pair(key, key, unit, right.source.manifest.tensors[key]))
        else:
            out.only_left.append(key)
    mine = set(left.states)
    out.only_right += [key for key in right.states if key not in mine]


def _by_adapter(a: Side, b: Side, text: str, options: NameOptions) -> Alignment:
    """The side that is no Hugging Face folder goes through the adapter's to_hf."""
    swapped = a.format == "hf"
    left, right = (b, a) if swapped else (a, b)
    if left.format == "hf" or right.format != "hf":
        raise ConfigError(
            Problem(
                code="diff.adapter",
                what="an adapter compares native names with Hugging Face names",
                where="--adapter",
                expected="one Hugging Face checkpoint, and one DCP or .pt",
                actual=f"{a.format} and {b.format}",
                fix="leave --adapter out; keys are compared as they are",
            )
        )
    made: Any = names.load_adapter(text, options)
    found = adapted_units(made, left.model, left.source, to_hf=True)
    out = Alignment(route=f"through {type(made).__name__} of {text}", swapped=swapped)
    out.notes += found.notes
    out.bulk = [unit for unit in found.units if isinstance(unit, Adapted)]
    produced = {entry.key for unit in out.bulk for entry in unit.entries}
    out.only_left = [key for key in sorted(produced) if key not in right.model]
    out.only_right = [key for key in right.model if key not in produced]
    _states_left_out(out, left, right)
    return out
