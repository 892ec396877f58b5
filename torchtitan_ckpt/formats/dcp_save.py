"""Save a flat dict as a DCP: torch plans and names, the items are written here, the marker last.

Layout and metadata are those of `torch.distributed.checkpoint.save`; what differs is speed for many
small tensors, checksums when asked for, and that a failure is one `SaveError` with its first cause.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from collections.abc import Callable
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_ckpt.device_failures import lost_rank
from torchtitan_ckpt.errors import CheckpointError, Problem, SaveError
from torchtitan_ckpt.formats.dcp_checksums import CHECKSUMS, FileDigest, Hasher, digest_of, to_text
from torchtitan_ckpt.formats.dcp_items import ItemWriter
from torchtitan_ckpt.formats.dcp_manifest import METADATA
from torchtitan_ckpt.formats.dcp_save_plan import FlatSavePlanner
from torchtitan_ckpt.formats.folders import is_url
from torchtitan_ckpt.formats.pickle_parts import garbage_collection_paused
from torchtitan_ckpt.refusals import meaning_of


def save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    sync_files: bool = True,
    drop_page_cache: bool = False,
    checksums: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a flat dict of tensors, DTensors and plain objects into the folder `path`.

    Every rank of `process_group` calls this with its own parts; without a process group one process
    writes all. A value that is None is left out; any other value that is no tensor (dicts and lists
    too) is one entry under its own key. `path` may be an fsspec URL, given as a string. A
    `.metadata` that lies there already is removed first, the new one appears last.

    `sync_files` waits until the bytes are on disk; `drop_page_cache` then gives their memory back;
    `checksums` adds a sidecar (dcp_checksums.py); `progress` is told the bytes that this rank has
    written. Raises `SaveError`, on every rank.
    """
    state = {key: value for key, value in state_dict.items() if value is not None}
    writer: _Writer
    if is_url(path):
        writer = _remote_writer(str(path), checksums)
    else:
        writer = _LocalWriter(path, sync_files, drop_page_cache, checksums)
    writer.progress = progress
    distributed = dist.is_available() and dist.is_initialized()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
    try:
        with garbage_collection_paused():
            dcp_save(
                {},
                storage_writer=writer,
                planner=FlatSavePlanner(state),
                process_group=process_group,
                no_dist=not distributed,
            )
    except CheckpointException as failure:
        mine = failure.failures.get(dist.get_rank(process_group) if distributed else 0)
        if mine is not None and not isinstance(mine[0], Exception):
            raise mine[0] from None  # Ctrl-C is no failure that a job may go on after
        rank, cause = _first_cause(failure)
        raise _save_error(cause, str(path), rank, len(failure.failures)) from cause
    except CheckpointError:
        raise
    except RuntimeError as error:
        if distributed:  # what a rank did alone would have come in a CheckpointException
            raise lost_rank(error, str(path)) from error
        raise _save_error(error, str(path), None, 1) from error
    except Exception as error:
        raise _save_error(error, str(path), None, 1) from error


