"""Object entries of a DCP: read them, neighbours together, and find the pickled Nones among them.

A pickled None counts as absent: torchtitan 0.3.0 lets None through its flattening, DCP pickles it,
and a later load would put it over healthy moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchtitan_ckpt.errors import CheckpointError, InputError, Problem
from torchtitan_ckpt.formats.folders import Folder
from torchtitan_ckpt.formats.pickles import load_object
from torchtitan_ckpt.formats.torch_zip import Archive
from torchtitan_ckpt.manifest import ObjectEntry

_SMALL = 2048
_READ_AHEAD = 4 * 2**20


def pickled_nones(folder: Folder, entries: Iterable[ObjectEntry]) -> list[str]:
    """The keys of entries that hold None; only small ones can."""
    found = []
    for name, group in by_file(entry for entry in entries if entry.byte_length <= _SMALL):
        file = folder.open(name)
        try:
            for start, data, run in runs(file.read, group):
                found += [
                    entry.key
                    for entry in run
                    if _is_none(data, entry.byte_offset - start, entry.byte_length)
                ]
        finally:
            file.close()
    return sorted(found)


def read_objects(
    folder: Folder, entries: Iterable[ObjectEntry], *, trust: bool = False
) -> Mapping[str, Any]:
    """The values of object entries. All that cannot be read is said in one error."""
    values: dict[str, Any] = {}
    failures: list[CheckpointError] = []
    for name, group in by_file(entries):
        file = folder.open(name)
        try:
            for start, data, run in runs(file.read, group):
                for entry in run:
                    at = entry.byte_offset - start
                    try:
                        values[entry.key] = load_object(
                            data[at : at + entry.byte_length],
                            where=f"{folder.name.rstrip('/')}/{name}: {entry.key}",
                            trust=trust,
                        )
                    except CheckpointError as error:
                        failures.append(error)
        finally:
            file.close()
    raise_all(failures)
    return values


def raise_all(failures: list[CheckpointError], limit: int = 20) -> None:
    """Raise one error with the problems of all; the class is the first one's."""
    if not failures:
        return
    problems = list(dict.fromkeys(p for failure in failures for p in failure.problems))
    if len(problems) > limit:
        more = Problem(code="dcp.more", what=f"{len(problems) - limit} more like these")
        problems = [*problems[:limit], more]
    raise type(failures[0])(*problems) from failures[0]


def by_file(entries: Iterable[ObjectEntry]) -> Iterator[tuple[str, list[ObjectEntry]]]:
    files: dict[str, list[ObjectEntry]] = {}
    for entry in entries:
        files.setdefault(entry.file, []).append(entry)
    for name, group in files.items():
        yield name, sorted(group, key=lambda e: e.byte_offset)


def runs(read: Any, entries: list[ObjectEntry]) -> Iterator[tuple[int, bytes, list[ObjectEntry]]]:
    """Neighbouring entries with their bytes, read together."""
    run: list[ObjectEntry] = []
    for entry in [*entries, None]:
        if run and (
            entry is None
            or entry.byte_offset - (run[-1].byte_offset + run[-1].byte_length) > _SMALL
            or entry.byte_offset + entry.byte_length - run[0].byte_offset > _READ_AHEAD
        ):
            start = run[0].byte_offset
            yield start, read(start, run[-1].byte_offset + run[-1].byte_length - start), run
            run = []
        if entry is not None:
            run.append(entry)


def _is_none(data: bytes, at: int, length: int) -> bool:
    """Whether an item is torch.save of None: a look at its data.pkl, then a full reading."""
    if data[at : at + 4] != b"PK\x03\x04":
        return False
    name, extra = (int.from_bytes(data[at + n : at + n + 2], "little") for n in (26, 28))
    value = at + 30 + name + extra
    if data[value : value + 1] != b"\x80" or data[value + 2 : value + 4] != b"N.":
        return False
    try:
        return Archive.of_bytes(data[at : at + length], where="None").describe() is None
    except InputError:
        return False
