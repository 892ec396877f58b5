"""Turns the loose inputs of a Subject into templates: key -> shape and dtype, with their source.

No values, no checks. A template is the gate's own list; it is never taken from the adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_ckpt.errors import CheckpointError, ConfigError, Problem, RefusedError
from torchtitan_ckpt.formats import quantized
from torchtitan_ckpt.manifest import Manifest, TensorEntry


@dataclass(frozen=True, slots=True)
class Leaf:
    """Shape and dtype (torch's name without prefix) of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class FileList:
    """What the files should hold. A leaf is None where only the key is known.

    Of quantized files, what an adapter sees of them: weights under their own keys, no scales.
    `stored` are then the keys that lie in the files, scales among them.
    """

    leaves: Mapping[str, Leaf | None]
    source: str
    stored: tuple[str, ...] = ()


def leaf_of(value: Any) -> Leaf | None:
    """The leaf of a tensor, a manifest entry or a (shape, dtype) pair; None for other values."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None and isinstance(value, tuple | list) and len(value) == 2:
        shape, dtype = value
    if not isinstance(shape, Iterable) or dtype is None:
        return None
    return Leaf(tuple(map(int, shape)), str(dtype).removeprefix("torch."))


def native_template(native: Any) -> dict[str, Leaf]:
    """Key -> Leaf of a model, a state dict, a Manifest, pairs, or a factory of one of these."""
    model = hasattr(native, "state_dict") and not isinstance(native, type)
    if callable(native) and not model and not isinstance(native, Mapping):
        native = native()
    if isinstance(native, Manifest):
        native = native.tensors
    elif hasattr(native, "state_dict"):
        native = native.state_dict()
    if not isinstance(native, Mapping):
        raise _bad("native", native, "a model, a state dict, a Manifest or key -> (shape, dtype)")
    leaves = {str(key): leaf_of(value) for key, value in native.items()}
    found = {key: leaf for key, leaf in leaves.items() if leaf is not None}
    if not found:  # what is no tensor is left out, as a model's extra state
        first = next(iter(native.items()), "an empty dict")
        raise _bad("native", first, "tensors, or (shape, dtype), under the model's keys")
    return found


def file_list(hf: Any) -> FileList | None:
    """What a Subject's `hf` says the files hold, or None when it says nothing."""
    found = _stored(hf)
    return found and _logical(found)


def _logical(stored: FileList) -> FileList:
    """The list without scales, which a dequantizing reader takes and an adapter never sees."""
    leaves = {k: leaf for k, leaf in stored.leaves.items() if leaf is not None}
    if len(leaves) < len(stored.leaves):
        kept = {k: leaf for k, leaf in stored.leaves.items() if not _scale_of(k, stored.leaves)}
        scaled = len(kept) < len(stored.leaves)
        return FileList(kept, stored.source, tuple(stored.leaves) if scaled else stored.stored)
    entries = {k: TensorEntry(k, leaf.shape, leaf.dtype) for k, leaf in leaves.items()}
    manifest = Manifest(stored.source, "hf", entries)
    if not quantized.is_quantized(manifest):
        return stored
    try:
        logical = quantized.logical_manifest(manifest)
    except RefusedError:  # codes of a scheme that is not known here: as they are stored
        return stored
    seen = {k: leaf_of(v) for k, v in logical.tensors.items()}
    return FileList(seen, stored.source, tuple(stored.leaves))


def _scale_of(key: str, keys: Iterable[str]) -> bool:
    """Whether a key names the scales of another, as far as names tell."""
    return key.endswith("_scale_inv") and key.removesuffix("_scale_inv") in keys


def _stored(hf: Any) -> FileList | None:
    if callable(hf) and not isinstance(hf, Mapping):
        hf = hf()
    if hf is None or isinstance(hf, FileList):
        return hf
    if isinstance(hf, Manifest):
        return FileList({k: leaf_of(v) for k, v in hf.tensors.items()}, hf.path or "manifest")
    if isinstance(hf, str | Path):
        return _from_path(Path(hf))
    if hasattr(hf, "to_dict"):
        hf = hf.to_dict()
    if isinstance(hf, Mapping):
        return _from_mapping(hf, "the given list")
    if isinstance(hf, Iterable):
        return FileList(dict.fromkeys(map(str, hf)), "the given list of keys")
    raise _bad("hf", hf, "a folder, an index, a list of keys, a Manifest or a config")


def _from_path(path: Path) -> FileList:
    if path.is_dir() or path.suffix == ".safetensors":
        from torchtitan_ckpt.formats import hf as hf_format

        manifest = hf_format.read_manifest(str(path))
        return FileList({k: leaf_of(v) for k, v in manifest.tensors.items()}, path.name)
    if not path.exists():
        raise ConfigError(
            Problem(
                code="check.no-hf-list",
                what="the HF list of a subject does not exist",
                where=str(path),
                fix="name a folder, an index.json or a file of keys",
            )
        )
    content = json.loads(path.read_text())
    if isinstance(content, list):
        return FileList(dict.fromkeys(map(str, content)), path.name)
    return _from_mapping(content, path.name)


def _from_mapping(content: Mapping[str, Any], source: str) -> FileList:
    if isinstance(content.get("weight_map"), Mapping):
        return FileList(dict.fromkeys(content["weight_map"]), source)
    if "model_type" in content or "architectures" in content:
        from conformance.subjects.families import file_list_of_config

        try:
            return file_list_of_config(dict(content))
        except CheckpointError as error:
            raise ConfigError(
                Problem(
                    code="check.bad-subject",
                    what="a Subject's `hf` is a config from which no list of keys can be made",
                    where=source,
                    cause=error.problems[0].what,
                    fix="name a checkpoint's folder, its index, or a list of its keys",
                )
            ) from error
    return FileList({str(k): leaf_of(v) for k, v in content.items()}, source)


def _bad(name: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(
        Problem(
            code="check.bad-subject",
            what=f"a Subject's `{name}` cannot be used",
            expected=expected,
            actual=repr(value)[:80] if isinstance(value, tuple | str) else type(value).__name__,
        )
    )
