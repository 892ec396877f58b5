"""What a checkpoint holds, gathered for people: groups of tensors, files, states, step, family.

From manifests and small files only: no data but that of a step counter is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_ckpt import families
from torchtitan_ckpt import folder as folders
from torchtitan_ckpt.errors import (
    CheckpointError,
    InputError,
    group_keys,
    key_template,
)
from torchtitan_ckpt.formats import Detection, detect, read_manifest
from torchtitan_ckpt.formats.quantized import describe, is_quantized
from torchtitan_ckpt.formats.quantized import detect as detect_quantized
from torchtitan_ckpt.formats.strangers import read_json
from torchtitan_ckpt.guess import guess_family
from torchtitan_ckpt.manifest import ITEM_SIZE, Manifest
from torchtitan_ckpt.survey import states_of

_SMALL_OBJECT = 4096


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors whose keys differ in numbers only and whose shape and dtype are the same."""

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    shards: tuple[int, int]
    files: int


@dataclass(frozen=True, slots=True)
class FileUse:
    """A file, and what of the checkpoint lies in it. `items` are shards and objects."""

    name: str
    nbytes: int
    items: int
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that `inspect` shows of one checkpoint."""

    path: str
    format: str
    kind: str
    refused: Mapping[str, str]
    step: str
    states: tuple[str, ...]
    tensors: int
    numel: int
    nbytes: int
    dtypes: Mapping[str, int]
    groups: tuple[Group, ...]
    objects: tuple[tuple[str, int], ...]
    files: tuple[FileUse, ...]
    quantization: str
    family: str
    notes: tuple[str, ...]


def inspect(path: str, *, trust: bool = False) -> Inspection:
    """Describe a checkpoint of any format. Raises what its reader raises."""
    found = detect(path)
    manifest = read_manifest(path, trust=trust)
    dtypes: dict[str, int] = {}
    for entry in manifest.tensors.values():
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + entry.nbytes
    notes = [line for line in manifest.info.get("notes", "").split("\n") if line]
    if "none_keys" in manifest.info:
        nones = manifest.info["none_keys"].split("\n")
        notes.append(f"{len(nones)} entries hold None, which counts as absent")
    return Inspection(
        path=path,
        format=str(found.format),
        kind=_kind(found, manifest),
        refused=found.refused,
        step=_step(path, manifest, trust),
        states=tuple(sorted(states_of(manifest))) if found.format != "hf" else ("model",),
        tensors=len(manifest.tensors),
        numel=sum(entry.numel for entry in manifest.tensors.values()),
        nbytes=manifest.nbytes,
        dtypes=dict(sorted(dtypes.items(), key=lambda item: -item[1])),
        groups=tuple(_groups(manifest)),
        objects=tuple(_objects(manifest.objects)),
        files=tuple(_files(manifest)),
        quantization=_quantization(manifest),
        family=_family(path, manifest),
        notes=tuple(notes),
    )


def groups_of(keys: Iterable[str]) -> list[list[str]]:
    """Keys that differ in whole numbers only, together."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(key_template(key), []).append(key)
    return list(groups.values())


_HYPERPARAMETERS = "optimizer.param_groups."


def _objects(keys: Iterable[str]) -> Iterable[tuple[str, int]]:
    """Objects in groups, with their numbers. An optimizer's hyperparameters lie there once for each
    parameter, whatever it is called: the parameter is left open."""
    counts: dict[str, int] = {}
    for key in keys:
        if key.startswith(_HYPERPARAMETERS):
            key = f"{_HYPERPARAMETERS}*.{key.rpartition('.')[2]}"
        counts[key] = counts.get(key, 0) + 1
    for name, count in group_keys(counts):
        yield name, counts.get(name, count)


