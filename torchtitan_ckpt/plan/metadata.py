"""How long `.metadata` will be: one pickle of every key, chunk and stored item, on one rank.

Counted, not made: a pickle of 128 ranks' items takes a gigabyte of objects. What each part takes
beside its names and numbers is measured on small real pickles, so that it is that of the installed
torch. Exact but for a few bytes in ten thousand (where pickle cuts its frames), and without the
names of the folder that it is saved in.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from pathlib import PurePosixPath
from typing import Any

from torchtitan_ckpt.plan.items import integer_bytes
from torchtitan_ckpt.plan.write import Kind, Written

# Names that occur again are references: to the 257th object and later ones they take five bytes.
_REFERENCE = 5
# A dict is written a thousand entries at a time, a pickle in frames of 64 KiB with a head each.
_BATCH, _BATCH_BYTES = 1000, 2
_FRAME, _FRAME_BYTES = 65_560, 9


def metadata_bytes(plan: Written) -> int:
    """The length of the `.metadata` that a planned save ends with."""
    parts = _parts()
    total = parts["empty"]
    chunks = {id(kind): _chunk_bytes(kind, parts["chunk"]) for kind in plan.kinds}
    positions = _Positions(plan)
    items = 0
    for entry, kind, owners in zip(plan.entries, plan.kinds, plan.owners, strict=True):
        name = _text(entry.key)
        total += _planner_bytes(name, kind, owners)
        if entry.is_tensor:
            total += parts["tensor"] + name + _numbers(entry.shape) + chunks[id(kind)]
            total += len(owners) * (parts["stored tensor"] + name)
            total += sum(_numbers(offsets) for offsets, _ in kind.boxes)
            total += sum(map(integer_bytes, range(len(owners))))
        else:
            total += parts["object"] + name + len(owners) * (parts["stored object"] + name)
        total += positions.bytes_of(kind, owners, entry.is_tensor)
        items += len(owners)
    total += positions.names
    # The dict of keys, that of the planner's names, and that of the stored items.
    batches = 2 * -(-len(plan.entries) // _BATCH) + -(-items // _BATCH)
    total += batches * _BATCH_BYTES
    return total + -(-total // _FRAME) * _FRAME_BYTES


class _Positions:
    """Where each item will lie in its rank's file: objects first, each kind in order."""

    def __init__(self, plan: Written) -> None:
        ranks = range(plan.degrees.world_size)
        self._object = [0 for _ in ranks]
        self._tensor = [0 for _ in ranks]
        for entry, kind, owners in zip(plan.entries, plan.kinds, plan.owners, strict=True):
            if not entry.is_tensor:
                for owner in owners:
                    self._tensor[owner] += kind.stored[0]
        # The file's name stands with its first item, and is a reference from then on.
        self.names = sum(
            _text(f"__{writer.rank}_0.distcp") - _REFERENCE
            for writer in plan.writers
            if writer.items
        )

    def bytes_of(self, kind: Kind, owners: Sequence[int], tensor: bool) -> int:
        total = 0
        places = self._tensor if tensor else self._object
        for owner, stored in zip(owners, kind.stored, strict=True):
            total += integer_bytes(places[owner]) + integer_bytes(stored)
            places[owner] += stored
        return total


def _planner_bytes(name: int, kind: Kind, owners: Sequence[int]) -> int:
    """The planner's record of a key: twice its name, unless it came from a rank met before.

    The key is the last holder's, its value the first holder's; the first owner's was met already.
    """
    first, last, met = min(kind.chunk_of), max(kind.chunk_of), min(owners)
    key = _REFERENCE if last == met else name
    value = _REFERENCE if first in (met, last) else name
    return key + value + 2


def _chunk_bytes(kind: Kind, each: int) -> int:
    listed = min(len(kind.boxes), 2)  # one is appended to its list, more are marked and appended
    numbers = sum(_numbers(offsets) + _numbers(sizes) for offsets, sizes in kind.boxes)
    return listed + len(kind.boxes) * each + numbers


def _text(name: str) -> int:
    length = len(name.encode())
    return length + (3 if length < 256 else 6)


@lru_cache(maxsize=1 << 16)
def _numbers(shape: tuple[int, ...]) -> int:
    """A shape, beyond what an empty one takes."""
    more = 1 if len(shape) in (1, 2, 3) else 2 if shape else 0
    return sum(map(integer_bytes, shape)) + more


@lru_cache(maxsize=1)
def _parts() -> dict[str, int]:
    """What each part takes without its names and numbers, from real pickles of this torch."""
    plain = _pickled()
    name, number = _text("000"), integer_bytes(0)
    frames = -(-plain // _FRAME) * _FRAME_BYTES
    parts: dict[str, int] = {
        "tensor": _pickled(tensors=41) - plain - name,
        "chunk": (_pickled(chunks=120) - _pickled(chunks=80)) // 40,
        "object": _pickled(objects=2) - plain - name,
        "stored tensor": _pickled(stored_tensors=2) - plain - name - 3 * number,
        "stored object": _pickled(stored_objects=2) - plain - name - 2 * number,
    }
    filling = 40 * (parts["tensor"] + name + parts["chunk"] + 1)
    filling += parts["object"] + parts["stored tensor"] + parts["stored object"]
    filling += 3 * name + 5 * number + 2 * _BATCH_BYTES + _text("__0_0.distcp") - _REFERENCE
    return parts | {"empty": plain - frames - filling}


def _pickled(
    tensors: int = 40,
    chunks: int = 40,
    objects: int = 1,
    stored_tensors: int = 1,
    stored_objects: int = 1,
) -> int:
    """A small `.metadata`: enough tensors that later names are far references, then the rest."""
    import torch
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    numbers = count()

    def fresh() -> str:
        return f"{next(numbers):03}"

    def chunk() -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([]), torch.Size([]))

    held: dict[str, Any] = {}
    for number in range(tensors):
        own = [chunk() for _ in range(number, chunks, tensors)]
        properties = TensorProperties(torch.float32)
        held[fresh()] = TensorStorageMetadata(properties, torch.Size([]), own)
    held |= {fresh(): BytesStorageMetadata() for _ in range(objects)}
    file = "__0_0.distcp"
    stored: dict[Any, Any] = {}
    for _ in range(stored_objects):
        stored[MetadataIndex(fresh())] = _StorageInfo(file, 0, 0)
    for _ in range(stored_tensors):
        stored[MetadataIndex(fresh(), torch.Size([]), 0)] = _StorageInfo(file, 0, 0)
    metadata = Metadata(held, planner_data={}, storage_data=stored, version=CURRENT_DCP_VERSION)
    metadata.storage_meta = StorageMeta(PurePosixPath("/"), "0" * 36)
    return len(pickle.dumps(metadata, protocol=4))
