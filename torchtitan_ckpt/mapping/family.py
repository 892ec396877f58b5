"""What a model family is declared with: `Row`, `block`, `Family`; the tables are in `families/`.

A row names one Hugging Face key and its native names in both generations: `titan` is torchtitan
0.3.0, `npu` is torchtitan v0.2.2, on which torchtitan-npu sits. A family binds its rows to a config
and gives a `Mapping` and both manifests. No family is known here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_ckpt.errors import MappingError, Problem
from torchtitan_ckpt.mapping.expression import Config, evaluate
from torchtitan_ckpt.mapping.mapping import Mapping as KeyMapping
from torchtitan_ckpt.mapping.ops import Op, bind
from torchtitan_ckpt.mapping.quant import Layout
from torchtitan_ckpt.mapping.rule import Entry, HfOnly, NativeOnly, Rule, Tied
from torchtitan_ckpt.mapping.template import Domain
from torchtitan_ckpt.mapping.view import Shape
from torchtitan_ckpt.mapping.w13 import repair as w13_repair

GENERATIONS = ("titan", "npu")
Names = str | tuple[str, ...] | None
SAME = "="


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a family table.

    `shape` is that of each Hugging Face tensor (of the native one where `hf` is None), as
    comma-separated expressions over the config. `layers` names the family's set for `{layer}`.
    `dtype` pins a dtype that no export dtype changes. `copy_of` is the Hugging Face key that this
    one repeats, in a `group` that can be switched on (`emit`: that is always
    written). `why` is the reason where a side is missing.
    """

    hf: Names
    titan: Names
    npu: Names = SAME
    shape: str = ""
    ops: tuple[Op, ...] = ()
    layers: str = ""
    when: str = ""
    dtype: str | None = None
    quant: str | None = None
    copy_of: str = ""
    group: str = ""
    emit: bool = False
    import_loss: str = ""
    why: str = ""

    def native(self, generation: str) -> Names:
        return self.titan if generation == "titan" or self.npu == SAME else self.npu


def block(
    rows: Sequence[Row], *, hf: str, titan: str | None, npu: str | None, layers: str = ""
) -> tuple[Row, ...]:
    """The rows of a layer, with each side's prefix put before its names."""

    def put(prefix: str | None, names: Names) -> Names:
        if prefix is None or names is None:
            return None
        return prefix + names if isinstance(names, str) else tuple(prefix + n for n in names)

    return tuple(
        replace(
            row,
            hf=put(hf, row.hf),
            titan=put(titan, row.titan),
            npu=put(npu, row.titan if row.npu == SAME else row.npu),
            layers=row.layers or layers,
        )
        for row in rows
        if row.hf is not None or titan is not None or npu is not None
    )


