"""What a DCP folder holds, from `.metadata` and the sizes of its files; all that is wrong at once.

Reads no tensor data. Small object entries are looked at, because a pickled None counts as absent
(torchtitan 0.3.0 lets None through, and a later load would put it over healthy moments): such keys
are left out and named in `info["none_keys"]`, one a line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_ckpt.errors import (
    DamagedError,
    InputError,
    NotFoundError,
    Problem,
    RefusedError,
    list_keys,
)
from torchtitan_ckpt.formats.coverage import explain_cover
from torchtitan_ckpt.formats.dcp_objects import pickled_nones
from torchtitan_ckpt.formats.folders import Folder, open_folder
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
_RANK_LOCAL = re.compile(r"__[0-9]+(_[0-9]+)?\.metadata")


def read_manifest(path: str | os.PathLike[str], *, trust: bool = False) -> Manifest:
    """Describe the DCP checkpoint in the folder `path` (local, or an fsspec URL).

    Raises `NotFoundError` (no folder, no `.metadata`), `RefusedError` (foreign pickles, rank-local
    or compressed layouts, names that leave the folder) or `DamagedError` (everything that
    contradicts itself, all at once).
    """
    folder = open_folder(path)
    sizes = folder.sizes()
    if METADATA not in sizes:
        raise _no_metadata(folder.name, sizes)
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
        self.faults: dict[str, list[tuple[str, str]]] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self.objects: dict[str, ObjectEntry] = {}
        self.transforms: dict[str, None] = {}
        self.ranges: dict[str, list[tuple[int, int, str]]] = {}

    def build(self) -> Manifest:
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
                self._fault("dcp.stored-unknown", key, "its bytes are listed, the key is not")
        self._check_ranges()
        if self.transforms:
            raise self._compressed()
        self._raise_faults()
        self._check_serialization()
        none_keys = pickled_nones(self.folder, self.objects.values())
        for key in none_keys:
            del self.objects[key]
        info = {"none_keys": "\n".join(none_keys)} if none_keys else {}
        if self.metadata.version:
            info["version"] = self.metadata.version
        return Manifest(
            path=self.folder.name,
            format="dcp",
            tensors=self.tensors,
            objects=self.objects,
            files=self.sizes,
            info=info,
        )

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
            if size >= 0 and (start < 0 or length <= 0 or start + length > size):
                self._fault(
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
            self._fault("dcp.stored-twice", key, f"its shard at {offset} has two places")

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
                    self._fault("dcp.not-stored", key, f"nothing holds its shard at {offsets}")
                continue
            name, start, length = item["relative_path"], item["offset"], item["length"]
            if length < numel * itemsize and "transform_descriptors" not in item:
                self._fault(
                    "dcp.item-too-small",
                    key,
                    f"{length} bytes for {list(sizes)} of {dtype.name}",
                )
            self.ranges.setdefault(name, []).append((start, length, key))
            if numel:
                boxes.append((offsets, sizes))
                shards.append(Shard(offsets, sizes, name, start, length))
        if len(boxes) != 1 or boxes[0][1] != shape or any(boxes[0][0]):
            reason = explain_cover(shape, boxes)
            if reason:
                self._fault("dcp.coverage", key, reason)
        self.tensors[key] = TensorEntry(key, shape, dtype.name, tuple(shards))

    def _object(self, key: str, stored: dict[Any, Mapping[str, Any]]) -> None:
        item = stored.pop((key, None), None)
        if item is None:
            self._fault("dcp.not-stored", key, "nothing holds it")
            return
        name, start, length = item["relative_path"], item["offset"], item["length"]
        self.ranges.setdefault(name, []).append((start, length, key))
        self.objects[key] = ObjectEntry(key, name, start, length)

    # Against the files

    def _check_ranges(self) -> None:
        for name, ranges in self.ranges.items():
            if self.sizes[name] < 0:
                for _, _, key in ranges:
                    self._fault("dcp.file-missing", key, name)
                continue
            ranges.sort()
            end, last = 0, ""
            for start, length, key in ranges:
                if start < 0 or length <= 0 or start + length > self.sizes[name]:
                    continue  # said already
                if start < end:
                    self._fault("dcp.bytes-overlap", key, f"shares bytes of {name} with {last}")
                end, last = max(end, start + length), key
        for name in [name for name, size in self.sizes.items() if size < 0]:
            del self.sizes[name]
        for name in self.ranges:
            reason = self.folder.unsafe(name)
            if reason:
                self._fault("dcp.unsafe-name", name, reason)

    def _check_serialization(self) -> None:
        for name in {shard.file for e in self.tensors.values() for shard in e.shards[:1]}:
            file = self.folder.open(name)
            head = file.read(0, min(9, file.size))
            file.close()
            if head[:2] != b"PK" and head[8:] == b"{":
                raise RefusedError(
                    Problem(
                        code="dcp.safetensors-serialization",
                        what="a DCP whose data files are safetensors files, which is not read here",
                        where=f"{self.folder.name.rstrip('/')}/{name}",
                        cause="saved with serialization_format=SerializationFormat.SAFETENSORS",
                        fix="save again with the default serialization, or export to HF",
                    )
                )

    # Words

    def _fault(self, code: str, key: str, detail: str) -> None:
        self.faults.setdefault(code, []).append((key, detail))

    def _raise_faults(self) -> None:
        if not self.faults:
            return
        problems = []
        for code, found in self.faults.items():
            what, cause = _FAULTS[code]
            keys = list(dict.fromkeys(key for key, _ in found))
            details = list(dict.fromkeys(detail for _, detail in found))
            more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
            missing = code == "dcp.file-missing"  # one fault of many keys: told by the file
            problems.append(
                Problem(
                    code=code,
                    what=_missing(details, len(keys)) if missing else f"{what}: {list_keys(keys)}",
                    where=self.where,
                    expected=f"the bytes of {list_keys(keys)}" if missing else "",
                    actual="" if missing else details[0] + more,
                    cause=cause,
                    fix="copy the checkpoint again, or use another step",
                )
            )
        kind = RefusedError if set(self.faults) == {"dcp.unsafe-name"} else DamagedError
        raise kind(*problems)

    def _compressed(self) -> RefusedError:
        return RefusedError(
            Problem(
                code="dcp.compressed",
                what=f"its entries are transformed: {', '.join(self.transforms)}",
                where=self.where,
                expected="entries as torch.save wrote them",
                cause="saved with stream extensions of torch.distributed.checkpoint",
                fix="load it with dcp.load and the same extensions, and save it without them",
            )
        )


_FAULTS = {
    "dcp.beyond-file": ("bytes beyond the end of their file", "a file cut by a write or a copy"),
    "dcp.stored-twice": ("shards stored in two places", "metadata of two saves mixed"),
    "dcp.stored-unknown": ("bytes of keys that are not described", "metadata of two saves mixed"),
    "dcp.not-stored": ("keys or shards that no file holds", "metadata of two saves mixed"),
    "dcp.item-too-small": ("items smaller than their shard", "overwritten or invented metadata"),
    "dcp.coverage": ("tensors whose shards do not tile them", "a rank's part missing or doubled"),
    "dcp.file-missing": ("keys whose file is not in the folder", "an unfinished or partial copy"),
    "dcp.bytes-overlap": ("items that share bytes of a file", "overwritten or invented metadata"),
    "dcp.unsafe-name": ("files that are not opened", "links or invented names"),
}


def _missing(files: Sequence[str], keys: int) -> str:
    count = f"({keys} key{'s' * (keys > 1)})"
    if len(files) == 1:
        return f"file {files[0]} is missing {count}"
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"files {', '.join(files[:3])}{more} are missing {count}"


def _counts(value: Any) -> bool:
    """Whether a value is a tuple of sizes that make sense."""
    if type(value) is not tuple:
        return False
    wrong = [n for n in value if type(n) is not int or not 0 <= n < 2**62]
    return not wrong


def _no_metadata(name: str, sizes: Mapping[str, int]) -> InputError:
    local = sorted(n for n in sizes if _RANK_LOCAL.fullmatch(n))
    if local:
        return RefusedError(
            Problem(
                code="dcp.rank-local",
                what="every rank wrote its own metadata, and there is no common one",
                where=name,
                actual=", ".join(local[:4]) + (", …" if len(local) > 4 else ""),
                cause="saved with use_collectives=False",
                fix="load it with dcp.load(use_collectives=False) on as many ranks and save again",
            )
        )
    data = sum(n.endswith(".distcp") for n in sizes)
    unfinished = data or any(n.endswith(f"{METADATA}.tmp") for n in sizes)
    return NotFoundError(
        Problem(
            code="dcp.unfinished" if unfinished else "dcp.no-metadata",
            what="the folder has no .metadata",
            where=name,
            actual=f"{data} .distcp files" if unfinished else f"{len(sizes)} other files",
            cause="a save that was interrupted before its last step, or a partial copy"
            if unfinished
            else "not a DCP checkpoint",
            fix="use another step" if unfinished else "name the step folder itself",
        )
    )
