"""Quantized weights: which scheme a tensor is stored in, known from dtypes, shapes and keys alone.

No model name and no config decides. `detect` pairs weights with scales and refuses what does not
pair; `logical_manifest` is the checkpoint as a consumer sees it after dequantization: scales gone,
packed shapes unpacked, dtypes floating. `quantized_math` computes, `hf_read` reads.

Schemes:
- `fp8`: F8_E4M3 or F8_E5M2 of the logical shape, a scale for every block of 128 x 128 of the last
  two dimensions, the last blocks short. Scale `<weight>_scale_inv` (DeepSeek-V3, Qwen3) or
  `<name>.scale` beside `<name>.weight` (DeepSeek-V4), in F32, BF16, F16, F8_E8M0 or U8 (E8M0).
- `fp4`: I8, two E2M1 codes a byte along the inputs, the low nibble first; `<name>.scale`, E8M0, one
  for 32 inputs of a row (DeepSeek-V4's routed experts).
- `mxfp4`: U8 `<name>_blocks` [experts, out, in/32, 16] with U8 `<name>_scales`; unpacked it is
  `<name>` [experts, in, out], the transpose (gpt-oss).

A scale without dimensions is refused, not broadcast: files that carry one differ in whether the
value multiplies or divides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torchtitan_ckpt.errors import Problem, RefusedError, list_keys
from torchtitan_ckpt.manifest import Manifest, TensorEntry, is_floating

Scheme = Literal["fp8", "fp4", "mxfp4"]
BLOCK = 128
GROUP = 32
FP8 = ("float8_e4m3fn", "float8_e5m2")
E8M0 = ("float8_e8m0fnu", "uint8")
_FP8_SCALES = ("float32", "bfloat16", "float16", *E8M0)
_WEIGHT, _SCALE, _SCALE_INV = ".weight", ".scale", "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
# Scale names of other quantizers, recognised to be named in the refusal.
_FOREIGN = ("_scale", ".scales", ".input_scale", ".weight_scale", ".qzeros", ".absmax", "_scale_2")


@dataclass(frozen=True, slots=True)
class Quantized:
    """One quantized tensor: where codes and scales lie, and what they unpack to."""

    scheme: Scheme
    key: str
    shape: tuple[int, ...]
    weight: TensorEntry
    scale: TensorEntry
    transposed: bool = False

    def untransposed(self) -> Quantized:
        """The same tensor as [experts, out, in], the order of its bytes."""
        if not self.transposed:
            return self
        *head, rows, columns = self.shape
        return dataclasses.replace(self, shape=(*head, columns, rows), transposed=False)


def scale_shape(scheme: Scheme, shape: tuple[int, ...], block: int = BLOCK) -> tuple[int, ...]:
    """The shape of the scales of a tensor of a logical `shape` (not transposed)."""
    *head, rows, columns = shape
    if scheme == "fp8":
        return (*head, -(-rows // block), -(-columns // block))
    return (*head, rows, columns // GROUP)


def is_quantized(manifest: Manifest) -> bool:
    """Whether any tensor looks quantized; such a checkpoint must not be loaded as plain values."""
    return any(_suspect(entry, manifest.tensors) for entry in manifest.tensors.values())


def detect(manifest: Manifest, *, block: int = BLOCK) -> dict[str, Quantized]:
    """All quantized tensors by their logical key.

    Raises RefusedError with every code without a scale, scale without a code, scale of a wrong
    shape or dtype, and scale of an unknown name.
    """
    found: dict[str, Quantized] = {}
    used: set[str] = set()
    problems: list[Problem] = []
    tensors = manifest.tensors
    for key, entry in tensors.items():
        candidate = _candidate(entry, tensors)
        if candidate is None:
            continue
        scheme, scale_keys = candidate
        scale_key = next((k for k in scale_keys if k in tensors), None)
        if scale_key is None:
            problems.append(_no_scale(manifest, entry, scale_keys))
            continue
        used.add(scale_key)
        scale = tensors[scale_key]
        problem = _check_pair(manifest, scheme, entry, scale, block)
        if problem is not None:
            problems.append(problem)
            continue
        item = _unpacked(scheme, entry, scale)
        if item.key in tensors and item.key != key:
            problems.append(_twice(manifest, item.key, key))
        found[item.key] = item
    problems.extend(_orphans(manifest, used))
    if problems:
        raise RefusedError(*problems)
    return found


def logical_manifest(
    manifest: Manifest,
    dtype: str = "bfloat16",
    *,
    found: Mapping[str, Quantized] | None = None,
) -> Manifest:
    """The manifest that a consumer sees after dequantization to `dtype`.

    Scales are gone; a dequantized tensor has its unpacked key, shape and `dtype` and no shards.
    """
    found = detect(manifest) if found is None else found
    hidden = {item.scale.key for item in found.values()}
    by_weight = {item.weight.key: item for item in found.values()}
    tensors: dict[str, TensorEntry] = {}
    for key, entry in manifest.tensors.items():
        if key in hidden:
            continue
        item = by_weight.get(key)
        if item is None:
            tensors[key] = entry
        else:
            tensors[item.key] = TensorEntry(item.key, item.shape, dtype)
    info = {**manifest.info, "quantization": describe(found.values())}
    return dataclasses.replace(manifest, tensors=tensors, info=info)


def describe(found: Iterable[Quantized]) -> str:
    """For people: `fp8 128x128 blocks (3 tensors), mxfp4 (2 tensors)`; empty for none."""
    names = {"fp8": f"fp8 {BLOCK}x{BLOCK} blocks", "fp4": "fp4 in int8", "mxfp4": "mxfp4"}
    counts: dict[str, int] = {}
    for item in found:
        counts[item.scheme] = counts.get(item.scheme, 0) + 1
    return ", ".join(f"{names[scheme]} ({count} tensors)" for scheme, count in counts.items())


def stored_entries(
    scheme: Scheme, key: str, shape: tuple[int, ...], *, scale: Literal["inv", "e8m0"] = "inv"
) -> tuple[TensorEntry, TensorEntry]:
    """The (codes, scales) entries that a quantized export of `key` writes.

    `shape` is logical; for `mxfp4` it is [experts, in, out]. `scale` chooses between
    `_scale_inv` in F32 and `.scale` in E8M0 for fp8.
    """
    if scheme == "mxfp4":
        *head, inputs, outputs = shape
        grid = (*head, outputs, inputs // GROUP)
        return (
            TensorEntry(key + _BLOCKS, (*grid, GROUP // 2), "uint8"),
            TensorEntry(key + _SCALES, grid, "uint8"),
        )
    grid = scale_shape(scheme, shape)
    base = key.removesuffix(_WEIGHT)
    if scheme == "fp4":
        packed = (*shape[:-1], shape[-1] // 2)
        return TensorEntry(key, packed, "int8"), TensorEntry(base + _SCALE, grid, E8M0[0])
    if scale == "inv":
        return TensorEntry(key, shape, FP8[0]), TensorEntry(key + _SCALE_INV, grid, "float32")
    return TensorEntry(key, shape, FP8[0]), TensorEntry(base + _SCALE, grid, E8M0[0])


# --- pairing ------------------------------------------------------------------------------------


def _candidate(
    entry: TensorEntry, tensors: Mapping[str, TensorEntry]
) -> tuple[Scheme, list[str]] | None:
    """The scheme of a tensor that holds codes, and the keys its scale may have."""
    key = entry.key
    if entry.dtype in FP8:
        keys = [key + _SCALE_INV]
        if key.endswith(_WEIGHT):
            keys.append(key.removesuffix(_WEIGHT) + _SCALE)
        return "fp8", keys
    if entry.dtype == "int8" and key.endswith(_WEIGHT):
        scale = tensors.get(key.removesuffix(_WEIGHT) + _SCALE)
        return ("fp4", [scale.key]) if scale is not None else None
    if entry.dtype == "uint8" and key.endswith(_BLOCKS):
        return "mxfp4", [key.removesuffix(_BLOCKS) + _SCALES]
    return None


def _suspect(entry: TensorEntry, tensors: Mapping[str, TensorEntry]) -> bool:
    if entry.dtype.startswith(("float8", "float4")):
        return True
    candidate = _candidate(entry, tensors)
    return candidate is not None or entry.key.endswith(".weight" + _SCALE_INV)


def _unpacked(scheme: Scheme, weight: TensorEntry, scale: TensorEntry) -> Quantized:
    if scheme == "fp8":
        return Quantized(scheme, weight.key, weight.shape, weight, scale)
    if scheme == "fp4":
        shape = (*weight.shape[:-1], weight.shape[-1] * 2)
        return Quantized(scheme, weight.key, shape, weight, scale)
    *head, outputs, groups, _ = weight.shape
    key = weight.key.removesuffix(_BLOCKS)
    return Quantized(scheme, key, (*head, groups * GROUP, outputs), weight, scale, transposed=True)


def _check_pair(
    manifest: Manifest, scheme: Scheme, weight: TensorEntry, scale: TensorEntry, block: int
) -> Problem | None:
    allowed = _FP8_SCALES if scheme == "fp8" else E8M0
    if scale.dtype not in allowed:
        return Problem(
            code="quantized.scale-dtype",
            what=f"the scale of {weight.key!r} has a dtype that its scheme ({scheme}) does not use",
            where=_place(manifest, scale),
            expected=" or ".join(allowed),
            actual=scale.dtype,
            cause="written by a quantizer that is not known here",
            fix="export the weights unquantized, or in one of the known schemes",
        )
    if scheme == "mxfp4":
        good = len(weight.shape) >= 3 and weight.shape[-1] == GROUP // 2
        expected = weight.shape[:-1]
    elif scheme == "fp4":
        good = len(weight.shape) >= 2 and weight.shape[-1] * 2 % GROUP == 0
        expected = scale_shape(scheme, (*weight.shape[:-1], weight.shape[-1] * 2)) if good else ()
    else:
        good = len(weight.shape) >= 2
        expected = scale_shape(scheme, weight.shape, block) if good else ()
    if not good:
        return Problem(
            code="quantized.weight-shape",
            what=f"{weight.key!r} has a shape that its scheme ({scheme}) cannot have",
            where=_place(manifest, weight),
            expected="[..., out, in/32, 16]" if scheme == "mxfp4" else "[..., out, in]",
            actual=str(list(weight.shape)),
            fix="export the tensor unquantized",
        )
    if scale.shape == expected:
        return None
    return Problem(
        code="quantized.scale-shape",
        what=f"the scale of {weight.key!r} has the wrong shape"
        if scale.shape
        else f"the scale of {weight.key!r} is one number without dimensions",
        where=_place(manifest, scale),
        expected=f"{list(expected)} for {weight.dtype} {list(weight.shape)}",
        actual=str(list(scale.shape)),
        cause="another block size or scheme, or scales of another model",
        fix="quantize again in blocks of 128 x 128" if scheme == "fp8" else "quantize again",
    )


def _orphans(manifest: Manifest, used: set[str]) -> list[Problem]:
    """Scales that belong to no codes, and names that only another quantizer writes."""
    problems = []
    foreign = []
    for key, entry in manifest.tensors.items():
        if key in used:
            continue
        owner = _owner(key, entry)
        if owner is not None:
            problems.append(_orphan(manifest, entry, owner))
        elif entry.dtype.startswith(("float8_e8m0", "float4")) or (
            key.endswith(_FOREIGN) and _neighbour_is_coded(key, manifest.tensors)
        ):
            foreign.append(key)
    if foreign:
        problems.append(
            Problem(
                code="quantized.unknown-scale",
                what="tensors look like scales or codes of a quantizer that is not known here",
                where=manifest.path,
                expected=f"<weight>{_SCALE_INV}, <name>{_SCALE}, or <name>{_BLOCKS} and {_SCALES}",
                actual=list_keys(foreign),
                fix="export the weights unquantized, or in one of the known schemes",
            )
        )
    return problems


def _owner(key: str, entry: TensorEntry) -> str | None:
    """The codes that a key of a known scale name must have; None when it is no such name."""
    if key.endswith(_SCALE_INV):
        return key.removesuffix(_SCALE_INV)
    if key.endswith(_SCALE) and entry.dtype in E8M0:
        return key.removesuffix(_SCALE) + _WEIGHT
    if key.endswith(_SCALES) and entry.dtype == "uint8":
        return key.removesuffix(_SCALES) + _BLOCKS
    return None


def _neighbour_is_coded(key: str, tensors: Mapping[str, TensorEntry]) -> bool:
    stem = key.rsplit(".", 1)[0]
    weight = tensors.get(stem + _WEIGHT)
    return weight is not None and (weight.dtype in FP8 or not is_floating(weight.dtype))


# --- messages -----------------------------------------------------------------------------------


def _place(manifest: Manifest, entry: TensorEntry) -> str:
    file = entry.shards[0].file if entry.shards else ""
    return f"{manifest.path}{'/' + file if file else ''}, tensor {entry.key!r}"


def _no_scale(manifest: Manifest, entry: TensorEntry, keys: list[str]) -> Problem:
    stem = entry.key.removesuffix(_WEIGHT).removesuffix(_BLOCKS)
    beside = [k for k in manifest.tensors if k.startswith(stem) and k != entry.key][:4]
    return Problem(
        code="quantized.no-scale",
        what=f"{entry.key!r} holds {entry.dtype} codes and has no scale",
        where=_place(manifest, entry),
        expected=" or ".join(keys),
        actual=f"beside it: {', '.join(beside)}" if beside else "nothing beside it",
        cause="the scale was dropped by a tool, or has a name of another quantizer",
        fix="copy the scale from the source checkpoint under the expected name",
    )


def _orphan(manifest: Manifest, entry: TensorEntry, owner: str) -> Problem:
    present = manifest.tensors.get(owner)
    return Problem(
        code="quantized.no-weight",
        what=f"{entry.key!r} is a scale without quantized weights",
        where=_place(manifest, entry),
        expected=f"quantized codes under {owner!r}",
        actual=f"{present.dtype} {list(present.shape)}" if present else "no such tensor",
        cause="the weights were dequantized or dropped, and the scale stayed",
        fix="remove the scale if the weights are plain values; else restore the codes",
    )


def _twice(manifest: Manifest, key: str, codes: str) -> Problem:
    return Problem(
        code="quantized.twice",
        what=f"{key!r} is there both quantized ({codes}) and plain",
        where=manifest.path,
        cause="two exports were mixed in one folder",
        fix="remove one of the two",
    )
