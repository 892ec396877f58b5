"""Whether a checkpoint has every tensor that a family, a config, an index or another checkpoint
says it must have, in the right shapes, and no others. Compares manifests; reads no tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_ckpt import families
from torchtitan_ckpt.adapter import MappingAdapter
from torchtitan_ckpt.config import TRAINING_STATES
from torchtitan_ckpt.errors import (
    ConfigError,
    DamagedError,
    MappingError,
    Problem,
    list_keys,
    nearest,
)
from torchtitan_ckpt.families import model_config
from torchtitan_ckpt.formats import detect, read_manifest
from torchtitan_ckpt.formats.quantized import detect as detect_quantized
from torchtitan_ckpt.formats.quantized import is_quantized, logical_manifest
from torchtitan_ckpt.formats.strangers import read_json
from torchtitan_ckpt.manifest import Manifest, TensorEntry, is_floating
from torchtitan_ckpt.mapping.rule import HF, NATIVE
from torchtitan_ckpt.published import config_of

_INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True, slots=True)
class Expected:
    """The tensors that must be there. `optional` may be: `(key, its reason)` by a function.

    `name` says in words what was compared with; `shapes` is False where only keys are known.
    """

    name: str
    tensors: Mapping[str, TensorEntry]
    optional: Callable[[str], str]
    shapes: bool = True
    dtypes: bool = False


@dataclass(frozen=True, slots=True)
class Completeness:
    """`expected` and `matched` count tensors; `notes` are losses that a table declares."""

    name: str
    expected: int
    matched: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def compare(manifest: Manifest, against: str, *, config: str | None = None) -> Completeness:
    """Compare a checkpoint's tensors with what `against` asks for.

    `against` is a family's name (with `config`, or a config.json in or beside the checkpoint), a
    config.json or its folder (its weights count only where its family is unknown), a published
    model's name, an index, or another checkpoint. Raises
    `ConfigError` when it is none of these.
    """
    tensors = _model_tensors(manifest)
    wanted = _expected(manifest, tensors, against, config)
    missing = [k for k in wanted.tensors if k not in tensors and not wanted.optional(k)]
    extra = [k for k in tensors if k not in wanted.tensors]
    declared: dict[str, list[str]] = {}
    unknown = []
    for key in extra:
        why = wanted.optional(key)
        if why:
            declared.setdefault(why, []).append(key)
        else:
            unknown.append(key)
    both = [k for k in wanted.tensors if k in tensors]
    problems = _differences(manifest, wanted, missing, unknown, tensors)
    if wanted.shapes:
        problems += _shapes(manifest, wanted, {k: tensors[k] for k in both})
    notes = [f"declared, not required: {list_keys(keys)}: {why}" for why, keys in declared.items()]
    return Completeness(wanted.name, len(wanted.tensors), len(both), tuple(problems), tuple(notes))


def _model_tensors(manifest: Manifest) -> dict[str, TensorEntry]:
    """The model's tensors, without training states, dequantized as far as shapes go."""
    if manifest.format == "hf":
        if is_quantized(manifest):
            found = detect_quantized(manifest)
            manifest = logical_manifest(manifest, found=found)
        return dict(manifest.tensors)
    return {
        key: entry
        for key, entry in manifest.tensors.items()
        if key.partition(".")[0] not in TRAINING_STATES
    }


def _expected(
    manifest: Manifest, tensors: Mapping[str, TensorEntry], against: str, config: str | None
) -> Expected:
    path = Path(against.removeprefix("file://"))
    if against in families.names():
        found = config or _beside(manifest.path)
        if found is None:
            raise ConfigError(
                Problem(
                    code="verify.no-config",
                    what=f"the family {against} alone has no sizes, and there is no config.json",
                    where=manifest.path,
                    fix="add --config with the model's config.json, its folder, or a published "
                    "name, or give one of these as --against",
                )
            )
        return _by_table(tensors, _config(found), against)
    if not path.exists():
        try:
            return _by_table(tensors, config_of(against), None)
        except ConfigError as error:
            raise ConfigError(
                Problem(
                    code="verify.against",
                    what=f"nothing is called {against!r}",
                    where="--against",
                    expected="a family, a published model, or a path of a config.json, an index "
                    "or a checkpoint",
                    actual=f"families: {', '.join(families.names())}",
                    cause=error.problems[0].actual,
                )
            ) from error
    if path.name.endswith(_INDEX_SUFFIX):
        return _by_index(path)
    if path.suffix == ".json":
        return _by_table(tensors, _config(against), None)
    seen = detect(path)
    if path.is_dir() and (path / "config.json").is_file():
        try:
            return _by_table(tensors, _config(against), None)
        except MappingError:
            if seen.format is None:  # a model of no known family, and no weights beside it
                raise
    if seen.format is not None:
        return _by_checkpoint(read_manifest(path))
    indexes = sorted(path.glob("*" + _INDEX_SUFFIX)) if path.is_dir() else []
    if indexes:
        return _by_index(indexes[0])
    raise seen.error()


def _beside(path: str) -> str | None:
    """A config.json in or beside a checkpoint."""
    if "://" in path:
        return None
    place = Path(path)
    for folder in (place, place.parent):
        if (folder / "config.json").is_file():
            return str(folder)
    return None


def _config(text: str) -> dict[str, object]:
    return model_config.read(text, None) if os.path.exists(text) else config_of(text)


