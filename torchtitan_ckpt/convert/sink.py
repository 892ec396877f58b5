"""Where a conversion writes to: the three formats, each from one process at a time.

Hugging Face files are written whole, one after the other; a finished one is kept for a later run.
DCP data files too, and the finished tensors of a `.pt`. Nothing here gives a result its name.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from torchtitan_ckpt.convert.behind import Written
from torchtitan_ckpt.convert.units import Place, Unit, nbytes
from torchtitan_ckpt.formats.dcp_plain import SERIALIZATION
from torchtitan_ckpt.formats.dcp_stream import DcpStreamWriter, Item
from torchtitan_ckpt.formats.dcp_stream_read import DcpReader
from torchtitan_ckpt.formats.hf_boxes import Ints
from torchtitan_ckpt.formats.hf_file import PARTIAL, partial_name
from torchtitan_ckpt.formats.hf_header import build_header
from torchtitan_ckpt.formats.hf_layout import Layout, commit, parse_size, plan_layout
from torchtitan_ckpt.formats.hf_writer import FORMAT_METADATA, HfWriter
from torchtitan_ckpt.formats.tensor_bytes import memory
from torchtitan_ckpt.formats.torch_file_write import Sink as Bytes
from torchtitan_ckpt.formats.torch_file_write import TorchFileWriter
from torchtitan_ckpt.manifest import Manifest, Shard, TensorEntry


class Sink(Written, Protocol):
    """Takes pieces; `done` says which an earlier run has written."""

    def done(self, place: Place) -> bool: ...

    def write(self, key: str, offsets: Ints, tensor: torch.Tensor) -> None: ...


def _manifest(
    folder: Path, shards: Iterable[tuple[str, str, Shard]], info: Mapping[str, str] | None = None
) -> Manifest:
    """Of an unfinished target: some items with key and dtype, as a DCP would have them."""
    tensors: dict[str, TensorEntry] = {}
    for key, dtype, shard in shards:
        known = tensors.get(key, TensorEntry(key, (), dtype)).shards
        tensors[key] = TensorEntry(key, (), dtype, (*known, shard))
    return Manifest(str(folder), "dcp", tensors, info=info or {})


def _bare(path: Path, shards: Mapping[str, tuple[str, Shard]]) -> DcpReader:
    """Reads tensors whose bytes lie bare in a file, by key: dtype and place."""
    items = [(key, dtype, replace(one, file=path.name)) for key, (dtype, one) in shards.items()]
    manifest = _manifest(path.parent, items, {SERIALIZATION: "safetensors"})
    return DcpReader(path.parent, manifest=manifest, ahead=False)


# --- Hugging Face -------------------------------------------------------------------------------


def layout_of(units: Sequence[Unit], max_shard_size: str) -> tuple[Layout, dict[str, list[Unit]]]:
    """Files by size, a unit never split; and the units of each file."""
    limit = parse_size(max_shard_size)
    numbers: dict[str, int] = {}
    entries = []
    number, filled = 1, 0
    owners: dict[str, Unit] = {}
    for unit in units:
        size = nbytes(unit)
        if filled and filled + size > limit:
            number, filled = number + 1, 0
        filled += size
        for entry in unit.entries:
            numbers[entry.key] = number
            owners[entry.key] = unit
            entries.append(entry)
    layout = plan_layout(entries, file_map=numbers)
    files: dict[str, list[Unit]] = {}
    for name, group in layout.files.items():
        own = {id(owners[entry.key]): owners[entry.key] for entry in group}
        files[name] = list(own.values())
    return layout, files


class HfFileSink:
    """One safetensors file, in a folder of its own until `gather` collects all."""

    def __init__(self, files: Path, out: Path, layout: Layout, name: str, *, sync: bool) -> None:
        self._places = (files / name / name, out / partial_name(name), out / name)
        self._folder = files / name
        self._layout = Layout({name: layout.files[name]})
        self._name, self._sync = name, sync
        rows = [(entry.key, entry.dtype, entry.shape) for entry in layout.files[name]]
        _, self._items = build_header(rows, FORMAT_METADATA)
        self._writer: HfWriter | None = None

    @property
    def complete(self) -> bool:
        """Whether an earlier run, or this one, has finished the file: only then it has its name."""
        return any(place.exists() for place in self._places)

    def done(self, place: Place) -> bool:
        return False

    def write(self, key: str, offsets: Ints, tensor: torch.Tensor) -> None:
        assert self._writer is not None
        self._writer.write(key, tensor, offsets)

    def shard(self, place: Place) -> Shard:
        item = self._items[place[0]]
        return Shard((0,) * len(item.shape), item.shape, self._name, item.start, item.length)

    def reader(self, places: list[tuple[Place, str]]) -> DcpReader:
        assert self._writer is not None
        self._writer.flush()
        path = self._writer.path_of(places[0][0][0])
        return _bare(path, {place[0]: (dtype, self.shard(place)) for place, dtype in places})

    def __enter__(self) -> HfFileSink:
        self._folder.mkdir(parents=True, exist_ok=True)
        for stale in self._folder.iterdir():
            stale.unlink()
        # The conversion compares the result with its source, which says more than a second reading.
        self._writer = HfWriter(
            self._folder, self._layout, None, self._sync, None, None, verified=False
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._writer is not None
        with self._writer:
            if error is None:
                self._writer.finish()


def gather(files: Path, out: Path, layout: Layout, *, sync_files: bool) -> None:
    """Collect finished files and write the index, last. Can be repeated after an interruption."""
    for name in layout.files:
        if (files / name / name).exists():
            os.replace(files / name / name, out / partial_name(name))
        elif (out / name).exists():
            os.replace(out / name, out / partial_name(name))
    for stale in out.glob(f".*.json{PARTIAL}"):
        stale.unlink()
    commit(out, layout, sync_files=sync_files)


# --- DCP ----------------------------------------------------------------------------------------


class DcpSink:
    """Data files of one rank."""

    def __init__(self, folder: Path, writer: DcpStreamWriter) -> None:
        self._folder, self._writer = folder, writer
        self._shards: dict[Place, Shard] = {}
        self._done = {(item.key, item.offsets, item.sizes) for item in writer.done}

    def done(self, place: Place) -> bool:
        return place in self._done

    def has_object(self, key: str) -> bool:
        return (key, (), None) in self._done

    def write(self, key: str, offsets: Ints, tensor: torch.Tensor) -> None:
        place = (key, offsets, tuple(tensor.shape))
        if place not in self._done:
            item = self._writer.write(key, tensor, offsets)
            self._shards[place] = Shard(offsets, place[2], item.file, item.offset, item.length)

    def shard(self, place: Place) -> Shard:
        return self._shards[place]

    def reader(self, places: list[tuple[Place, str]]) -> DcpReader:
        self._writer.flush()
        items = [(place[0], dtype, self._shards[place]) for place, dtype in places]
        return DcpReader(self._folder, manifest=_manifest(self._folder, items), ahead=False)

    def write_object(self, key: str, data: bytes) -> None:
        if not self.has_object(key):
            self._writer.write_object(key, data)

    def finish(self) -> list[Item]:
        return self._writer.finish()


# --- .pt ----------------------------------------------------------------------------------------


class TorchSink:
    """One `.pt` file; the pieces of a tensor come in the order of its bytes."""

    def __init__(self, name: str, writer: TorchFileWriter, units: Sequence[Unit]) -> None:
        self._name, self._writer = name, writer
        self._entries = {entry.key: entry for unit in units for entry in unit.entries}
        self._stack = contextlib.ExitStack()
        self._sink: Bytes | None = None
        self._left = 0

    def done(self, place: Place) -> bool:
        return place[0] in self._writer.done

    def write(self, key: str, offsets: Ints, tensor: torch.Tensor) -> None:
        if key in self._writer.done:  # made again beside one that is not done
            return
        entry = self._entries[key]
        if self._sink is None:
            if tuple(tensor.shape) == entry.shape:
                self._writer.add(key, tensor)
                return
            opened = self._writer.tensor(key, entry.shape, entry.dtype)
            self._sink = self._stack.enter_context(opened)
            self._left = math.prod(entry.shape)
        dense = tensor.contiguous()
        self._sink(memory(dense))
        self._left -= tensor.numel()
        if self._left == 0:
            self._sink = None
            self._stack.close()

    def shard(self, place: Place) -> Shard:
        entry, start = self._entries[place[0]], self._writer.start(place[0])
        zero = (0,) * len(entry.shape)
        return Shard(zero, entry.shape, self._name, start, entry.nbytes)

    def reader(self, places: list[tuple[Place, str]]) -> DcpReader:
        shards = {place[0]: (dtype, self.shard(place)) for place, dtype in places}
        return _bare(self._writer.flush(), shards)

    def finish(
        self, objects: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]] | None
    ) -> None:
        for key, value in objects.items():
            self._writer.value(key, value)
        if paths is not None:
            self._writer.nest(paths)


@contextlib.contextmanager
def torch_sink(
    path: Path, units: Sequence[Unit], *, sync: bool, journal: Path
) -> Iterator[TorchSink]:
    with TorchFileWriter(path, sync=sync, journal=journal) as writer:
        yield TorchSink(path.name, writer, units)
