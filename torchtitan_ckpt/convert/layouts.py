"""Which tensors a quantized export stores how: by the family's table, or by the scheme alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchtitan_ckpt.convert.names import Model
from torchtitan_ckpt.convert.units import Plain
from torchtitan_ckpt.errors import ConfigError, Problem, list_keys
from torchtitan_ckpt.mapping.mapping import Mapping as KeyMapping
from torchtitan_ckpt.mapping.quant import FP4, FP8, MXFP4, Layout
from torchtitan_ckpt.mapping.rule import HF, Rule

_BY_SCHEME: Mapping[str, Layout] = {"fp8": FP8, "fp4": FP4, "mxfp4": MXFP4}


def scheme_of(layout: Layout) -> str:
    if layout.grouped:
        return "mxfp4"
    return "fp4" if layout.per_byte == 2 else "fp8"


def layouts_of(
    scheme: str, model: Model, table: KeyMapping, units: Sequence[Plain]
) -> dict[str, Layout]:
    """The layout of each quantized tensor, by its plain key. Raises ConfigError.

    `family` takes what the table says. A scheme takes the same tensors in that scheme; where the
    table names none, the linear projections of the layers (`…_proj.weight`; for mxfp4 the stacked
    experts).
    """
    named = model.family.layouts_for(model.config)
    out: dict[str, Layout] = {}
    for unit in units:
        key = unit.entry.key
        match = table.index(HF).match(key)
        entry = None if match is None else table.entries[match.entry]
        if isinstance(entry, Rule) and entry.quant is not None:
            out[key] = named[entry.quant]
    if scheme != "family":
        if not out:
            stacked = scheme == "mxfp4"
            out = {
                u.entry.key: _BY_SCHEME[scheme]
                for u in units
                if _is_projection(u.entry.key, len(u.entry.shape), stacked)
            }
        same = {key: layout for key, layout in out.items() if scheme_of(layout) == scheme}
        out = {key: same.get(key, _BY_SCHEME[scheme]) for key in out}
    bad = [
        unit.entry.key
        for unit in units
        if unit.entry.key in out and not _fits(out[unit.entry.key], unit.entry.shape)
    ]
    if bad or not out:
        raise ConfigError(
            Problem(
                code="convert.quantize",
                what=f"{model.family.name} has no tensors that {scheme} can hold"
                if not out
                else f"{len(bad)} tensors have sizes that {scheme} cannot hold",
                where=list_keys(bad),
                expected="groups of 32 inputs; mxfp4 wants stacked experts",
                fix="use --quantize fp8, which takes any size",
            )
        )
    return out


def _is_projection(key: str, dims: int, stacked: bool) -> bool:
    if stacked:
        return ".experts." in key and dims == 3
    return ".layers." in key and dims == 2 and key.endswith("_proj.weight")


def _fits(layout: Layout, shape: tuple[int, ...]) -> bool:
    if len(shape) < (3 if layout.grouped else 2):
        return False
    inputs = shape[-2] if layout.grouped else shape[-1]
    return layout.per_byte == 1 or inputs % layout.block[1] == 0
