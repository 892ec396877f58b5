"""Read every byte of a checkpoint once, in bounded windows on several threads: checksums where
there are any, and what the values look like. Says what it found; structure is `verify`'s.

A DCP item is compared with its xxh3 in the sidecar, else with the checksum its archive keeps; the
same pass looks at the values. Safetensors files keep no checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock, local

import xxhash

from torchtitan_ckpt.errors import CheckpointError, Problem
from torchtitan_ckpt.formats import dcp
from torchtitan_ckpt.formats.crc import crc32
from torchtitan_ckpt.formats.dcp_checksums import CHECKSUMS, FileDigest
from torchtitan_ckpt.formats.dcp_layout import Layouts, crc_differs, tensor_of
from torchtitan_ckpt.formats.dcp_objects import read_objects
from torchtitan_ckpt.formats.dcp_plain import is_plain
from torchtitan_ckpt.formats.dcp_problems import item_differs
from torchtitan_ckpt.formats.folders import File, Folder, open_folder
from torchtitan_ckpt.formats.torch_zip import Archive, Payload
from torchtitan_ckpt.manifest import ITEM_SIZE, Manifest
from torchtitan_ckpt.scan import Stats, Values
from torchtitan_ckpt.verify.items import Item, dcp_items, hf_items, tiled, torch_items

WINDOW = 2**19  # stays in a core's cache between the reading and the looking
_SMALL = 2**18  # items up to this size are read together
_BATCH = 2**20
_STRETCH = 64 * 2**20  # bytes of one job where nothing has to be summed in order
_ENDS = 4096


@dataclass(slots=True)
class Deep:
    """What reading everything found. `values` are by key; `bytes_read` counts each byte once."""

    values: dict[str, Values] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bytes_read: int = 0
    summed: int = 0
    checksums: str = "none"


class _Reader:
    """Open files, a buffer a thread, and the results; a job is a call of `small` or `large`."""

    def __init__(self, folder: Folder, stats: bool, progress: Callable[[int], None] | None) -> None:
        self.folder, self.stats, self.progress = folder, stats, progress
        self.deep = Deep()
        self.layouts = Layouts()
        self._files: dict[str, File] = {}
        self._lock = Lock()
        self._local = local()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def file(self, name: str) -> File:
        with self._lock:
            if name not in self._files:
                self._files[name] = self.folder.open(name)
            return self._files[name]

    def buffer(self, length: int) -> memoryview:
        size = max(length, WINDOW)
        buffer: bytearray | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = bytearray(size)
        return memoryview(buffer)[:length]

    def values(self, dtype: str) -> Values:
        return Values(dtype, stats=Stats() if self.stats else None)

    def done(self, found: Iterable[tuple[str, Values]], nbytes: int, summed: int = 0) -> None:
        with self._lock:
            for key, values in found:
                known = self.deep.values.get(key)
                if known is None:
                    self.deep.values[key] = values
                else:
                    known.merge(values)
            self.deep.bytes_read += nbytes
            self.deep.summed += summed
        if self.progress is not None:
            self.progress(nbytes)

    def fault(self, *problems: Problem) -> None:
        with self._lock:
            self.deep.problems += problems

    # Jobs

    def plain(self, items: list[Item]) -> None:
        """Neighbouring ranges of plain tensor bytes, read together."""
        start = items[0].start
        data = self.buffer(items[-1].start + items[-1].length - start)
        self.file(items[0].file).read_into(start, data)
        found = []
        summed = 0
        for item in items:
            values = self.values(item.dtype)
            part = data[item.start - start : item.start - start + item.length]
            if item.crc:
                summed += item.length
                if crc32(part) != item.crc:
                    self.fault(self._differs(item))
            values.add(part, item.element)
            found.append((item.key, values))
        self.done(found, len(data), summed)

    def stream(self, item: Item) -> None:
        """A long range of plain tensor bytes."""
        values, crc = self._stream(self.file(item.file), item, item.start, item.length, item.crc)
        if item.crc and crc != item.crc:
            self.fault(self._differs(item))
        self.done([(item.key, values)], item.length, item.length if item.crc else 0)

    def small(self, items: list[Item]) -> None:
        """Neighbouring DCP items, read together."""
        start = items[0].start
        data = bytearray(items[-1].start + items[-1].length - start)
        self.file(items[0].file).read_into(start, memoryview(data))
        found = []
        summed = 0
        for item in items:
            at = item.start - start
            if item.digest:
                summed += item.length
                whole = memoryview(data)[at : at + item.length]
                if xxhash.xxh3_128_hexdigest(whole) != item.digest:
                    self.fault(self._differs(item))
                    continue
            if not item.key:
                continue
            try:
                with self._lock:
                    payload = self.layouts.find(data, at, item.length, self._where(item))
                self._check(item, payload)
            except CheckpointError as error:
                self.fault(*error.problems)
                continue
            if not item.digest:
                summed += item.length
                if crc_differs(data, at, payload):
                    self.fault(self._differs(item))
            values = self.values(item.dtype)
            first = at + payload.start
            values.add(memoryview(data)[first : first + payload.nbytes])
            found.append((item.key, values))
        self.done(found, len(data), summed)

    def large(self, item: Item) -> None:
        """One DCP item: its archive's ends first, then its bytes in order."""
        file = self.file(item.file)
        head = file.read(item.start, min(_ENDS, item.length))
        tail_at = max(item.length - _ENDS, 0)
        tail = file.read(item.start + tail_at, item.length - tail_at)
        payload = None
        if item.key:

            def read(offset: int, count: int) -> bytes:
                if offset + count <= len(head):
                    return head[offset : offset + count]
                if offset >= tail_at:
                    return tail[offset - tail_at :][:count]
                return file.read(item.start + offset, min(count, item.length - offset))

            try:
                _, payload = tensor_of(Archive(read, item.length, where=self._where(item)))
                self._check(item, payload)
            except CheckpointError as error:
                if not item.digest:
                    raise
                self.fault(*error.problems)
                payload = None
        digest = xxhash.xxh3_128() if item.digest else None
        if payload is None:
            self._sum(file, item.start, item.length, digest)
            found: list[tuple[str, Values]] = []
        else:
            start, end = payload.start, payload.start + payload.nbytes
            self._sum(file, item.start, start, digest)
            kept = 0 if digest else payload.crc
            values, crc = self._stream(file, item, item.start + start, payload.nbytes, kept, digest)
            if kept and crc != kept:
                self.fault(self._differs(item))
            self._sum(file, item.start + end, item.length - end, digest)
            found = [(item.key, values)]
        if digest is not None and digest.hexdigest() != item.digest:
            self.fault(self._differs(item))
        self.done(found, item.length, item.length)

    def _stream(
        self,
        file: File,
        item: Item,
        start: int,
        length: int,
        crc: int = 0,
        digest: xxhash.xxh3_128 | None = None,
    ) -> tuple[Values, int]:
        values = self.values(item.dtype)
        width = ITEM_SIZE[item.dtype]
        total = 0
        buffer = self.buffer(WINDOW)
        for at in range(0, length, WINDOW):
            part = buffer[: min(WINDOW, length - at)]
            file.read_into(start + at, part)
            if crc:
                total = crc32(part, total)
            if digest is not None:
                digest.update(part)
            values.add(part, item.element + at // width)
        return values, total

    def _sum(self, file: File, start: int, length: int, digest: xxhash.xxh3_128 | None) -> None:
        if digest is None:
            return
        buffer = self.buffer(WINDOW)
        for at in range(0, length, WINDOW):
            part = buffer[: min(WINDOW, length - at)]
            file.read_into(start + at, part)
            digest.update(part)

    def _check(self, item: Item, payload: Payload) -> None:
        if payload.dtype != item.dtype or payload.size != item.shape:
            expected = (item.shape, item.dtype)
            raise item_differs(self._where(item), expected, (payload.size, payload.dtype))

    def _differs(self, item: Item) -> Problem:
        return Problem(
            code="checksum.differs",
            what="bytes are not what was written",
            where=self._where(item),
            actual=f"bytes {item.start} to {item.start + item.length}",
            expected="xxh3 of the sidecar" if item.digest else "CRC-32 of its archive",
            cause="overwritten bytes, a bad disk or a bad copy",
            fix="copy the file again, or use another step",
        )

    def _where(self, item: Item) -> str:
        name = f"{self.folder.name.rstrip('/')}/{item.file}"
        return f"{name}: {item.key}" if item.key else name


def read_deep(
    manifest: Manifest,
    *,
    stats: bool = False,
    threads: int | None = None,
    trust: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Deep:
    """Read all data of a checkpoint. `progress` is told bytes, from several threads."""
    root = manifest.path
    if manifest.format == "torch" or os.path.isfile(root):
        root = os.path.dirname(root) or "."
    reader = _Reader(open_folder(root), stats, progress)
    jobs: Iterable[Callable[[], None]]
    try:
        if manifest.format == "dcp" and not is_plain(manifest):
            jobs = _dcp_jobs(reader, manifest)
        elif manifest.format == "torch":
            reader.deep.checksums = "CRC-32 of the archive"
            jobs = _plain_jobs(reader, torch_items(manifest, trust))
        else:
            jobs = _plain_jobs(reader, hf_items(manifest))
        _run(reader, jobs, threads or min(os.cpu_count() or 1, 8))
        if manifest.format == "dcp" and manifest.objects:
            try:
                read_objects(reader.folder, manifest.objects.values(), trust=trust)
            except CheckpointError as error:
                reader.fault(*error.problems)
    finally:
        reader.close()
    return reader.deep


def _run(reader: _Reader, jobs: Iterable[Callable[[], None]], threads: int) -> None:
    """Run the jobs on threads; few wait at a time, so that memory is not that of all."""
    waiting: set[Future[None]] = set()
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        for job in chain(jobs, (None,)):
            limit = 0 if job is None else 4 * threads
            while len(waiting) > limit:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    try:
                        future.result()
                    except CheckpointError as error:
                        reader.fault(*error.problems)
            if job is not None:
                waiting.add(pool.submit(job))


# What there is to do


def _plain_jobs(reader: _Reader, items: Iterable[Item]) -> Iterator[Callable[[], None]]:
    batch: list[Item] = []
    size = 0

    def flush() -> Iterator[Callable[[], None]]:
        nonlocal batch, size
        if batch:
            yield lambda group=batch: reader.plain(group)  # type: ignore[misc]
        batch, size = [], 0

    for item in sorted(items, key=lambda i: (i.file, i.start)):
        if not item.length:
            continue
        if item.length > WINDOW:
            yield from flush()
            step = item.length if item.crc else _STRETCH
            width = ITEM_SIZE[item.dtype]
            for at in range(0, item.length, step):
                part = Item(
                    item.file,
                    item.start + at,
                    min(step, item.length - at),
                    item.key,
                    item.dtype,
                    crc=item.crc,
                    element=at // width,
                )
                yield lambda part=part: reader.stream(part)  # type: ignore[misc]
            continue
        end = batch[-1].start + batch[-1].length if batch else 0
        apart = batch and (item.file != batch[0].file or not 0 <= item.start - end <= _ENDS)
        if apart or size + item.length > WINDOW:
            yield from flush()
        batch.append(item)
        size = item.start + item.length - batch[0].start
    yield from flush()


def _dcp_jobs(reader: _Reader, manifest: Manifest) -> Iterator[Callable[[], None]]:
    sums = dcp.read_checksums(manifest.path)
    reader.deep.checksums = "CRC-32 of each item" if sums is None else f"xxh3 in {CHECKSUMS}"
    for name in sorted(set(manifest.files) | set(sums or ())):
        digest = None if sums is None else sums.get(name)
        if sums is not None and digest is None and name.endswith(".distcp"):
            reader.fault(_unsummed(manifest, name))
        if digest is not None and (not tiled(digest) or digest.nbytes != manifest.files.get(name)):
            yield lambda d=digest: _whole(reader, d)  # type: ignore[misc]
    small: list[Item] = []
    for item in dcp_items(manifest, sums or {}):
        if item.length > _SMALL:
            yield lambda item=item: reader.large(item)  # type: ignore[misc]
            continue
        if small and (
            item.file != small[0].file
            or item.start + item.length - small[0].start > _BATCH
            or item.start > small[-1].start + small[-1].length + _ENDS
        ):
            yield lambda group=small: reader.small(group)  # type: ignore[misc]
            small = []
        small.append(item)
    if small:
        yield lambda group=small: reader.small(group)  # type: ignore[misc]


def _whole(reader: _Reader, digest: FileDigest) -> None:
    where = f"{reader.folder.name.rstrip('/')}/{digest.file}"
    file = reader.file(digest.file)
    reader.fault(*dcp.check_file(file, digest, where=where))
    reader.done([], 0, digest.nbytes)


def _unsummed(manifest: Manifest, name: str) -> Problem:
    return Problem(
        code="checksum.no-line",
        what="the checksums have no line for a data file",
        where=f"{manifest.path.rstrip('/')}/{name}",
        cause="a file that was written again, or added, after the save",
        fix="compare it with the job's other steps before you load it",
    )
