"""Read tensors of a DCP box by box, for tools that stream; nothing is kept but open files.

`dcp_load.load` fills a model in one go; this fills any tensor with any box of a stored one, in any
order and from several threads, reading only the bytes that the box needs.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch

from torchtitan_ckpt.errors import DamagedError, NotFoundError, Problem, nearest
from torchtitan_ckpt.formats.box_reads import copy_box, read_tasks
from torchtitan_ckpt.formats.dcp_layout import Layouts, crc_differs, tensor_of
from torchtitan_ckpt.formats.dcp_manifest import read_manifest
from torchtitan_ckpt.formats.dcp_objects import read_objects
from torchtitan_ckpt.formats.dcp_plain import is_plain, plain_payload
from torchtitan_ckpt.formats.dcp_plan import Job
from torchtitan_ckpt.formats.dcp_problems import item_differs
from torchtitan_ckpt.formats.folders import File, open_folder
from torchtitan_ckpt.formats.hf_boxes import intersect
from torchtitan_ckpt.formats.torch_zip import Archive, Payload
from torchtitan_ckpt.manifest import Manifest, Shard

_SMALL = 2**20  # items up to this size are read whole
_ENDS = 4096
_KEPT = 4096  # payloads remembered


class DcpReader:
    """An open DCP. Use it as a context to close its files.

    Without `ahead` nothing is read beyond what is asked for: in a file that is still being written
    that would bring in what is not there yet.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        manifest: Manifest | None = None,
        trust: bool = False,
        ahead: bool = True,
    ) -> None:
        self.manifest = read_manifest(path, trust=trust) if manifest is None else manifest
        self._plain = is_plain(self.manifest)
        self._folder = open_folder(path)
        self._trust, self._ahead = trust, ahead
        self._files: dict[str, File] = {}
        self._lock = threading.Lock()
        self._layouts = Layouts()
        self._payloads: OrderedDict[tuple[str, int], Payload] = OrderedDict()

    def fill(self, key: str, offsets: tuple[int, ...], out: torch.Tensor) -> None:
        """Fill a plain CPU tensor, casting to its dtype, with the box that begins at `offsets`."""
        entry = self.manifest.tensors.get(key)
        if entry is None:
            raise NotFoundError(
                Problem(
                    code="dcp.no-key",
                    what=f"the checkpoint has no tensor {key!r}",
                    where=self.manifest.path,
                    actual=f"nearest: {nearest(key, self.manifest.tensors)}",
                )
            )
        box = (offsets, tuple(out.shape))
        for shard in entry.shards:
            common = intersect(box, (shard.offsets, shard.sizes))
            if common is None:
                continue
            at, sizes = common
            places = zip(at, sizes, offsets, strict=True)
            target = out[tuple(slice(a - o, a - o + n) for a, n, o in places)]
            inside = tuple(a - o for a, o in zip(at, shard.offsets, strict=True))
            with torch.no_grad():
                self._fill(Job(key, entry.dtype, shard, inside, sizes, target))

    def read(
        self,
        key: str,
        offsets: tuple[int, ...] | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A tensor, or a box of it, in its stored dtype."""
        entry = self.manifest.tensors[key]
        at = (0,) * len(entry.shape) if offsets is None else offsets
        shape = entry.shape if sizes is None else sizes
        out = torch.empty(shape, dtype=getattr(torch, entry.dtype))
        self.fill(key, at, out)
        return out

    def objects(self, keys: Iterable[str]) -> Mapping[str, Any]:
        """The values of these object entries, through the allow-list."""
        wanted = [self.manifest.objects[key] for key in keys]
        return read_objects(self._folder, wanted, trust=self._trust)

    def object_bytes(self, key: str) -> bytes:
        """The stored form of an object, unread."""
        entry = self.manifest.objects[key]
        return self._file(entry.file).read(entry.byte_offset, entry.byte_length)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> DcpReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _file(self, name: str) -> File:
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = self._folder.open(name, ahead=self._ahead)
            return file

    def _fill(self, job: Job) -> None:
        shard = job.shard
        file = self._file(shard.file)
        if self._plain or shard.byte_length > _SMALL:
            payload = (
                plain_payload(job.shard, job.dtype) if self._plain else self._payload(file, job)
            )
            for task in read_tasks(file, shard.byte_offset, payload, job):
                task()
            return
        data = bytearray(shard.byte_length)
        file.read_into(shard.byte_offset, memoryview(data))
        with self._lock:
            payload = self._layouts.find(data, 0, len(data), self._where(job))
        self._check(job, payload)
        if crc_differs(data, 0, payload):
            raise DamagedError(
                Problem(
                    code="dcp.checksum",
                    what="the data of an item does not fit the checksum beside it",
                    where=self._where(job),
                    cause="overwritten bytes, a bad disk or a bad copy",
                    fix="copy the file again, or use another step",
                )
            )
        copy_box(data, 0, payload, job)

    def _payload(self, file: File, job: Job) -> Payload:
        """Where the payload of a large item lies, from bytes at its two ends."""
        shard: Shard = job.shard
        slot = (shard.file, shard.byte_offset)
        with self._lock:
            known = self._payloads.get(slot)
        if known is not None:
            return known
        base, length = shard.byte_offset, shard.byte_length
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
        with self._lock:
            self._payloads[slot] = payload
            if len(self._payloads) > _KEPT:
                self._payloads.popitem(last=False)
        return payload

    def _check(self, job: Job, payload: Payload) -> None:
        if payload.dtype != job.dtype or payload.size != job.shard.sizes:
            expected = (job.shard.sizes, job.dtype)
            raise item_differs(self._where(job), expected, (payload.size, payload.dtype))

    def _where(self, job: Job) -> str:
        return f"{self._folder.name.rstrip('/')}/{job.shard.file}: {job.key}"


__all__ = ["DcpReader"]