def size_text(count: int) -> str:
    """Bytes for people: decimal units."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"


def _kind(found: Detection, manifest: Manifest) -> str:
    if found.format == "hf":
        return {"single": "one safetensors file", "index": "safetensors files with an index"}.get(
            manifest.info.get("layout", ""), "safetensors shards as torch's DCP writes them"
        )
    if found.format == "dcp":
        version = manifest.info.get("version")
        return "DCP" + (f" (metadata version {version})" if version else "")
    return "a torch.save archive"


def _step(path: str, manifest: Manifest, trust: bool) -> str:
    """The step by the folder's name, and by the checkpoint's own count where it is a small one."""
    number = folders.step_number(Path(path.rstrip("/")).name)
    named = "" if number is None else str(number)
    entry = manifest.objects.get("train_state.step")
    own = ""
    try:
        if entry is not None and entry.byte_length <= _SMALL_OBJECT and manifest.format == "dcp":
            from torchtitan_ckpt.formats.dcp_objects import read_objects
            from torchtitan_ckpt.formats.folders import open_folder

            own = str(read_objects(open_folder(path), [entry], trust=trust)[entry.key])
        tensor = manifest.tensors.get("train_state.step")
        if tensor is not None and tensor.numel == 1:
            own = f"{_read_scalar(path, 'train_state.step'):g}"
    except CheckpointError:
        own = ""
    if own and named and own != named:
        return f"{named} by its name, {own} by its train_state"
    return own or named


def _read_scalar(path: str, key: str) -> float:
    import torch

    from torchtitan_ckpt.convert.source import open_source

    source = open_source(path, raw=True)
    try:
        entry = source.manifest.tensors[key]
        out = torch.empty(entry.shape, dtype=torch.float64)
        source.fill(key, (0,) * len(entry.shape), out)
        return float(out.reshape(()))
    finally:
        source.close()


def _groups(manifest: Manifest) -> Iterable[Group]:
    groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for key, entry in manifest.tensors.items():
        groups.setdefault((key_template(key), entry.shape, entry.dtype), []).append(key)
    for (_, shape, dtype), keys in groups.items():
        entries = [manifest.tensors[key] for key in keys]
        counts = [len(entry.shards) for entry in entries]
        yield Group(
            name=group_keys(keys)[0][0],
            count=len(keys),
            shape=shape,
            dtype=dtype,
            nbytes=sum(entry.nbytes for entry in entries),
            shards=(min(counts), max(counts)),
            files=len({shard.file for entry in entries for shard in entry.shards}),
        )


def _files(manifest: Manifest) -> Iterable[FileUse]:
    items: dict[str, int] = {}
    data: dict[str, int] = {}
    for entry in manifest.tensors.values():
        width = ITEM_SIZE[entry.dtype]
        for shard in entry.shards:
            items[shard.file] = items.get(shard.file, 0) + 1
            data[shard.file] = data.get(shard.file, 0) + math.prod(shard.sizes) * width
    for thing in manifest.objects.values():
        items[thing.file] = items.get(thing.file, 0) + 1
        data[thing.file] = data.get(thing.file, 0) + thing.byte_length
    for name in sorted(manifest.files, key=_natural):
        yield FileUse(name, manifest.files[name], items.get(name, 0), data.get(name, 0))


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _quantization(manifest: Manifest) -> str:
    if not is_quantized(manifest):
        return ""
    try:
        return describe(detect_quantized(manifest).values())
    except InputError as error:
        return f"not understood: {error.problems[0].what}"


def _family(path: str, manifest: Manifest) -> str:
    config = _config_beside(path)
    if config is not None:
        try:
            found = families.of_config(config)
            return f"{found.name}, by its config.json"
        except CheckpointError:
            return f"none known for the model_type {config.get('model_type')!r} of its config.json"
    states = ("optimizer", "lr_scheduler", "dataloader", "train_state")
    keys = [key for key in manifest.tensors if key.partition(".")[0] not in states]
    guess = guess_family(keys)
    return "" if guess is None else f"probably {guess}"


def _config_beside(path: str) -> dict[str, Any] | None:
    if "://" in path:
        return None
    place = Path(path)
    for folder in (place, place.parent):
        try:
            found = read_json(folder / "config.json")
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and "model_type" in found:
            return found
    return None
