"""Checksums beside a DCP: xxh3-128 of every file and every item, in a file other readers ignore.

`.checksums.jsonl` has a line that says what it is, then one line a file, so that a file that is
written again invalidates its own line only:

    {"format": "torchtitan-ckpt checksums", "version": 1, "algorithm": "xxh3_128"}
    {"file": "__0_0.distcp", "bytes": 8211, "digest": "…", "items": [[0, 1577, "…"], …]}

Items are [offset, length, digest]. `.metadata` has a line too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from torchtitan_ckpt.errors import DamagedError, Problem
from torchtitan_ckpt.formats.folders import File, open_folder

CHECKSUMS = ".checksums.jsonl"
_HEADER = {"format": "torchtitan-ckpt checksums", "version": 1, "algorithm": "xxh3_128"}
_BLOCK = 4 * 2**20
_MAX_BYTES = 2**28  # five million items


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What one file's bytes were when it was written. `items` are (offset, length, digest)."""

    file: str
    nbytes: int
    digest: str
    items: tuple[tuple[int, int, str], ...] = ()


class Hasher:
    """Hashes a file as it is written, item by item."""

    def __init__(self) -> None:
        self._file = xxhash.xxh3_128()
        self._item = xxhash.xxh3_128()
        self._start = 0
        self.nbytes = 0
        self._items: list[tuple[int, int, str]] = []

    def update(self, data: bytes | memoryview) -> None:
        self._file.update(data)
        self._item.update(data)
        self.nbytes += len(data)

    def end_item(self) -> None:
        self._items.append((self._start, self.nbytes - self._start, self._item.hexdigest()))
        self._start = self.nbytes
        self._item.reset()

    def result(self, file: str) -> FileDigest:
        return FileDigest(file, self.nbytes, self._file.hexdigest(), tuple(self._items))


def digest_of(file: str, data: bytes) -> FileDigest:
    return FileDigest(file, len(data), xxhash.xxh3_128_hexdigest(data))


def to_text(digests: Iterable[FileDigest]) -> bytes:
    """The contents of the sidecar."""
    lines = [json.dumps(_HEADER)]
    for d in sorted(digests, key=lambda d: d.file):
        row = {"file": d.file, "bytes": d.nbytes, "digest": d.digest, "items": d.items}
        lines.append(json.dumps(row, separators=(",", ":")))
    return ("\n".join(lines) + "\n").encode()


def read_checksums(path: str | os.PathLike[str]) -> Mapping[str, FileDigest] | None:
    """The checksums of a checkpoint by file name, None when it has none.

    Raises `DamagedError` when the sidecar itself is cut or not in its form.
    """
    folder = open_folder(path)
    size = folder.sizes().get(CHECKSUMS)
    if size is None:
        return None
    where = f"{folder.name.rstrip('/')}/{CHECKSUMS}"
    if size > _MAX_BYTES:
        raise _not_ours(where, "over 1 GiB")
    file = folder.open(CHECKSUMS)
    try:
        data = file.read(0, file.size)
    finally:
        file.close()
    try:
        lines = data.decode().splitlines()
        if not lines or json.loads(lines[0]) != _HEADER:
            raise ValueError("its first line is not that of version 1")
        if not data.endswith(b"\n"):
            raise ValueError("its last line is cut")
        found = [_row(json.loads(line)) for line in lines[1:]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _not_ours(where, str(error)) from None
    return {d.file: d for d in found}


def check_file(file: File, digest: FileDigest, *, where: str) -> list[Problem]:
    """Compare a file with its checksums, in bounded memory; items name the place of a fault."""
    if file.size != digest.nbytes:
        return [
            Problem(
                code="checksum.size",
                what="the file has another size than when it was written",
                where=where,
                expected=f"{digest.nbytes} bytes",
                actual=f"{file.size} bytes",
            )
        ]
    if _hash(file, 0, file.size) == digest.digest:
        return []
    bad = [(at, n) for at, n, expected in digest.items if _hash(file, at, n) != expected]
    places = ", ".join(f"bytes {at} to {at + n}" for at, n in bad[:8])
    return [
        Problem(
            code="checksum.differs",
            what="the file is not what was written",
            where=where,
            actual=f"{len(bad)} of {len(digest.items)} items differ: {places}" if bad else "",
            cause="overwritten bytes, a bad disk or a bad copy",
            fix="copy the file again, or use another step",
        )
    ]


def _hash(file: File, offset: int, length: int) -> str:
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_BLOCK, length)))
    done = 0
    while done < length:
        part = buffer[: min(len(buffer), length - done)]
        file.read_into(offset + done, part)
        state.update(part)
        done += len(part)
    return str(state.hexdigest())


def _row(row: Any) -> FileDigest:
    items = tuple((at, n, digest) for at, n, digest in row["items"])
    numbers = [row["bytes"], *(x for at, n, _ in items for x in (at, n))]
    texts = [row["file"], row["digest"], *(digest for _, _, digest in items)]
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("a size that is no number")
    if not all(type(text) is str for text in texts):
        raise ValueError("a name or digest that is no text")
    if any(at + n > row["bytes"] for at, n, _ in items):
        raise ValueError("an item beyond its file")
    return FileDigest(row["file"], row["bytes"], row["digest"], items)


def _not_ours(where: str, reason: str) -> DamagedError:
    return DamagedError(
        Problem(
            code="checksum.sidecar",
            what=f"the checksums cannot be read: {reason}",
            where=where,
            fix="remove the file to go without checksums",
        )
    )
