"""What a DCP folder holds, from `.metadata` and the sizes of its files; all that is wrong at once.

Reads no tensor data. Small object entries are looked at, because a pickled None counts as absent
(torchtitan 0.3.0 lets None through, and a later load would put it over healthy moments): such keys
are left out and named in `info["none_keys"]`, one a line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_ckpt.errors import DamagedError, InputError, Problem, RefusedError
from torchtitan_ckpt.formats.coverage import explain_cover
from torchtitan_ckpt.formats.dcp_objects import pickled_nones
from torchtitan_ckpt.formats.dcp_plain import SERIALIZATION, safetensors_part
from torchtitan_ckpt.formats.dcp_problems import Faults, compressed, no_metadata
from torchtitan_ckpt.formats.folders import Folder, open_folder
from torchtitan_ckpt.formats.hf_header import Header
from torchtitan_ckpt.formats.pickle_parts import Malformed, Record, garbage_collection_paused
from torchtitan_ckpt.formats.pickles import (
    MAX_METADATA_BYTES,
    DTypeName,
    Metadata,
    fields,
    load_metadata,
)
from torchtitan_ckpt.manifest import ITEM_SIZE, Manifest, ObjectEntry, Shard, TensorEntry

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Survey:
    """What a folder holds. `manifest` is all that `.metadata` describes, `sound` the part of it
    that can be read (of a tensor, the shards that can), `named` every file that it names. `refused`
    says that the problems are names that must not be opened, and nothing else.
    """

    manifest: Manifest
    sound: Manifest
    named: frozenset[str]
    problems: tuple[Problem, ...] = ()
    refused: bool = False


def read_manifest(path: str | os.PathLike[str], *, trust: bool = False) -> Manifest:
    """Describe the DCP checkpoint in the folder `path` (local, or an fsspec URL).

    Raises `NotFoundError` (no folder, no `.metadata`), `RefusedError` (foreign pickles, rank-local
    or compressed layouts, names that leave the folder) or `DamagedError` (everything that
    contradicts itself, all at once).
    """
    found = survey(path, trust=trust)
    if found.problems:
        raise (RefusedError if found.refused else DamagedError)(*found.problems)
    return found.manifest


def survey(path: str | os.PathLike[str], *, trust: bool = False) -> Survey:
    """Look at a folder without raising for what contradicts itself.

    Raises as `read_manifest` does for what cannot be understood at all.
    """
    folder = open_folder(path)
    sizes = folder.sizes()
    if METADATA not in sizes:
        raise no_metadata(folder.name, sizes)
    where = f"{folder.name.rstrip('/')}/{METADATA}"
    if sizes[METADATA] > MAX_METADATA_BYTES:
        raise RefusedError(
            Problem(code="pickle.too-large", what="over 2 GiB of metadata", where=where)
        )
    file = folder.open(METADATA)
    try:
        metadata = load_metadata(file.read(0, file.size), where=where, trust=trust)
    finally:
        file.close()
    with garbage_collection_paused():
        return _Builder(folder, sizes, metadata, where).build()


class _Builder:
    """Checks a metadata against itself and the folder, and turns it into a manifest."""

    def __init__(
        self, folder: Folder, sizes: Mapping[str, int], metadata: Metadata, where: str
    ) -> None:
        self.folder, self.sizes, self.metadata, self.where = folder, dict(sizes), metadata, where
        self.faults = Faults()
        self.unsafe: set[str] = set()
        self.tensors: dict[str, TensorEntry] = {}
        self.objects: dict[str, ObjectEntry] = {}
        self.info: dict[str, str] = {}
        self.transforms: dict[str, None] = {}
        self.ranges: dict[str, list[tuple[int, int, str]]] = {}
        self.starts: dict[str, int] = {}  # of the first tensor of each file

    def build(self) -> Survey:
        try:
            stored = self._storage()
            for key, value in self.metadata.state_dict_metadata.items():
                if type(key) is not str:
                    raise Malformed("a key that is no text")
                name = value.cls.name if type(value) is Record else ""
                if name == "TensorStorageMetadata":
                    self._tensor(key, value.state, stored)
                elif name == "BytesStorageMetadata":
                    self._object(key, stored)
                else:
                    raise Malformed(f"{key} is described by a {name or type(value).__name__}")
        except (Malformed, TypeError, AttributeError, KeyError) as error:
            what = str(error) if isinstance(error, Malformed) else "fields of the wrong kind"
            raise DamagedError(
                Problem(
                    code="dcp.metadata-form",
                    what=f"the metadata is not in the form that DCP writes: {what}",
                    where=self.where,
                    fix="use another step, or copy the file again",
                )
            ) from None
        if stored:
            for key, _ in stored:
                self.faults.add("dcp.stored-unknown", key, "its bytes are listed, the key is not")
        if self.transforms:
            raise compressed(self.transforms, self.where)
        self._place_safetensors()
        named = frozenset(self.ranges).union(item["relative_path"] for item in stored.values())
        self._check_ranges()
        readable = {key: self._readable(entry) for key, entry in self.tensors.items()}
        tensors = {key: entry for key, entry in readable.items() if entry is not None}
        objects = {k: e for k, e in self.objects.items() if self._is_sound(k, (e,))}
        none_keys = pickled_nones(self.folder, objects.values())
        for key in none_keys:
            del self.objects[key], objects[key]
        if none_keys:
            self.info["none_keys"] = "\n".join(none_keys)
        if self.metadata.version:
            self.info["version"] = self.metadata.version
        manifest = Manifest(
            path=self.folder.name,
            format="dcp",
            tensors=self.tensors,
            objects=self.objects,
            files=self.sizes,
            info=self.info,
        )
        sound = replace(manifest, tensors=tensors, objects=objects)
        problems = self.faults.problems(self.where)
        return Survey(manifest, sound, named, problems, self.faults.only_refused)

    def _is_sound(self, key: str, places: Iterable[Shard | ObjectEntry]) -> bool:
        return key not in self.faults.keys and all(p.file not in self.unsafe for p in places)

    def _readable(self, entry: TensorEntry) -> TensorEntry | None:
        """A tensor with the shards that can be read: what is wrong with one hides no other."""
        if self._is_sound(entry.key, entry.shards):
            return entry
        if SERIALIZATION in self.info:  # a shard that was not found in its part has no place
            return None
        shards = tuple(
            shard
            for shard in entry.shards
            if shard.file not in self.unsafe
            and shard.byte_offset >= 0
            and shard.byte_length >= math.prod(shard.sizes) * ITEM_SIZE[entry.dtype]
            and shard.byte_offset + shard.byte_length <= self.sizes.get(shard.file, 0)
        )
        return replace(entry, shards=shards) if shards else None

    # From the metadata

    def _storage(self) -> dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]]:
        stored: dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]] = {}
        for index, info in self.metadata.storage_data.items():
            at, item = fields(index, "MetadataIndex"), fields(info, "_StorageInfo")
            key, offset = at["fqn"], at.get("offset")
            if type(key) is not str or not (offset is None or _counts(offset)):
                raise Malformed("a stored item without a key or offset")
            name, start, length = item["relative_path"], item["offset"], item["length"]
            if type(start) is not int or type(length) is not int or type(name) is not str:
                raise Malformed(f"the place of {key} is not a file, an offset and a length")
            size = self.sizes.get(name)
            if size is None:
                size = self._look_up(name, key)
            if size >= 0 and (start < 0 or length < 0 or start + length > size):
                self.faults.add(
                    "dcp.beyond-file", key, f"bytes {start} to {start + length} of {name} ({size})"
                )
            transforms = item.get("transform_descriptors")
            if transforms:
                self.transforms.update(dict.fromkeys(map(str, transforms)))
            if stored.setdefault((key, offset), item) is not item:
                self._twice(key, offset)
        return stored

    def _twice(self, key: str, offset: tuple[int, ...] | None) -> None:
        """Ranks that hold nothing of an uneven tensor all start at its end: harmless there."""
        entry = self.metadata.state_dict_metadata.get(key)
        chunks = entry.state.get("chunks", ()) if type(entry) is Record and entry.state else ()
        empty = any(c.state["offsets"] == offset and 0 in c.state["sizes"] for c in chunks)
        if not empty:
            self.faults.add("dcp.stored-twice", key, f"its shard at {offset} has two places")

    def _look_up(self, name: str, key: str) -> int:
        """The size of a file that a listing of the folder does not show, -1 when there is none."""
        reason = self.folder.unsafe(name)
        if reason:
            raise RefusedError(
                Problem(
                    code="dcp.unsafe-name",
                    what=f"the metadata names a file that is not opened: {reason}",
                    where=self.where,
                    actual=repr(name[:200]),
                    fix="do not load this checkpoint, or copy the file into the folder",
                )
            )
        self.sizes[name] = -1
        if "/" in name:
            try:
                file = self.folder.open(name)
            except InputError:
                return -1
            self.sizes[name] = file.size
            file.close()
        return self.sizes[name]

    def _tensor(self, key: str, state: Any, stored: dict[Any, Mapping[str, Any]]) -> None:
        shape, chunks = state["size"], state["chunks"]
        properties = state["properties"].state
        dtype = properties[0] if type(properties) is tuple and properties else None
        if not _counts(shape) or type(chunks) is not list or type(dtype) is not DTypeName:
            raise Malformed(f"{key} has no shape, no shards or no dtype")
        itemsize = ITEM_SIZE[dtype.name]
        shards = []
        boxes = []
        for chunk in chunks:
            offsets, sizes = chunk.state["offsets"], chunk.state["sizes"]
            if not _counts(offsets) or not _counts(sizes):
                raise Malformed(f"{key} has a shard without offsets or sizes")
            numel = 1
            for n in sizes:
                numel *= n
            item = stored.pop((key, offsets), None)
            if item is None:
                if numel:
                    self.faults.add("dcp.not-stored", key, f"nothing holds its shard at {offsets}")
                continue
            name, start, length = item["relative_path"], item["offset"], item["length"]
            if length < numel * itemsize and "transform_descriptors" not in item:
                self.faults.add(
                    "dcp.item-too-small",
                    key,
                    f"{length} bytes for {list(sizes)} of {dtype.name}",
                )
            self.ranges.setdefault(name, []).append((start, length, key))
            self.starts.setdefault(name, start)
            if numel:
                boxes.append((offsets, sizes))
                shards.append(Shard(offsets, sizes, name, start, length))
        if len(boxes) != 1 or boxes[0][1] != shape or any(boxes[0][0]):
            reason = explain_cover(shape, boxes)
            if reason:
                self.faults.add("dcp.coverage", key, reason)
        self.tensors[key] = TensorEntry(key, shape, dtype.name, tuple(shards))

    def _object(self, key: str, stored: dict[Any, Mapping[str, Any]]) -> None:
        item = stored.pop((key, None), None)
        if item is None:
            self.faults.add("dcp.not-stored", key, "nothing holds it")
            return
        name, start, length = item["relative_path"], item["offset"], item["length"]
        if not length:
            self.faults.add("dcp.item-too-small", key, "0 bytes for an object")
        self.ranges.setdefault(name, []).append((start, length, key))
        self.objects[key] = ObjectEntry(key, name, start, length)

    # Against the files

    def _check_ranges(self) -> None:
        for name, ranges in self.ranges.items():
            if self.sizes[name] < 0:
                for _, _, key in ranges:
                    self.faults.add("dcp.file-missing", key, name)
                continue
            ranges.sort()
            end, last = 0, ""
            for start, length, key in ranges:
                if start < 0 or length <= 0 or start + length > self.sizes[name]:
                    continue  # said already
                if start < end:
                    self.faults.add("dcp.bytes-overlap", key, f"shares bytes of {name} with {last}")
                end, last = max(end, start + length), key
        for name in [name for name, size in self.sizes.items() if size < 0]:
            del self.sizes[name]
        for name in self.ranges:
            reason = self.folder.unsafe(name)
            if reason:
                self.unsafe.add(name)
                self.faults.add("dcp.unsafe-name", name, reason)

    # Data files that are safetensors

    def _place_safetensors(self) -> None:
        """Find the tensors of files that torch serialized as safetensors.

        There the metadata gives each tensor of a file the same place, that of the whole part; the
        part's own header says where each lies in it.
        """
        parts = {}
        for name, start in self.starts.items():
            if not self.folder.unsafe(name):
                part = safetensors_part(self.folder, name, start, self.sizes[name])
                if part is not None:
                    parts[name] = part
        if not parts:
            return
        self.info[SERIALIZATION] = "safetensors"
        for name in parts:
            self.ranges[name] = [row for row in self.ranges[name] if row[2] not in self.tensors]
        for key, entry in self.tensors.items():
            shards = tuple(self._placed(entry, shard, parts) for shard in entry.shards)
            self.tensors[key] = replace(entry, shards=shards)

    def _placed(self, entry: TensorEntry, shard: Shard, parts: Mapping[str, Header]) -> Shard:
        if self.sizes[shard.file] < 0:
            return shard  # missing, which is said elsewhere
        part = parts.get(shard.file)
        item = None if part is None else part.items.get(entry.key)
        if item is None or (item.dtype, item.shape) != (entry.dtype, shard.sizes):
            self.faults.add("dcp.not-stored", entry.key, f"{shard.file} has no such part of it")
            return shard
        start = self.starts[shard.file] + item.start
        self.ranges[shard.file].append((start, item.length, entry.key))
        return replace(shard, byte_offset=start, byte_length=item.length)


def _counts(value: Any) -> bool:
    """Whether a value is a tuple of sizes that make sense."""
    if type(value) is not tuple:
        return False
    wrong = [n for n in value if type(n) is not int or not 0 <= n < 2**62]
    return not wrong