def _by_table(
    tensors: Mapping[str, TensorEntry], config: Mapping[str, object], family: str | None
) -> Expected:
    """The names that fit best: native ones of a generation and expert format, or the hub's."""
    table = families.of_config(config) if family is None else families.get(family)
    best: tuple[int, int, MappingAdapter] | None = None
    for generation in table.generations:
        for experts in ("standard", "gmm") if generation == "npu" else ("standard",):
            adapter = MappingAdapter(
                dict(config), family=table, generation=generation, experts=experts
            )
            for side in (NATIVE, HF):
                index = adapter.mapping.index(side)
                known = sum(index.match(key) is not None for key in tensors)
                if best is None or known > best[0]:
                    best = known, side, adapter
    assert best is not None
    _, side, adapter = best
    names = "Hugging Face" if side == HF else adapter.mapping.name
    reasons = _reasons(adapter, tensors, side)
    full = adapter.hf_entries() if side == HF else adapter.native_entries()
    for key in adapter.tied_native if side == NATIVE else ():
        reasons.setdefault(key, "tied to another tensor")
    return Expected(f"{table.name} ({names} names)", full, lambda key: reasons.get(key, ""))


def _reasons(
    adapter: MappingAdapter, tensors: Mapping[str, TensorEntry], side: int
) -> dict[str, str]:
    """Why keys that the table knows may be there or not: it declares them as no part of the rest.

    Also those of layers that the model may be built without (MTP).
    """
    out: dict[str, str] = {}
    name = "native" if side == NATIVE else "hf"
    for left in adapter.left_out([k for k in tensors if _known(adapter, side, k)], name):
        out.update(dict.fromkeys(left.keys, left.why))
    if side == NATIVE:
        try:
            shorter = MappingAdapter(
                adapter.config, family=adapter.family, generation=adapter.generation, mtp=False
            )
            fewer = shorter.native_entries()
        except MappingError:
            return out
        mtp = [key for key in adapter.native_entries() if key not in fewer]
        if not any(key in tensors for key in mtp):
            out.update(dict.fromkeys(mtp, "the model was built without MTP layers"))
    return out


def _known(adapter: MappingAdapter, side: int, key: str) -> bool:
    return adapter.mapping.index(side).match(key) is not None


def _by_index(path: Path) -> Expected:
    try:
        keys = read_json(path)["weight_map"]
        entries = {str(key): TensorEntry(str(key), (), "float32") for key in keys}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            Problem(
                code="verify.index",
                what="the index cannot be read",
                where=str(path),
                actual=f"{type(error).__name__}: {error}",
                fix="copy or download it again",
            )
        ) from error
    return Expected(f"the index {path.name}", entries, lambda key: "", shapes=False)


def _by_checkpoint(manifest: Manifest) -> Expected:
    entries = _model_tensors(manifest)
    return Expected(f"the checkpoint {manifest.path}", entries, lambda key: "", dtypes=True)


# Words


def _differences(
    manifest: Manifest,
    wanted: Expected,
    missing: list[str],
    unknown: list[str],
    tensors: Mapping[str, TensorEntry],
) -> list[Problem]:
    def trait(key: str) -> tuple[object, ...]:
        """What a renamed tensor keeps: its layer's and expert's numbers, and its shape."""
        entry = wanted.tensors.get(key) or tensors[key]
        numbers = [part for part in key.split(".") if part.isdigit()]
        return (*numbers, entry.shape if wanted.shapes else None)

    problems = []
    if missing:
        near = _near(missing, unknown, trait)
        problems.append(
            Problem(
                code="verify.missing",
                what=f"{len(missing)} tensors are missing: {list_keys(missing)}",
                where=manifest.path,
                expected=f"{len(wanted.tensors)} tensors of {wanted.name}",
                actual=near,
                cause="renamed"
                if near
                else "an incomplete save, copy or conversion, or a config of another model",
                fix="fetch or save it again; check --against with `torchtitan-ckpt inspect`",
            )
        )
    if unknown:
        problems.append(
            Problem(
                code="verify.unknown",
                what=f"{len(unknown)} tensors are not of {wanted.name}: {list_keys(unknown)}",
                where=manifest.path,
                actual=_near(unknown, missing, trait),
                cause="another model, another size, or names of another generation",
                fix="name the right model with --against, or convert the checkpoint",
            )
        )
    return problems


def _near(keys: list[str], others: list[str], trait: Callable[[str], object]) -> str:
    """What the first keys look like, of the other keys that have the same traits."""
    alike: dict[object, list[str]] = {}
    for key in others:
        alike.setdefault(trait(key), []).append(key)
    pairs = ((key, nearest(key, alike.get(trait(key), ())[:2000])) for key in keys[:3])
    return "; ".join(f"{key} looks like {near}" for key, near in pairs if near)


def _shapes(
    manifest: Manifest, wanted: Expected, tensors: Mapping[str, TensorEntry]
) -> list[Problem]:
    shapes, kinds = [], []
    for key, entry in tensors.items():
        other = wanted.tensors[key]
        if entry.shape != other.shape:
            shapes.append(key)
        elif is_floating(entry.dtype) != is_floating(other.dtype) or (
            wanted.dtypes and entry.dtype != other.dtype
        ):
            kinds.append(key)
    problems = []
    for keys, code, what, of in (
        (shapes, "verify.shape", "have another shape", lambda e: str(list(e.shape))),
        (kinds, "verify.dtype", "have another dtype", lambda e: e.dtype),
    ):
        if keys:
            key = keys[0]
            problems.append(
                Problem(
                    code=code,
                    what=f"{len(keys)} tensors {what}: {list_keys(keys)}",
                    where=f"{manifest.path}: {key}",
                    expected=of(wanted.tensors[key]),
                    actual=of(tensors[key]),
                    cause="another model, or a padded or resized one" if keys is shapes else "",
                    fix="name the right model with --against",
                )
            )
    return problems
