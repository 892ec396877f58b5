"""DCP items written fast: the bytes that torch.save would write, from those it wrote before.

torch.save of a small tensor costs a quarter of a millisecond, nearly all of it for the zip archive
around the data, and archives of one shape and dtype differ only in the data and its checksum. So
the first tensor of a kind goes through torch.save, and the rest reuse that archive's bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from struct import pack
from typing import IO, cast

import torch

from torchtitan_ckpt.formats.crc import crc32
from torchtitan_ckpt.formats.dcp_layout import tensor_of
from torchtitan_ckpt.formats.tensor_bytes import memory, plain
from torchtitan_ckpt.formats.torch_zip import Archive

_SMALL = 2**20

Write = Callable[[bytes | memoryview], object]


@dataclass(frozen=True, slots=True)
class _Template:
    """An archive without its data: what comes before and after, and where its checksum stands."""

    head: bytes
    tail: bytes
    crc_at: tuple[int, ...]


class ItemWriter:
    """Writes tensors as torch.save archives. Those up to `largest` bytes reuse archives' bytes."""

    def __init__(self, largest: int = _SMALL) -> None:
        self._largest = largest
        self._templates: dict[tuple[torch.dtype, tuple[int, ...]], _Template | None] = {}

    def write(self, tensor: torch.Tensor, write: Write) -> int:
        """Hand the archive of a tensor to `write`; returns its length in bytes."""
        tensor = plain(tensor)
        size = tensor.numel() * tensor.element_size()
        if size > self._largest:
            counter = _Counter(write)
            torch.save(_alone(tensor), cast(IO[bytes], counter))
            return counter.count
        key = (tensor.dtype, tuple(tensor.shape))
        template = self._templates.get(key)
        if template is None:
            stream = io.BytesIO()
            torch.save(_alone(tensor), stream)
            data = stream.getvalue()
            if key not in self._templates:
                self._templates[key] = _template(data)
            write(data)
            return len(data)
        payload = memory(tensor)
        tail = bytearray(template.tail)
        crc = pack("<I", crc32(payload))
        for at in template.crc_at:
            tail[at : at + 4] = crc
        if size > _SMALL:
            for part in (template.head, payload, bytes(tail)):
                write(part)
        else:
            write(b"".join((template.head, payload, tail)))
        return len(template.head) + size + len(tail)


class _Counter:
    """The stream that torch.save asks for, around a function that takes bytes."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.count = 0

    def write(self, data: bytes | memoryview) -> int:
        self._write(data)
        self.count += len(data)
        return len(data)

    def flush(self) -> None:
        return None


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a storage of its own size: torch.save writes the whole storage."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone()


def _template(item: bytes) -> _Template | None:
    """The template of an archive, None when its form is not the expected one."""
    archive = Archive.of_bytes(item, where="torch.save")
    ref, payload = tensor_of(archive)
    end = payload.start + payload.nbytes
    member = archive.members[f"data/{ref.storage.key}"]
    if not payload.is_plain or not payload.nbytes or item[end : end + 4] != b"PK\x07\x08":
        return None
    return _Template(
        head=item[: payload.start], tail=item[end:], crc_at=(4, member.entry + 16 - end)
    )
