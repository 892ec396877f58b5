"""Load from a DCP into tensors in place: just the bytes that this rank needs, many at a time.

Small items are read together in windows and copied out; large ones go straight into the memory of
the target where its layout allows it, and through a bounded window where it does not. Every rank
reads alone, without collectives.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from torchtitan_ckpt.device_failures import own_error
from torchtitan_ckpt.errors import CheckpointError, DamagedError, Problem
from torchtitan_ckpt.formats.box_reads import (
    GAP,
    WINDOW,
    copy_box,
    dtype_name,
    read_tasks,
)
from torchtitan_ckpt.formats.dcp_layout import Layouts, crc_differs, tensor_of
from torchtitan_ckpt.formats.dcp_manifest import read_manifest
from torchtitan_ckpt.formats.dcp_objects import raise_all, read_objects
from torchtitan_ckpt.formats.dcp_plain import is_plain, plain_payload
from torchtitan_ckpt.formats.dcp_plan import Job, compare, plan
from torchtitan_ckpt.formats.dcp_problems import item_differs
from torchtitan_ckpt.formats.folders import File, Folder, open_folder
from torchtitan_ckpt.formats.pickle_parts import garbage_collection_paused
from torchtitan_ckpt.formats.torch_zip import Archive, Payload
from torchtitan_ckpt.manifest import Manifest

_SMALL = 2**20  # items up to this size are read together
_ENDS = 4096  # bytes read ahead at both ends of a large item, for its zip directory


def load(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    manifest: Manifest | None = None,
    trust: bool = False,
    widen: bool = False,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Fill the tensors of `state` in place and return its keys with objects read.

    `state` is flat: `torch.Tensor` and `DTensor` values (any placement) are filled, every other
    value is replaced by what the checkpoint holds under its key. Shapes and dtypes must be equal;
    `widen=True` lets a 16- or 32-bit float fill a wider one. Keys that the checkpoint has and
    `state` lacks are left alone. `threads` defaults to the number of CPUs, at most 8. `progress`
    is told the bytes read of tensors, from any thread.

    Raises `MismatchError` before anything is read, and `DamagedError` or `RefusedError` while
    reading; after these the targets are partly written.
    """
    manifest = read_manifest(path, trust=trust) if manifest is None else manifest
    compare(state, manifest, widen=widen)
    folder = open_folder(path)
    with torch.no_grad(), garbage_collection_paused():
        count = threads or min(8, os.cpu_count() or 1)
        loader = _Loader(folder, count, progress, plain=is_plain(manifest))
        loader.run(plan(state, manifest))
    wanted = [manifest.objects[key] for key in state if key in manifest.objects]
    values = read_objects(folder, wanted, trust=trust)
    return {key: values.get(key, value) for key, value in state.items()}


class _Told:
    """A file that tells how many bytes are read of it."""

    def __init__(self, file: File, progress: Callable[[int], None]) -> None:
        self.size, self._file, self._progress = file.size, file, progress

    def read(self, offset: int, length: int) -> bytes:
        data = self._file.read(offset, length)
        self._progress(len(data))
        return data

    def read_into(self, offset: int, target: memoryview) -> None:
        self._file.read_into(offset, target)
        self._progress(len(target))

    def close(self) -> None:
        self._file.close()


