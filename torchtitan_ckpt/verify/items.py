"""The runs of bytes that a checkpoint consists of, each with what is known of it: the key and dtype
of what lies there, and the checksum that goes with it. From manifests and sidecars; reads no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchtitan_ckpt.formats.dcp_checksums import FileDigest
from torchtitan_ckpt.formats.torch_file import OpenedFile
from torchtitan_ckpt.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of a file. `key` is empty for what is only summed; `element` is that of a large
    tensor's first element here."""

    file: str
    start: int
    length: int
    key: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    digest: str = ""
    crc: int = 0
    element: int = 0


def hf_items(manifest: Manifest) -> Iterator[Item]:
    for key, entry in manifest.tensors.items():
        for shard in entry.shards:
            yield Item(shard.file, shard.byte_offset, shard.byte_length, key, entry.dtype)


def torch_items(manifest: Manifest, trust: bool) -> Iterator[Item]:
    with OpenedFile(manifest.path) as opened:
        opened.manifest(trust=trust)
        seen = set()
        for key, payload in opened.payloads.items():
            if (payload.start, payload.dtype) in seen or not payload.nbytes:
                continue  # a second view of a storage
            seen.add((payload.start, payload.dtype))
            yield Item(
                opened.name, payload.start, payload.nbytes, key, payload.dtype, crc=payload.crc
            )


def dcp_items(manifest: Manifest, sums: Mapping[str, FileDigest]) -> Iterator[Item]:
    digests = {
        (name, at, length): digest
        for name, file in sums.items()
        if tiled(file) and name in manifest.files
        for at, length, digest in file.items
    }
    items = [
        Item(
            shard.file,
            shard.byte_offset,
            shard.byte_length,
            key,
            entry.dtype,
            shard.sizes,
            digests.pop((shard.file, shard.byte_offset, shard.byte_length), ""),
        )
        for key, entry in manifest.tensors.items()
        for shard in entry.shards
    ]
    items += [Item(name, at, n, digest=digest) for (name, at, n), digest in digests.items() if n]
    yield from sorted(items, key=lambda item: (item.file, item.start))


def tiled(digest: FileDigest) -> bool:
    """Whether the items of a file cover all of it, so that their sums say all."""
    at = 0
    for start, length, _ in digest.items:
        if start != at:
            return False
        at += length
    return at == digest.nbytes and at > 0