class _Writer(FileSystemWriter):
    """torch's writer with the writing of files replaced; planning and names are unchanged."""

    drop_page_cache = False
    checksums = False
    progress: Callable[[int], None] | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            # No rank writes before all have planned, so nothing is overwritten while the old
            # marker still calls it valid.
            self.fs.mkdir(self.path)
            for name in (METADATA, CHECKSUMS):
                stale = self.fs.concat_path(self.path, name)
                if self.fs.exists(stale):
                    self.fs.rm_file(stale)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return self._write_items(plan, planner)
        except BaseException as error:
            raise _beneath(error) from None

    def _write_items(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        if not plan.items:
            future.set_result([])
            return future
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results: list[WriteResult] = []
        hasher = Hasher() if self.checksums else None
        items = ItemWriter()
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as raw:
            stream = cast(IO[bytes], raw)
            position = 0

            def write(data: bytes | memoryview) -> None:
                stream.write(data)
                if hasher is not None:
                    hasher.update(data)

            # Objects first, as torch does: readers of small entries then find them together.
            for item in sorted(plan.items, key=lambda i: i.type != WriteItemType.BYTE_IO):
                value = planner.resolve_data(item)
                if isinstance(value, torch.Tensor):
                    length = items.write(value, write)
                else:
                    data = value.getvalue()
                    write(data)
                    length = len(data)
                if hasher is not None:
                    hasher.end_item()
                if self.progress is not None:
                    self.progress(length)
                info = _StorageInfo(name, position, length)
                results.append(
                    WriteResult(index=item.index, size_in_bytes=length, storage_data=info)
                )
                position += length
            self._settle(stream)
        if hasher is not None:
            results[-1] = _Digested(results[-1], hasher.result(name))
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        digests: list[FileDigest] = []
        storage_data: dict[Any, Any] = {}
        for result in (r for group in results for r in group):
            storage_data[result.index] = result.storage_data
            if isinstance(result, _Digested):
                digests.append(result.digest)
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = storage_data
        metadata.storage_meta = self.storage_meta()
        data = pickle.dumps(metadata, protocol=4)
        if self.checksums:
            self._replace(CHECKSUMS, to_text([*digests, digest_of(METADATA, data)]))
        self._replace(METADATA, data)

    def _replace(self, name: str, data: bytes) -> None:
        temporary = self.fs.concat_path(self.path, f"{name}.tmp")
        with self.fs.create_stream(temporary, "wb") as raw:
            stream = cast(IO[bytes], raw)
            stream.write(data)
            self._settle(stream)
        self._sync_folder()
        self.fs.rename(temporary, self.fs.concat_path(self.path, name))
        self._sync_folder()

    def _settle(self, stream: IO[bytes]) -> None:
        stream.flush()
        if self.sync_files:
            os.fsync(stream.fileno())
            if self.drop_page_cache and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _sync_folder(self) -> None:
        """Make names durable; file systems that cannot say so in words of their own."""
        if self.sync_files:
            handle = os.open(self.path, os.O_RDONLY)
            try:
                with contextlib.suppress(OSError):
                    os.fsync(handle)
            finally:
                os.close(handle)


class _LocalWriter(_Writer):
    def __init__(
        self, path: str | os.PathLike[str], sync: bool, drop_page_cache: bool, checksums: bool
    ) -> None:
        super().__init__(str(path).removeprefix("file://"), sync_files=sync)
        self.drop_page_cache = drop_page_cache
        self.checksums = checksums


def _remote_writer(url: str, checksums: bool) -> _Writer:
    """A writer for an fsspec URL; fsspec is imported only when one is given."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    class RemoteWriter(_Writer, FsspecWriter):
        def _settle(self, stream: IO[bytes]) -> None:
            return None  # closing is what commits an object; fsync has no meaning there

        def _sync_folder(self) -> None:
            return None

    if url.startswith("file://"):
        return _LocalWriter(url, True, False, checksums)
    writer = RemoteWriter(url, sync_files=False)
    writer.checksums = checksums
    return writer


class _Digested(WriteResult):
    """A result that also carries the checksums of the file it ends."""

    digest: FileDigest

    def __init__(self, result: WriteResult, digest: FileDigest) -> None:
        super().__init__(
            index=result.index,
            size_in_bytes=result.size_in_bytes,
            storage_data=result.storage_data,
        )
        object.__setattr__(self, "digest", digest)


# Failures


def _beneath(error: BaseException) -> BaseException:
    """What stopped torch.save, which closes its archive then and complains of that instead."""
    below: BaseException | None = error
    while isinstance(below, RuntimeError):
        below = below.__context__
    return below or error


def _first_cause(failure: CheckpointException) -> tuple[int, BaseException]:
    """The failure of the lowest rank, an error of the operating system before all others."""
    causes = sorted((rank, wrapped[0]) for rank, wrapped in failure.failures.items())
    for rank, cause in causes:
        if isinstance(cause, OSError):
            return rank, cause
    return causes[0]


def _save_error(cause: BaseException, path: str, rank: int | None, ranks: int) -> CheckpointError:
    if isinstance(cause, SaveError):
        return cause
    words, fix = "", ""
    if not isinstance(cause, Exception):
        words, fix = "its process was interrupted", "save again"
    if isinstance(cause, OSError):
        words, fix = meaning_of(cause)
    name = getattr(cause, "filename", None)
    return SaveError(
        Problem(
            code="dcp.save",
            what=f"the save did not complete: {words or f'{type(cause).__name__}: {cause}'}",
            where=str(name or path) + ("" if rank is None else f" (rank {rank})"),
            actual=f"{type(cause).__name__}: {cause}" if words else "",
            cause=f"the first of {ranks} ranks that failed" if ranks > 1 else "",
            fix=fix,
        )
    )
