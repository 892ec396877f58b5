"""Whether a checkpoint's tensors fit the tensors they should fill; every difference at once.

Pure: it compares a manifest with targets and reads nothing. What fits comes back as work for the
reader; what does not is one MismatchError (or RefusedError, for quantized weights).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from torchtitan_ckpt.errors import MismatchError, Problem, RefusedError, list_keys, nearest
from torchtitan_ckpt.formats.hf_boxes import UnevenStrided, local_boxes
from torchtitan_ckpt.formats.hf_io import NAMES
from torchtitan_ckpt.formats.quantized import Quantized, detect, is_quantized, logical_manifest
from torchtitan_ckpt.manifest import Manifest, TensorEntry, is_floating

Wanted = list[tuple[str, TensorEntry | Quantized, torch.Tensor]]

# Which float types hold every value of another.
_WIDER = {
    "bfloat16": {"float32", "float64"},
    "float16": {"float32", "float64"},
    "float32": {"float64"},
}


def compare(
    manifest: Manifest,
    state: Mapping[str, Any],
    *,
    dequantize: bool = False,
    widen: bool = False,
    narrow: bool = False,
    raw: bool = False,
    expected_keys: Collection[str] | None = None,
    excused: Collection[str] = (),
) -> Wanted:
    """What to read into which tensor. Raises with every difference; see `hf_read.load`."""
    quantized: dict[str, Quantized] = {}
    if dequantize:
        quantized = detect(manifest)
        if not quantized:
            raise RefusedError(_nothing_quantized(manifest))
        logical = logical_manifest(manifest, found=quantized)
    else:
        if not raw:
            refuse_quantized_as_plain(manifest)
        logical = manifest
    wanted: Wanted = []
    missing: list[str] = []
    problems: list[Problem] = []
    shapes: list[tuple[str, str]] = []
    dtypes: dict[tuple[str, str, str], list[str]] = {}
    for key, target in state.items():
        item: TensorEntry | Quantized | None = quantized.get(key) or logical.tensors.get(key)
        if item is None:
            item = _by_blocks(key, quantized, logical)
        if item is None:
            if not _excused(key, excused):
                missing.append(key)
            continue
        fault = _unfit(key, target)
        if fault is not None:
            problems.append(fault)
            continue
        if tuple(target.shape) != item.shape:
            shapes.append((key, f"{list(item.shape)} into {list(target.shape)}"))
            continue
        name = NAMES.get(target.dtype, str(target.dtype))
        stored = "float32" if isinstance(item, Quantized) else item.dtype
        fits = is_floating(name) if isinstance(item, Quantized) else stored == name
        if not fits:
            how = _cast(stored, name, widen, narrow)
            if how:
                dtypes.setdefault((stored, name, how), []).append(key)
                continue
        wanted.append((key, item, target))
    asked = set(state) | set(expected_keys or ())
    asked |= {item.key for _, item, _ in wanted}
    unexpected = [k for k in logical.tensors if k not in asked and not _excused(k, excused)]
    problems += _differences(manifest, missing, unexpected, shapes, dtypes, logical)
    if problems:
        raise MismatchError(*problems)
    return wanted


def refuse_quantized_as_plain(manifest: Manifest) -> None:
    """Raise RefusedError when plain reading would give codes for values."""
    if is_quantized(manifest):
        raise RefusedError(_quantized_as_plain(manifest))


def _by_blocks(
    key: str, quantized: Mapping[str, Quantized], logical: Manifest
) -> TensorEntry | Quantized | None:
    """A target named as the codes themselves, `<name>_blocks`, wants them in the stored order.

    torchtitan's gpt-oss adapter asks so, with the shape [experts, out, in].
    """
    item = quantized.get(key.removesuffix("_blocks"))
    return item.untransposed() if item is not None and item.weight.key == key else None


def _unfit(key: str, target: Any) -> Problem | None:
    """Why a target cannot be filled at all."""
    if type(target) is torch.Tensor and target.device.type == "cpu" and target.is_contiguous():
        return None
    if not isinstance(target, torch.Tensor):
        what, actual = f"{key!r} is no tensor", type(target).__name__
    elif target.is_meta:
        what, actual = f"{key!r} has no memory", "a tensor on the meta device"
    elif target.layout != torch.strided:
        what, actual = f"{key!r} is not a dense tensor", str(target.layout)
    else:
        try:
            local_boxes(target)
            return None
        except UnevenStrided as error:
            what, actual = f"the sharding of {key!r} can be read in two ways", str(error)
        except ValueError as error:
            what, actual = f"{key!r} has a sharding that cannot be loaded into", str(error)
    return Problem(
        code="hf.target",
        what=what,
        expected="an allocated tensor or DTensor of whole values",
        actual=actual,
        fix="materialise the model (to_empty) and shard it evenly before loading",
    )


def _cast(stored: str, wanted: str, widen: bool, narrow: bool) -> str:
    """Why a cast is not made; empty when it is allowed."""
    if not (is_floating(stored) and is_floating(wanted)):
        return "never"
    if wanted in _WIDER.get(stored, ()):
        return "" if widen or narrow else "widen"
    return "" if narrow else "narrow"


def _excused(key: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


# --- messages -----------------------------------------------------------------------------------


def _differences(
    manifest: Manifest,
    missing: list[str],
    unexpected: list[str],
    shapes: list[tuple[str, str]],
    dtypes: Mapping[tuple[str, str, str], list[str]],
    logical: Manifest,
) -> list[Problem]:
    problems = []
    if missing:
        close = nearest(missing[0], unexpected or logical.tensors)
        problems.append(
            Problem(
                code="load.missing",
                what=f"{len(missing)} tensors are not in the checkpoint",
                where=manifest.path,
                expected=list_keys(missing),
                actual=f"nearest: {close} (renamed?)" if close else "nothing like them",
                fix="load with the adapter of this model family, or excuse the keys by a pattern",
            )
        )
    if unexpected:
        problems.append(
            Problem(
                code="load.unexpected",
                what=f"{len(unexpected)} tensors of the checkpoint have no place",
                where=manifest.path,
                actual=list_keys(unexpected),
                cause="a model of another configuration, or keys of another family",
                fix="load with the right configuration, or excuse the keys by a pattern",
            )
        )
    by_difference: dict[str, list[str]] = {}
    for key, difference in shapes:
        by_difference.setdefault(difference, []).append(key)
    for difference, keys in by_difference.items():
        problems.append(
            Problem(
                code="load.shape",
                what=f"{len(keys)} tensors have another shape in the checkpoint",
                where=list_keys(keys),
                actual=difference,
                cause="another model size or vocabulary; or a sharded save that lost its last part",
                fix="use the configuration that the checkpoint was saved with",
            )
        )
    fixes = {
        "widen": "allow it with widen=True: no value changes",
        "narrow": "allow it with narrow=True: values are rounded",
        "never": "floats and integers are never cast into each other, nor integers among "
        "themselves; correct the model's or the file's dtype",
    }
    for (stored, wanted, how), keys in dtypes.items():
        problems.append(
            Problem(
                code="load.dtype",
                what=f"{len(keys)} tensors have another dtype in the checkpoint",
                where=list_keys(keys),
                expected=wanted,
                actual=stored,
                fix=fixes[how],
            )
        )
    return problems


def _nothing_quantized(manifest: Manifest) -> Problem:
    dtypes = sorted({entry.dtype for entry in manifest.tensors.values()})
    return Problem(
        code="quantized.plain",
        what="dequantization was asked for, but no tensor is quantized",
        where=manifest.path,
        actual=f"dtypes {', '.join(dtypes)}",
        cause="the path of an unquantized export, or the flag was left on",
        fix="load without dequantization (initial_load_in_hf_quantized off)",
    )


def _quantized_as_plain(manifest: Manifest) -> Problem:
    found: list[str] = []
    scheme = ""
    try:
        detected = detect(manifest)
        found = [item.weight.key for item in detected.values()]
        scheme = ", ".join(sorted({item.scheme for item in detected.values()}))
    except RefusedError as error:
        return error.problems[0]
    if not found:
        found = [k for k, e in manifest.tensors.items() if e.dtype.startswith(("float8", "float4"))]
    first = manifest.tensors[found[0]]
    file = first.shards[0].file if first.shards else ""
    return Problem(
        code="quantized.not-asked",
        what=f"the checkpoint holds quantized weights ({scheme or first.dtype}); as plain values "
        "they would be raw codes",
        where=f"{manifest.path}/{file}, tensor {first.key!r}",
        actual=f"{len(found)} tensors: {list_keys(found)}",
        fix="unpack them: initial_load_in_hf_quantized of a job, convert --dequantize, or "
        "dequantize=True",
    )
