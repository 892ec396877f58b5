"""Archives as torch.save writes them: where each entry lies, and what the tensors in it are.

A DCP item and a `.pt` file are both such archives: uncompressed zip files with a `data.pkl` that
describes tensors and entries `data/<n>` that hold their bytes. Only the central directory, the
local headers and `data.pkl` are read here. What the directory says is checked against the headers
and against the size of the archive before anything is believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import error as StructError
from struct import unpack_from
from typing import Any

from torchtitan_ckpt.errors import DamagedError, Problem, RefusedError
from torchtitan_ckpt.formats.crc import crc32
from torchtitan_ckpt.formats.pickles import TensorRef, load_values
from torchtitan_ckpt.manifest import ITEM_SIZE

Read = Callable[[int, int], bytes]

_MAX_MEMBERS = 4_000_000
_END = b"PK\x05\x06"
_END64 = b"PK\x06\x06"
_LOCATOR64 = b"PK\x06\x07"
_ENTRY = b"PK\x01\x02"
_LOCAL = b"PK\x03\x04"
_DESCRIPTOR = b"PK\x07\x08"


@dataclass(frozen=True, slots=True)
class Member:
    """An entry of an archive; `header` is where its local header starts, `entry` where the
    directory speaks of it (both in bytes from the start of the archive). `crc` is 0 when its writer
    kept none; `described` says that a descriptor follows the bytes."""

    name: str
    header: int
    size: int
    crc: int
    entry: int
    described: bool


@dataclass(frozen=True, slots=True)
class Payload:
    """Where the bytes of a tensor lie in an archive, and how its elements lie in them.

    `start` and `nbytes` are those of the whole storage; `offset` and `stride` are in elements.
    """

    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    start: int
    nbytes: int
    crc: int

    @property
    def is_plain(self) -> bool:
        """Whether the storage is the tensor in row-major order and nothing else."""
        return (
            self.offset == 0
            and self.is_row_major
            and math.prod(self.size) * ITEM_SIZE[self.dtype] == self.nbytes
        )

    @property
    def is_row_major(self) -> bool:
        """Whether the elements lie in row-major order without gaps, from `offset` on."""
        expected = 1
        for n, s in zip(reversed(self.size), reversed(self.stride), strict=True):
            if n != 1 and s != expected:
                return False
            expected *= n
        return True


class Archive:
    """An archive whose directory has been read and found sound."""

    def __init__(self, read: Read, size: int, *, where: str) -> None:
        self._read, self._size, self.where = read, size, where
        try:
            self.members = self._directory()
        except (StructError, IndexError, UnicodeDecodeError):
            raise self.damaged("its directory is cut or overwritten") from None

    @classmethod
    def of_bytes(cls, data: bytes | bytearray | memoryview, *, where: str) -> Archive:
        view = memoryview(data)
        return cls(lambda offset, n: bytes(view[offset : offset + n]), len(view), where=where)

    def damaged(self, what: str) -> DamagedError:
        return DamagedError(
            Problem(
                code="zip.damaged",
                what=f"not a sound torch.save archive: {what}",
                where=self.where,
                cause="an interrupted write or copy, or overwritten bytes",
                fix="copy the file again, or use another step",
            )
        )

    def refused(self, what: str) -> RefusedError:
        return RefusedError(
            Problem(
                code="zip.refused",
                what=f"this archive is not read: {what}",
                where=self.where,
                cause="bytes of it were overwritten, or another program than torch.save wrote it",
                fix="copy the file again, or use another checkpoint; an archive of another program "
                "has to be saved again with torch.save",
            )
        )

    # The directory

    def _directory(self) -> dict[str, Member]:
        tail_start = max(self._size - 98, 0)
        tail = self._read(tail_start, self._size - tail_start)
        if len(tail) < 22 or tail[-22:-18] != _END:
            raise self.damaged("it does not end as a zip file does")
        count, length, start = unpack_from("<HII", tail, len(tail) - 12)
        end = self._size - 22
        if len(tail) == 98 and tail[56:60] == _LOCATOR64:
            if unpack_from("<Q", tail, 64)[0] != tail_start or tail[:4] != _END64:
                raise self.damaged("its end records contradict each other")
            count, length, start = unpack_from("<QQQ", tail, 32)
            end = tail_start
        if start + length != end or count > _MAX_MEMBERS or count * 46 > length:
            raise self.damaged("its directory does not lie before its end")
        raw = self._read(start, length)
        members, position = [], 0
        for _ in range(count):
            member, position = self._entry(raw, position, start)
            members.append(member)
        if position != length:
            raise self.damaged("its directory is longer than its entries")
        return self._named(members, start)

    def _entry(self, raw: bytes, at: int, start: int) -> tuple[Member, int]:
        if raw[at : at + 4] != _ENTRY:
            raise self.damaged("its directory has a foreign entry")
        flags, method, crc, packed, size = unpack_from("<HH4xIII", raw, at + 8)
        name_size, extra_size, comment_size = unpack_from("<HHH", raw, at + 28)
        header = unpack_from("<I", raw, at + 42)[0]
        end = at + 46 + name_size + extra_size + comment_size
        if end > len(raw):
            raise IndexError
        name = raw[at + 46 : at + 46 + name_size].decode()
        if 0xFFFFFFFF in (packed, size, header):
            extra = raw[at + 46 + name_size : at + 46 + name_size + extra_size]
            size, packed, header = _wide(extra, size, packed, header)
        if flags & 1 or method or packed != size:
            raise self.refused(f"{name} is compressed or encrypted")
        return Member(name, header, size, crc, start + at, bool(flags & 8)), end

    def _named(self, members: list[Member], start: int) -> dict[str, Member]:
        roots = [m.name[: -len("data.pkl")] for m in members if m.name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise self.damaged(f"it holds {len(roots)} data.pkl")
        ordered = sorted(members, key=lambda m: m.header)
        self._next = dict(
            zip((m.header for m in ordered), [*(m.header for m in ordered[1:]), start], strict=True)
        )
        for member in ordered:
            if member.header + 30 + len(member.name) + member.size > self._next[member.header]:
                raise self.damaged("its entries overlap, or reach beyond the data")
        named = {m.name.removeprefix(roots[0]): m for m in members if m.name.startswith(roots[0])}
        if len(named) != len(members):
            raise self.damaged("it holds two entries of one name, or entries of two archives")
        return named

    # Entries

    def data_offset(self, member: Member) -> int:
        """Where the bytes of an entry start, from its local header."""
        head = self._read(member.header, 30 + len(member.name.encode()))
        if head[:4] != _LOCAL or head[30:].decode(errors="replace") != member.name:
            raise self.damaged(f"the header of {member.name} does not match the directory")
        name_size, extra_size = unpack_from("<HH", head, 26)
        start: int = member.header + 30 + name_size + extra_size
        # The bytes end where the next header starts, but for a descriptor that repeats the size:
        # a header with one wrong bit would otherwise shift the data unseen.
        end = start + member.size
        left = self._next[member.header] - end
        good = left == 0
        if member.described:
            after = self._read(end, left) if left in (16, 24) else b""
            sizes = unpack_from("<II" if left == 16 else "<QQ", after, 8) if after else ()
            good = after[:4] == _DESCRIPTOR and set(sizes) == {member.size}
        if not good:
            raise self.damaged(f"{member.name} does not end where the next entry starts")
        return start

    def member(self, name: str) -> Member:
        try:
            return self.members[name]
        except KeyError:
            raise self.damaged(f"it has no entry {name}") from None

    def read(self, name: str) -> bytes:
        """The bytes of an entry, compared with their checksum where there is one."""
        member = self.member(name)
        data = self._read(self.data_offset(member), member.size)
        if member.crc and crc32(data) != member.crc:
            raise self.damaged(f"the bytes of {member.name} do not fit their checksum")
        return data

    def payload(self, ref: TensorRef) -> Payload:
        """Where the bytes of a tensor lie."""
        member = self.member(f"data/{ref.storage.key}")
        if member.size != ref.storage.numel * ITEM_SIZE[ref.dtype]:
            raise self.damaged(
                f"{member.name} has {member.size} bytes, data.pkl speaks of "
                f"{ref.storage.numel} elements of {ref.dtype}"
            )
        start = self.data_offset(member)
        return Payload(ref.dtype, ref.size, ref.stride, ref.offset, start, member.size, member.crc)

    def describe(self, *, trust: bool = False) -> Any:
        """The archive's value with `TensorRef` in place of tensors; no tensor data is read."""
        if "byteorder" in self.members and self.read("byteorder") != b"little":
            raise self.refused("it was written on a big-endian machine")
        return load_values(
            self.read("data.pkl"), rebuild=_same, where=f"{self.where}: data.pkl", trust=trust
        )

    def load(self, *, where: str) -> Any:
        """The archive's value, tensors on the CPU; each storage is read once and shared."""
        import torch

        storages: dict[str, bytearray] = {}

        def rebuild(ref: TensorRef) -> Any:
            payload = self.payload(ref)
            dtype = getattr(torch, ref.dtype)
            if payload.nbytes == 0:
                return torch.empty(ref.size, dtype=dtype)
            if ref.storage.key not in storages:
                name = f"data/{ref.storage.key}"
                storages[ref.storage.key] = bytearray(self.read(name))
            flat = torch.frombuffer(storages[ref.storage.key], dtype=dtype)
            return flat.as_strided(ref.size, ref.stride, ref.offset)

        if "byteorder" in self.members and self.read("byteorder") != b"little":
            raise self.refused("it was written on a big-endian machine")
        return load_values(
            self.read("data.pkl"),
            rebuild=rebuild,
            where=f"{where}: data.pkl",
            dtype=lambda name: getattr(torch, name),
            make_size=torch.Size,
        )


def _same(ref: TensorRef) -> TensorRef:
    return ref


def _wide(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """The 64-bit sizes of an entry, which stand in its extra field in this order if at all."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = unpack_from("<HH", extra, at)
        if tag == 1:
            numbers: Iterator[int] = iter(unpack_from(f"<{length // 8}Q", extra, at + 4))
            try:
                size = next(numbers) if size == 0xFFFFFFFF else size
                packed = next(numbers) if packed == 0xFFFFFFFF else packed
                header = next(numbers) if header == 0xFFFFFFFF else header
            except StopIteration:
                raise IndexError from None
            return size, packed, header
        at += 4 + length
    return size, packed, header
