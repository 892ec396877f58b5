"""Which file a tensor goes to, the files' names, and how a folder changes over to a new save.

Pure, but for the last part: `prepare` looks whether a folder may be written to, `commit` puts
finished files in place - the old marker away first, the new index last, leftovers after it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_ckpt.errors import ConfigError, Problem, SaveError, list_keys
from torchtitan_ckpt.formats.hf_file import PARTIAL, publish, sync_folder, write_problem
from torchtitan_ckpt.formats.hf_index import INDEX_SUFFIX, SUFFIX
from torchtitan_ckpt.formats.hf_problems import INDEX, SINGLE
from torchtitan_ckpt.manifest import TensorEntry

logger = logging.getLogger(__name__)

SMALLEST_FILE = 32 * 10**6  # more writers are not worth files smaller than this
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power, _letter: 1000**_power}
_PLAIN_NAME = re.compile(r"^[^/\\\0]+\.safetensors$")

FileMap = Mapping[str, str] | Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Files in order, each with its tensors. One file named model.safetensors has no index."""

    files: Mapping[str, tuple[TensorEntry, ...]]

    @property
    def index(self) -> str | None:
        """The text of the index, or None for a single file."""
        if list(self.files) == [SINGLE]:
            return None
        total = sum(entry.nbytes for entries in self.files.values() for entry in entries)
        weight_map = {entry.key: name for name, entries in self.files.items() for entry in entries}
        tree = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def plan_layout(
    entries: Sequence[TensorEntry],
    *,
    file_map: FileMap | None = None,
    max_shard_size: int | str = "5GB",
    writers: int = 1,
) -> Layout:
    """Files for tensors: by `file_map`, or by size so that every writer has some.

    A file map names files, or numbers them from 1. Keys that it lists and that are not written
    leave no trace; keys that it lacks go where their neighbours go, and a warning says so.
    """
    if not entries:
        raise SaveError(
            Problem(
                code="hf.nothing",
                what="there is nothing to save",
                cause="an empty state dict, or an adapter that dropped everything",
                fix="check what the adapter's to_hf returns",
            )
        )
    if file_map is not None:
        return Layout(_by_map(entries, file_map))
    limit = parse_size(max_shard_size)
    total = sum(entry.nbytes for entry in entries)
    target = min(limit, max(-(-total // max(writers, 1)), SMALLEST_FILE))
    groups: list[list[TensorEntry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.nbytes > target:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.nbytes
    count = len(groups)
    if count == 1:
        return Layout({SINGLE: tuple(groups[0])})
    return Layout({_numbered(i, count): tuple(group) for i, group in enumerate(groups, 1)})


def parse_size(size: int | str) -> int:
    """Bytes from a number or from text such as `5GB`, `500MB` or `2GiB`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    value = int(float(match[1]) * unit) if match and unit else 0
    if value < 1:
        raise ConfigError(
            Problem(
                code="config.size",
                what="a size is not understood",
                where="max_shard_size",
                expected="bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB",
                actual=repr(size),
                fix="write for example 5GB",
            )
        )
    return value


def _numbered(index: int, count: int) -> str:
    return f"model-{index:05d}-of-{count:05d}{SUFFIX}"


def _by_map(
    entries: Sequence[TensorEntry], file_map: FileMap
) -> dict[str, tuple[TensorEntry, ...]]:
    values: dict[str, str | int] = dict(file_map)
    highest = max((v for v in values.values() if isinstance(v, int)), default=0)
    names = {}
    bad = []
    for key, value in values.items():
        if isinstance(value, int):
            names[key] = _numbered(value, highest) if highest > 1 else SINGLE
            bad += [key] if value < 1 else []
        else:
            names[key] = value
            bad += [] if _PLAIN_NAME.match(value) and not value.startswith(".") else [key]
    if bad or not names:
        raise SaveError(
            Problem(
                code="hf.file-map",
                what="the file map names no plain safetensors file for some keys",
                where=list_keys(bad),
                expected="a name ending in .safetensors without folders, or a number from 1",
                actual=repr(values[bad[0]]) if bad else "an empty map",
                fix="correct the map, or leave it out",
            )
        )
    files: dict[str, list[TensorEntry]] = {}
    strays = []
    last = next((names[e.key] for e in entries if e.key in names), sorted(names.values())[-1])
    for entry in entries:
        if entry.key in names:
            last = names[entry.key]
        else:
            strays.append(entry.key)
        files.setdefault(last, []).append(entry)
    if strays:
        logger.warning(
            "The file map lacks %d tensors, which are written beside their neighbours: %s",
            len(strays),
            list_keys(strays),
        )
    return {name: tuple(files[name]) for name in sorted(files)}


# --- the folder ---------------------------------------------------------------------------------


def prepare(folder: Path, layout: Layout, *, overwrite: bool) -> None:
    """Make the folder, and refuse one that holds another checkpoint or has no room.

    Unfinished files of an earlier, interrupted save are removed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = sorted(os.listdir(folder))
    except OSError as error:
        raise SaveError(write_problem(folder, "made", error)) from error
    foreign = _checkpoint_files(present)
    if foreign and not overwrite:
        raise SaveError(
            Problem(
                code="hf.folder-taken",
                what="the folder already holds a checkpoint",
                where=str(folder),
                actual=", ".join(foreign[:6]) + (" …" if len(foreign) > 6 else ""),
                cause="files of two saves in one folder are how old values get loaded",
                fix="save into a new folder, or allow replacing it with overwrite=True",
            )
        )
    for name in present:
        if name.startswith(".") and name.endswith(SUFFIX + PARTIAL):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    needed = sum(entry.nbytes for entries in layout.files.values() for entry in entries)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SaveError(
            Problem(
                code="hf.no-space",
                what="there is not enough space for the checkpoint",
                where=str(folder),
                expected=f"{needed} bytes",
                actual=f"{free} bytes are free",
                fix="free space or save elsewhere; nothing was written",
            )
        )


def commit(folder: Path, layout: Layout, *, sync_files: bool) -> None:
    """Put finished files in place. The marker of what lay there goes first, the new one last."""
    keep = set(layout.files)
    index = layout.index
    try:
        old = _checkpoint_files(sorted(os.listdir(folder)))
        for name in old:
            if name.endswith(INDEX_SUFFIX) or (name == SINGLE and index is not None):
                (folder / name).unlink()
        publish(folder, layout.files)
        if sync_files:
            sync_folder(folder)
        if index is not None:
            _write_text(folder, INDEX, index, sync_files)
        for name in old:
            if name.endswith(SUFFIX) and name not in keep:
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise SaveError(write_problem(folder, "put in place", error)) from error
    if sync_files:
        sync_folder(folder)


def _write_text(folder: Path, name: str, text: str, sync_files: bool) -> None:
    unfinished = folder / f".{name}{PARTIAL}"
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if sync_files:
            os.fsync(file.fileno())
    os.replace(unfinished, folder / name)


def _checkpoint_files(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX)) and name[0] != "."]
