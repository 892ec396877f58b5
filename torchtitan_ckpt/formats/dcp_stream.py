"""Write a DCP from one process item by item, or from several with a folder in common.

Nothing is planned ahead: a tensor is given in boxes of any size, each becomes a stored item, and
`.metadata` is written from the list of all items at the very end. A tensor larger than memory is
written as several boxes, which any reader of DCP puts together. A data file that is complete is
recorded in a journal, so that an interrupted run goes on after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_ckpt.errors import DamagedError, Problem, SaveError, list_keys
from torchtitan_ckpt.formats.dcp_items import ItemWriter
from torchtitan_ckpt.formats.dcp_manifest import METADATA
from torchtitan_ckpt.formats.hf_boxes import find_gap_or_overlap
from torchtitan_ckpt.formats.hf_file import sync_folder, write_problem
from torchtitan_ckpt.formats.page_cache import open_file
from torchtitan_ckpt.manifest import TensorEntry

MAX_FILE_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Item:
    """A stored box of a tensor, or an object (`sizes` is None): what it is and where it lies."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...] | None
    file: str
    offset: int
    length: int


class DcpStreamWriter:
    """Data files `__<rank>_<n>.distcp` in `folder`, one after the other.

    `done` are the items of files that an earlier run with the same `word` completed (their journal
    lies in `journal`): they must not be written again. Without a journal every run begins anew.
    What is written does not stay in the page cache (`page_cache`).
    Use it as a context: leaving it by an exception removes the unfinished file.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int = 0,
        journal: str | Path | None = None,
        word: str = "",
        sync_files: bool = True,
        max_file_bytes: int = MAX_FILE_BYTES,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._folder, self._rank, self._word = Path(folder), rank, word
        self._journal = None if journal is None else Path(journal)
        self._sync, self._limit, self._progress = sync_files, max_file_bytes, progress
        self._writer = ItemWriter(largest=2**26)
        self._file: IO[bytes] | None = None
        self._at = 0
        self._complete: list[list[Item]] = self._resumed()
        self._items: list[Item] = []
        self.done: tuple[Item, ...] = tuple(i for items in self._complete for i in items)

    def write(self, key: str, tensor: torch.Tensor, offsets: tuple[int, ...] | None = None) -> Item:
        """Write a tensor, or the box of it that begins at `offsets`; where it lies."""
        sizes = tuple(tensor.shape)
        at = (0,) * len(sizes) if offsets is None else tuple(offsets)
        with self._failing():
            start = self._at
            length = self._writer.write(tensor, self._put)
        item = Item(key, at, sizes, self._name, start, length)
        self._add(item)
        return item

    def write_object(self, key: str, data: bytes | memoryview) -> None:
        """Write the stored form of an object (a torch.save archive) as it is."""
        with self._failing():
            start = self._at
            self._put(data)
        self._add(Item(key, (), None, self._name, start, len(data)))

    def flush(self) -> None:
        """Hand everything to the system, so that it can be read."""
        if self._file is not None:
            with self._failing():
                self._file.flush()

    def finish(self) -> list[Item]:
        """Complete the last file; all items of this rank, for `write_metadata`."""
        self._close()
        return [item for items in self._complete for item in items]

    def __enter__(self) -> DcpStreamWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # it writes what is left, and fails as before
                self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                (self._folder / self._name).unlink()

    @property
    def _name(self) -> str:
        return f"__{self._rank}_{len(self._complete)}.distcp"

    def _put(self, data: bytes | memoryview) -> None:
        if self._file is None:
            self._file = open_file(self._folder / self._name)
        self._file.write(data)
        self._at += len(data)
        if self._progress is not None:
            self._progress(len(data))

    def _add(self, item: Item) -> None:
        self._items.append(item)
        if self._at >= self._limit:
            self._close()

    def _close(self) -> None:
        if self._file is None:
            return
        with self._failing():
            self._file.flush()
            if self._sync:
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            if self._journal is not None:
                rows = [asdict(item) for item in self._items]
                text = json.dumps({"word": self._word, "bytes": self._at, "items": rows})
                partial = self._journal / f"{self._name}.partial"
                partial.write_text(text, encoding="utf-8")
                partial.replace(self._journal / f"{self._name}.json")
        self._complete.append(self._items)
        self._items, self._at = [], 0

    def _resumed(self) -> list[list[Item]]:
        complete: list[list[Item]] = []
        while self._journal is not None:
            name = f"__{self._rank}_{len(complete)}.distcp"
            try:
                tree = json.loads((self._journal / f"{name}.json").read_text(encoding="utf-8"))
                size = (self._folder / name).stat().st_size
                if tree["word"] != self._word or tree["bytes"] != size:
                    break
                complete.append([_item(row) for row in tree["items"]])
            except (OSError, ValueError, KeyError, TypeError):
                break
        return complete

    @contextlib.contextmanager
    def _failing(self) -> Any:
        try:
            yield
        except OSError as error:
            place = self._folder / self._name
            raise SaveError(write_problem(place, "written", error)) from error


def _item(row: Mapping[str, Any]) -> Item:
    sizes = row["sizes"]
    return Item(
        str(row["key"]),
        tuple(map(int, row["offsets"])),
        None if sizes is None else tuple(map(int, sizes)),
        str(row["file"]),
        int(row["offset"]),
        int(row["length"]),
    )


def write_metadata(
    folder: str | Path,
    entries: Iterable[TensorEntry],
    items: Sequence[Item],
    *,
    sync_files: bool = True,
) -> None:
    """Write `.metadata`, which makes the folder a checkpoint. `items` are those of all ranks.

    Raises `SaveError` when the items of a tensor do not cover it exactly once.
    """
    root = Path(folder)
    boxes: dict[str, list[Item]] = {}
    for item in items:
        boxes.setdefault(item.key, []).append(item)
    state: dict[str, Any] = {}
    faults: dict[str, str] = {}
    for entry in entries:
        own = boxes.pop(entry.key, [])
        parts = [(item.offsets, item.sizes or ()) for item in own]
        # An empty tensor has nothing to cover; DCP stores it as one empty item all the same.
        fault = "" if entry.numel == 0 and own else find_gap_or_overlap(entry.shape, parts)
        if fault or not own:
            faults[entry.key] = fault or "nothing was written"
            continue
        state[entry.key] = TensorStorageMetadata(
            properties=TensorProperties.create_from_tensor(
                torch.empty(0, dtype=getattr(torch, entry.dtype))
            ),
            size=torch.Size(entry.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(o), sizes=torch.Size(s)) for o, s in parts
            ],
        )
    if faults:
        raise SaveError(
            Problem(
                code="dcp.stream-cover",
                what=f"{len(faults)} tensors are not written exactly once",
                where=list_keys(faults),
                actual=next(iter(faults.values())),
                fix="write every part once; the checkpoint was not put in place",
            )
        )
    for key, own in boxes.items():
        if len(own) != 1 or own[0].sizes is not None:
            raise SaveError(
                Problem(code="dcp.stream-extra", what="a key that was not declared", where=key)
            )
        state[key] = BytesStorageMetadata()
    storage = {
        MetadataIndex(item.key, None if item.sizes is None else torch.Size(item.offsets)):
        _StorageInfo(item.file, item.offset, item.length)
        for item in items
    }  # fmt: skip
    metadata = Metadata(
        state_dict_metadata=state,
        planner_data={key: (key,) for key in state},
        storage_data=storage,
        storage_meta=StorageMeta(checkpoint_id=None, save_id=None),
    )
    metadata.version = CURRENT_DCP_VERSION
    try:
        partial = root / f"{METADATA}.tmp"
        with open(partial, "wb") as file:
            file.write(pickle.dumps(metadata, protocol=4))
            file.flush()
            if sync_files:
                os.fsync(file.fileno())
        partial.replace(root / METADATA)
        if sync_files:
            sync_folder(root)
    except OSError as error:
        raise SaveError(write_problem(root / METADATA, "written", error)) from error


def planner_paths(path: str | os.PathLike[str], *, trust: bool = False) -> dict[str, Any]:
    """The path that each key had in the nested dict that was saved, as `.metadata` keeps it.

    Keys without one are left out.
    """
    from torchtitan_ckpt.formats.folders import open_folder
    from torchtitan_ckpt.formats.pickles import load_metadata

    folder = open_folder(path)
    file = folder.open(METADATA)
    try:
        where = f"{folder.name}/{METADATA}"
        metadata = load_metadata(file.read(0, file.size), where=where, trust=trust)
    finally:
        file.close()
    found = metadata.planner_data
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise DamagedError(
            Problem(code="dcp.metadata-form", what="planner_data is no dict", where=where)
        )
    return {
        key: tuple(path)
        for key, path in found.items()
        if isinstance(key, str)
        and isinstance(path, (tuple, list))
        and path
        and all(type(part) in (str, int) for part in path)
    }


__all__ = ["DcpStreamWriter", "Item", "planner_paths", "write_metadata"]
