"""DCP whose data files torch serialized as safetensors (`SerializationFormat.SAFETENSORS`).

A data file then is object entries as ever, and after them one safetensors part with the rank's
tensors, so that a tensor's bytes lie bare, not in an archive of their own. Which file is of this
kind is told from its bytes; where each tensor lies becomes part of the manifest, and readers ask
`is_plain`. Imports no torch, as everything that makes manifests.
"""

from __future__ import annotations

import math

from torchtitan_ckpt.errors import DamagedError
from torchtitan_ckpt.formats.folders import Folder
from torchtitan_ckpt.formats.hf_header import Header, parse_header
from torchtitan_ckpt.formats.hf_problems import HEADER_LIMIT, LENGTH_BYTES, bad_length
from torchtitan_ckpt.formats.torch_zip import Payload
from torchtitan_ckpt.manifest import Manifest, Shard

SERIALIZATION = "serialization"  # in Manifest.info


def is_plain(manifest: Manifest) -> bool:
    """Whether the items of a DCP's tensors are their bytes and nothing else."""
    return manifest.info.get(SERIALIZATION) == "safetensors"


def plain_payload(shard: Shard, dtype: str) -> Payload:
    """Where the elements lie in an item that is nothing else."""
    strides = tuple(math.prod(shard.sizes[dim:]) for dim in range(1, len(shard.sizes) + 1))
    return Payload(dtype, shard.sizes, strides, 0, 0, shard.byte_length, 0)


def safetensors_part(folder: Folder, name: str, start: int, size: int) -> Header | None:
    """The header of the safetensors part that begins at `start` of a file of `size` bytes; its
    places count from `start`. None where there are items as torch.save writes them."""
    first = LENGTH_BYTES + 1
    if start < 0 or start + first > size:
        return None
    file = folder.open(name)
    try:
        head = file.read(start, first)
        if head.startswith(b"PK") or not head.endswith(b"{"):
            return None
        length = int.from_bytes(head[:LENGTH_BYTES], "little")
        where = f"{folder.name.rstrip('/')}/{name}"
        if length > HEADER_LIMIT or start + LENGTH_BYTES + length > size:
            raise DamagedError(bad_length(where, length, size - start))
        return parse_header(file.read(start + LENGTH_BYTES, length), where, size - start)
    finally:
        file.close()