class _Loader:
    def __init__(
        self,
        folder: Folder,
        threads: int,
        progress: Callable[[int], None] | None = None,
        *,
        plain: bool = False,
    ) -> None:
        self.folder, self.plain = folder, plain
        self.threads = threads
        self.progress = progress
        self.layouts = Layouts()
        self.failures: list[CheckpointError] = []

    def run(self, jobs: Iterable[Job]) -> None:
        files: dict[str, list[Job]] = {}
        for job in jobs:
            files.setdefault(job.shard.file, []).append(job)
        opened: list[File] = []
        try:
            with ThreadPoolExecutor(self.threads, "dcp-load") as pool:
                for name, group in files.items():
                    file = self.folder.open(name)
                    opened.append(file)
                    if self.progress is not None:
                        file = _Told(file, self.progress)
                    group.sort(key=lambda job: job.shard.byte_offset)
                    for task in self._tasks(file, group):
                        pool.submit(self._guard, task)
        finally:
            for file in opened:
                file.close()
        raise_all(self.failures)

    def _guard(self, task: Callable[[], None]) -> None:
        try:
            with torch.no_grad():  # a setting of each thread
                task()
        except Exception as error:
            failure = own_error(error)  # a device that fails says nothing about the files
            if not isinstance(failure, CheckpointError):
                problem = Problem(code="dcp.load", what=f"{type(error).__name__}: {error}")
                failure = DamagedError(problem)
                failure.__cause__ = error
            self.failures.append(failure)

    def _tasks(self, file: File, jobs: list[Job]) -> Iterator[Callable[[], None]]:
        window: list[Job] = []
        for job in jobs:
            shard = job.shard
            if self.plain:
                yield from read_tasks(
                    file, shard.byte_offset, plain_payload(job.shard, job.dtype), job
                )
                continue
            if shard.byte_length > _SMALL:
                yield from self._large(file, job)
                continue
            if window:
                last = window[-1].shard
                gap = shard.byte_offset - last.byte_offset - last.byte_length
                span = shard.byte_offset + shard.byte_length - window[0].shard.byte_offset
                if gap > GAP or span > WINDOW:
                    yield partial(self._small, file, window)
                    window = []
            window.append(job)
        if window:
            yield partial(self._small, file, window)

    # Small items

    def _small(self, file: File, jobs: list[Job]) -> None:
        first, last = jobs[0].shard, jobs[-1].shard
        base = first.byte_offset
        data = bytearray(last.byte_offset + last.byte_length - base)
        file.read_into(base, memoryview(data))
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        for job in jobs:
            shard, target = job.shard, job.target
            at = shard.byte_offset - base
            payload = self.layouts.find(data, at, shard.byte_length, self._where(job))
            self._check(job, payload)
            if crc_differs(data, at, payload):
                raise self._flipped(job)
            if (
                job.is_whole
                and target.is_cpu
                and payload.is_plain
                and target.is_contiguous()
                and dtype_name(target.dtype) == job.dtype
            ):
                ctypes.memmove(target.data_ptr(), address + at + payload.start, payload.nbytes)
            else:
                copy_box(data, at, payload, job)

    # Large items

    def _large(self, file: File, job: Job) -> Iterator[Callable[[], None]]:
        try:
            payload = self._payload(file, job)
        except CheckpointError as error:
            self.failures.append(error)
            return
        yield from read_tasks(file, job.shard.byte_offset, payload, job)

    def _payload(self, file: File, job: Job) -> Payload:
        """The payload of a large item, from bytes at its two ends."""
        base, length = job.shard.byte_offset, job.shard.byte_length
        head = file.read(base, _ENDS)
        tail = file.read(base + length - _ENDS, _ENDS)

        def read(offset: int, count: int) -> bytes:
            if offset + count <= _ENDS:
                return head[offset : offset + count]
            if offset >= length - _ENDS:
                return tail[offset - length + _ENDS :][:count]
            return file.read(base + offset, min(count, length - offset))

        _, payload = tensor_of(Archive(read, length, where=self._where(job)))
        self._check(job, payload)
        return payload

    def _where(self, job: Job) -> str:
        return f"{self.folder.name.rstrip('/')}/{job.shard.file}: {job.key}"

    def _flipped(self, job: Job) -> DamagedError:
        return DamagedError(
            Problem(
                code="dcp.checksum",
                what="the data of an item does not fit the checksum beside it",
                where=self._where(job),
                cause="overwritten bytes, a bad disk or a bad copy",
                fix="copy the file again, or use another step",
            )
        )

    def _check(self, job: Job, payload: Payload) -> None:
        if payload.dtype != job.dtype or payload.size != job.shard.sizes:
            expected = (job.shard.sizes, job.dtype)
            raise item_differs(self._where(job), expected, (payload.size, payload.dtype))
