"""Writing a Hugging Face folder from one process, slice by slice, in any order.

All tensors are declared first, so that headers are written and every slice has its place; nothing
is kept in memory but what is being written. A file whose tensors are complete is closed and, where
nobody else compares it, read back at once. `finish` puts everything in place; until then no reader
sees a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

import torch

from torchtitan_ckpt.errors import Problem, SaveError, list_keys, nearest
from torchtitan_ckpt.formats.hf_boxes import Ints, find_gap_or_overlap
from torchtitan_ckpt.formats.hf_file import FileWriter, dense_bytes, partial_name, write_problem
from torchtitan_ckpt.formats.hf_header import build_header
from torchtitan_ckpt.formats.hf_index import read_manifest
from torchtitan_ckpt.formats.hf_io import NAMES
from torchtitan_ckpt.formats.hf_layout import FileMap, Layout, commit, plan_layout, prepare
from torchtitan_ckpt.manifest import Manifest, TensorEntry

FORMAT_METADATA: Mapping[str, str] = {"format": "pt"}


def open_writer(
    folder: str | Path,
    entries: Iterable[TensorEntry],
    *,
    file_map: FileMap | None = None,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    sync_files: bool = True,
    resume: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> HfWriter:
    """A writer for these tensors (key, shape, dtype; shards are ignored).

    resume: a word that stands for the source (a hash of its manifest). Files that an interrupted
        run with the same word, layout and metadata completed are kept: `HfWriter.done` has their
        tensors, which must not be written again. Without it every run begins anew.
    """
    layout = plan_layout(list(entries), file_map=file_map, max_shard_size=max_shard_size)
    root = Path(folder)
    prepare(root, layout, overwrite=overwrite)
    return HfWriter(root, layout, metadata, sync_files, resume, progress)


class HfWriter:
    """See `open_writer`. Use it as a context: leaving it before `finish` undoes what was written
    (with `resume`, completed files stay for the next run)."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        metadata: Mapping[str, str] | None,
        sync_files: bool,
        resume: str | None,
        progress: Callable[[int], None] | None,
        *,
        verified: bool = True,
    ) -> None:
        self._folder, self._layout = folder, layout
        self._metadata = dict(FORMAT_METADATA if metadata is None else metadata)
        self._sync, self._resume, self._progress = sync_files, resume, progress
        self._verified = verified
        self._entries = {e.key: e for entries in layout.files.values() for e in entries}
        self._file_of = {e.key: name for name, entries in layout.files.items() for e in entries}
        self._open: dict[str, FileWriter] = {}
        self._complete: set[str] = set()
        self._boxes: dict[str, list[tuple[Ints, Ints]]] = {}
        # What each file still waits for, in elements; an empty tensor is complete from the start.
        self._left = {n: sum(e.numel for e in es) for n, es in layout.files.items()}
        self.done: frozenset[str] = self._resumed()

    def file_of(self, key: str) -> str:
        """The name of the file that a tensor goes to."""
        return self._file_of[key]

    def write(self, key: str, tensor: torch.Tensor, offsets: Ints | None = None) -> None:
        """Write a tensor, or the part of it that begins at `offsets`. Parts must not overlap."""
        entry = self._entries.get(key)
        if entry is None or key in self.done:
            raise SaveError(_not_declared(key, self._entries, key in self.done))
        offsets = (0,) * len(entry.shape) if offsets is None else tuple(offsets)
        sizes = tuple(tensor.shape)
        fits = len(sizes) == len(offsets) == len(entry.shape) and all(
            o >= 0 and o + n <= s for o, n, s in zip(offsets, sizes, entry.shape, strict=True)
        )
        if not fits or NAMES.get(tensor.dtype) != entry.dtype:
            raise SaveError(_misfit(entry, offsets, tensor))
        if tensor.numel():
            name = self._file_of[key]
            file = self._file(name)
            dense = tensor.detach().cpu().contiguous()
            file.write_box(file.items[key], offsets, sizes, dense_bytes(dense))
            self._boxes.setdefault(key, []).append((offsets, sizes))
            self._left[name] -= tensor.numel()
            if self._left[name] == 0:
                self._close(name)

    def flush(self) -> None:
        """Hand everything to the system, so that it can be read."""
        for file in self._open.values():
            file.flush()

    def path_of(self, key: str) -> Path:
        """Where the file of a tensor lies until `finish`."""
        name = self._file_of[key]
        complete = name in self._complete
        return self._folder / (self._completed(name) if complete else partial_name(name))

    def missing(self) -> list[str]:
        """The declared tensors that are not written completely."""
        return [key for key in self._entries if self._fault(key)]

    def finish(self) -> Manifest:
        """Check that all is there, put the files and, last, the index in place."""
        faults = {key: fault for key in self._entries if (fault := self._fault(key))}
        if faults:
            raise SaveError(_incomplete(faults))
        for name in self._layout.files:
            if name not in self._complete:  # only empty tensors, never opened
                self._file(name)
                self._close(name)
        for name in self._layout.files:
            self._rename(self._completed(name), partial_name(name))
        commit(self._folder, self._layout, sync_files=self._sync)
        self._open.clear()
        return read_manifest(self._folder)

    def abort(self) -> None:
        """Remove unfinished files; without `resume` the completed ones too."""
        for file in self._open.values():
            file.discard()
        self._open.clear()
        if self._resume is None:
            for name in self._complete:
                with contextlib.suppress(OSError):
                    (self._folder / self._completed(name)).unlink()
        self._complete.clear()

    def __enter__(self) -> HfWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()  # after finish there is nothing left to abort

    def _file(self, name: str) -> FileWriter:
        if name not in self._open:
            self._open[name] = FileWriter(
                self._folder,
                name,
                self._layout.files[name],
                self._metadata,
                verified=self._verified,
                progress=self._progress,
            )
        return self._open[name]

    def _close(self, name: str) -> None:
        for entry in self._layout.files[name]:
            fault = self._fault(entry.key)
            if fault:
                raise SaveError(_incomplete({entry.key: fault}))
        file = self._open[name]
        if self._sync:
            file.sync()
        file.verify()
        file.close()
        del self._open[name]
        self._rename(partial_name(name), self._completed(name))
        self._complete.add(name)

    def _fault(self, key: str) -> str:
        if key in self.done or self._file_of[key] in self._complete:
            return ""
        return find_gap_or_overlap(self._entries[key].shape, self._boxes.get(key, []))

    def _completed(self, name: str) -> str:
        word = re.sub(r"\W", "", self._resume or "run")[:32]
        return f".{name}.{word}.complete"

    def _rename(self, old: str, new: str) -> None:
        try:
            os.replace(self._folder / old, self._folder / new)
        except OSError as error:
            raise SaveError(write_problem(self._folder / old, "renamed", error)) from error

    def _resumed(self) -> frozenset[str]:
        """Tensors of files that an earlier run completed; other leftovers are removed."""
        wanted = {self._completed(name): name for name in self._layout.files}
        keys: set[str] = set()
        for present in sorted(os.listdir(self._folder)):
            if not (present.startswith(".") and present.endswith(".complete")):
                continue
            path = self._folder / present
            name = wanted.get(present) if self._resume is not None else None
            if name is not None and self._as_planned(path, name):
                self._complete.add(name)
                keys.update(entry.key for entry in self._layout.files[name])
            else:
                path.unlink(missing_ok=True)
        return frozenset(keys)

    def _as_planned(self, path: Path, name: str) -> bool:
        rows = [(entry.key, entry.dtype, entry.shape) for entry in self._layout.files[name]]
        header, items = build_header(rows, self._metadata)
        end = max((item.start + item.length for item in items.values()), default=len(header))
        with open(path, "rb") as file:
            return file.read(len(header)) == header and path.stat().st_size == end


# --- messages -----------------------------------------------------------------------------------


def _not_declared(key: str, known: Iterable[str], done: bool) -> Problem:
    return Problem(
        code="hf.writer-key",
        what=f"{key!r} was completed by an earlier run" if done else f"{key!r} was not declared",
        actual="" if done else f"nearest declared: {nearest(key, known)}",
        fix="skip the keys in HfWriter.done" if done else "declare all tensors to open_writer",
    )


def _misfit(entry: TensorEntry, offsets: Ints, tensor: torch.Tensor) -> Problem:
    return Problem(
        code="hf.writer-part",
        what=f"a part does not fit into {entry.key!r} as declared",
        expected=f"{entry.dtype} within {list(entry.shape)}",
        actual=f"{NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)} at {list(offsets)}",
        fix="declare what is written, or write what was declared",
    )


def _incomplete(faults: Mapping[str, str]) -> Problem:
    return Problem(
        code="hf.writer-cover",
        what=f"{len(faults)} tensors are not written exactly once",
        where=list_keys(faults),
        actual=next(iter(faults.values())),
        fix="write every part once; nothing was put in place",
    )