@dataclass(frozen=True, slots=True)
class Family:
    """A table and what it is read with.

    `sets` give the numbers of `{layer}` by name, `counts` how many numbers the other placeholders
    have; `defaults` fill config fields that files leave out; `layouts` are the quantized layouts
    that rows name. `missing` says why a generation lacks the family or some of its parameters.
    """

    name: str
    model_types: tuple[str, ...]
    rows: tuple[Row, ...]
    sets: Mapping[str, Callable[[Config], Collection[int]]]
    counts: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    generations: tuple[str, ...] = GENERATIONS
    missing: Mapping[str, str] = field(default_factory=dict)

    def config(self, values: Mapping[str, Any], **options: Any) -> Config:
        named = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16")
        merged = {**values, "hf_dtype": named.removeprefix("torch."), **options}
        return Config(merged, {"tie_word_embeddings": False, **self.defaults}, self.name)

    def quantized(self, values: Mapping[str, Any]) -> bool:
        """Whether this config describes a checkpoint of quantized weights."""
        return bool(self.layouts) and bool(values.get("quantization_config"))

    def layouts_for(self, values: Mapping[str, Any]) -> dict[str, Layout]:
        """The quantized layouts by the names that rows use, for this config."""
        found = dict(self.layouts)
        if str(values.get("expert_dtype", "")) == "fp8" and "expert" in found:
            found["expert"] = self.layouts["expert_fp8"]
        return found

    def mapping(
        self,
        values: Mapping[str, Any],
        generation: str = "titan",
        *,
        experts: str = "standard",
        mtp: bool | None = None,
        emit: Collection[str] = (),
        w13_shards: int = 1,
    ) -> KeyMapping:
        """The proved table for a config.

        `experts` is `standard` or `gmm` (w1 and w3 fused as w13, generation `npu`). `mtp=False`
        leaves the MTP layers of the files out. `emit` switches groups of duplicates on.
        `w13_shards` reads a w13 that old code fused shard by shard (see `w13.py`).
        """
        self._check_options(generation, experts)
        config = self.config(values, gmm=experts == "gmm")
        entries: list[Entry] = []
        for row in self.rows:
            if row.when and not evaluate(row.when, config):
                continue
            if row.when == "gmm" and w13_shards > 1:
                row = replace(row, ops=(w13_repair(w13_shards), *row.ops))
            entries.extend(self._entries(row, config, generation, mtp is not False))
        name = f"{self.name}/{generation}" + ("/gmm" if experts == "gmm" else "")
        return KeyMapping(entries, name=name, emit=emit)

    def _check_options(self, generation: str, experts: str) -> None:
        problems = []
        if generation not in self.generations:
            problems.append(
                Problem(
                    code="mapping.no-generation",
                    what=f"{self.name} has no native names of generation {generation!r}",
                    expected=" or ".join(self.generations),
                    cause=self.missing.get(generation, ""),
                    fix=f"use generation={self.generations[0]!r}",
                )
            )
        if experts not in ("standard", "gmm") or (experts == "gmm" and generation != "npu"):
            problems.append(
                Problem(
                    code="mapping.expert-format",
                    what=f"no expert format {experts!r} in generation {generation!r}",
                    expected="standard, or with generation npu also gmm",
                    fix="w13 is torchtitan-npu's: take generation npu, or standard experts",
                )
            )
        if problems:
            raise MappingError(*problems)

    def _entries(self, row: Row, config: Config, generation: str, mtp: bool) -> list[Entry]:
        hf = _names(row.hf, config, self)
        native = _names(row.native(generation), config, self)
        uses_mtp = any("{mtp" in text for text in (*hf, *native))
        where = self._where((*hf, *native), row, config)
        if not all(len(numbers) for numbers in where.values()):
            return []
        shape = shape_of(row.shape, config)
        dtype = row.dtype or str(config["hf_dtype"])
        if not hf:
            return [] if not native else self._native_only(row, native, where, shape)
        if uses_mtp and not mtp:
            why = "the model is built without its MTP layers"
            return [HfOnly(key, why, _of(key, where), shape, dtype, row.quant) for key in hf]
        if row.copy_of:
            return self._ties(row, hf, native, where, shape, dtype, config, generation)
        if not native:
            why = row.why or self.missing.get(generation, "")
            why = why or "this native generation has no such parameter"
            return [HfOnly(key, why, _of(key, where), shape, dtype, row.quant) for key in hf]
        ops = [bind(op, lambda text: evaluate(text, config)) for op in row.ops]
        return [
            Rule(
                native[0] if len(native) == 1 else native,
                hf[0] if len(hf) == 1 else hf,
                *ops,
                where=where,
                shape=shape,
                dtype=dtype,
                pinned=row.dtype is not None,
                quant=row.quant,
            )
        ]

    @staticmethod
    def _native_only(
        row: Row, native: tuple[str, ...], where: Mapping[str, Domain], shape: Shape | None
    ) -> list[Entry]:
        dtype = row.dtype or "float32"
        peer = str(row.titan)
        return [
            NativeOnly(key, 0.0, row.why, _of(key, where), shape, dtype, peer) for key in native
        ]

    def _ties(
        self,
        row: Row,
        hf: tuple[str, ...],
        native: tuple[str, ...],
        where: Mapping[str, Domain],
        shape: Shape | None,
        dtype: str,
        config: Config,
        generation: str,
    ) -> list[Entry]:
        why = row.why or f"a copy of {row.copy_of}"
        entries: list[Entry] = [
            Tied(
                key,
                row.copy_of,
                why=why,
                group=row.group,
                emit=row.emit,
                import_loss=row.import_loss,
                where=_of(key, where),
                shape=shape,
                dtype=dtype,
            )
            for key in hf
        ]
        source = next(other for other in self.rows if other.hf == row.copy_of and not other.copy_of)
        target = _names(source.native(generation), config, self)
        for key in native:
            entries.append(
                Tied(key, target[0], side="native", why=why, group=row.group, shape=shape)
            )
        return entries

    def _where(self, keys: Sequence[str], row: Row, config: Config) -> dict[str, Domain]:
        out: dict[str, Domain] = {}
        if any("{layer" in key for key in keys):
            numbers = self.sets[row.layers or "main"](config)
            out["layer"] = numbers if isinstance(numbers, range) else frozenset(numbers)
        for name, count in self.counts.items():
            if any("{" + name in key for key in keys):
                out[name] = range(int(evaluate(count, config) or 0))
        return out

    def placeholders(self) -> frozenset[str]:
        return frozenset(("layer", *self.counts))


_BRACES = re.compile(r"\{([^{}]*)\}")
_SHIFTED = re.compile(r"([a-z_]+)([+-].*)?")


def _names(names: Names, config: Config, family: Family) -> tuple[str, ...]:
    """Names with the config's numbers in: `{num_hidden_layers-1}` to `60`, `{mtp+...}` shifted."""
    if names is None:
        return ()

    def number(match: re.Match[str]) -> str:
        shifted = _SHIFTED.fullmatch(match[1])
        if shifted is None or shifted[1] not in family.placeholders():
            return str(evaluate(match[1], config))
        shift = int(evaluate("0" + shifted[2], config)) if shifted[2] else 0
        return "{" + shifted[1] + (f"+{shift}" if shift else "") + "}"

    row = (names,) if isinstance(names, str) else names
    return tuple(_BRACES.sub(number, text) for text in row)


def _of(key: str, where: Mapping[str, Domain]) -> dict[str, Domain]:
    return {name: domain for name, domain in where.items() if "{" + name in key}


def shape_of(text: str, config: Mapping[str, Any]) -> Shape | None:
    """A shape from comma-separated expressions; None when the row gives none."""
    if not text:
        return None
    return tuple(int(evaluate(part, config)) for part in text.split(","))
