"""Where the bytes of a tensor lie inside a DCP item, found fast.

Every item is a torch.save archive of one tensor. Items of one shape and dtype written by one torch
differ only in their data, its checksum and a random id, so that one full reading of an archive
serves all that match it byte for byte elsewhere. What does not match is read in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import unpack_from

from torchtitan_ckpt.errors import DamagedError, Problem
from torchtitan_ckpt.formats.crc import crc32
from torchtitan_ckpt.formats.pickles import TensorRef
from torchtitan_ckpt.formats.torch_zip import Archive, Member, Payload

_CRC_IN_ENTRY = 16
_MAX_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class _Layout:
    """What every item like one that was read in full has in common with it."""

    payload: Payload
    head: bytes
    mask: int
    rest: int


class Layouts:
    """Finds payloads and remembers the layouts it has met, by the length of the item."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Layout]] = {}

    def find(self, data: bytes | bytearray, at: int, length: int, where: str) -> Payload:
        """The payload of the item `data[at : at + length]`; offsets are relative to `at`."""
        for layout in self._known.get(length, ()):
            payload = layout.payload
            if data.startswith(layout.head, at):
                tail = data[at + payload.start + payload.nbytes : at + length]
                if int.from_bytes(tail, "little") & layout.mask == layout.rest:
                    return payload
        item = bytes(data[at : at + length])
        archive = Archive.of_bytes(item, where=where)
        ref, payload = tensor_of(archive)
        if ref.storage.numel and payload.is_plain:
            known = self._known.setdefault(length, [])
            if len(known) < _MAX_LAYOUTS:
                known.append(_layout(archive, item, f"data/{ref.storage.key}", payload))
        return payload


def tensor_of(archive: Archive) -> tuple[TensorRef, Payload]:
    """The one tensor of an archive. Raises `DamagedError` when it holds anything else."""
    ref = archive.describe()
    if not isinstance(ref, TensorRef):
        raise DamagedError(
            Problem(
                code="dcp.item-differs",
                what="an item that is no tensor, where the metadata speaks of one",
                where=archive.where,
                cause="metadata and data of two saves mixed",
            )
        )
    return ref, archive.payload(ref)


def _layout(archive: Archive, item: bytes, name: str, payload: Payload) -> _Layout:
    """The common part: all but the data, the checksums of what varies, and the random id."""
    end = payload.start + payload.nbytes
    free: list[tuple[int, int]] = [(payload.start, end)]
    varying: list[Member] = [archive.members[name]]
    if ".data/serialization_id" in archive.members:
        member = archive.members[".data/serialization_id"]
        start = archive.data_offset(member)
        free.append((start, start + member.size))
        varying.append(member)
    for member in varying:
        free.append((member.entry + _CRC_IN_ENTRY, member.entry + _CRC_IN_ENTRY + 4))
        after = archive.data_offset(member) + member.size
        if item[after : after + 4] == b"PK\x07\x08":
            free.append((after + 4, after + 8))
    mask = bytearray(b"\xff" * (len(item) - end))
    for start, stop in free:
        if start >= end:
            mask[start - end : stop - end] = bytes(stop - start)
    bits = int.from_bytes(mask, "little")
    return _Layout(
        payload=payload,
        head=item[: payload.start],
        mask=bits,
        rest=int.from_bytes(item[end:], "little") & bits,
    )


def crc_differs(data: bytes | bytearray, at: int, payload: Payload) -> bool:
    """Whether the data of the item at `at` does not fit the checksum that its archive keeps."""
    start = at + payload.start
    end = start + payload.nbytes
    if data[end : end + 4] != b"PK\x07\x08":
        return False
    kept = unpack_from("<I", data, end + 4)[0]
    return bool(kept) and kept != crc32(memoryview(data)[start:end])
