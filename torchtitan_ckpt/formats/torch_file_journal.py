"""What of an unfinished `.pt` file is complete, so that an interrupted writer can go on.

A line of JSON for each tensor whose bytes are in the file, in the order of the file. A line is
written after its bytes; what follows the last good line is not believed. Writes no `.pt` itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Done(NamedTuple):
    """A complete tensor: where its entry begins and ends in the file, its bytes and their CRC."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    header: int
    size: int
    crc: int
    end: int


class Journal:
    """The journal at `path`, of the file `data`."""

    def __init__(self, path: Path, data: Path) -> None:
        self._path, self._data = path, data

    def read(self) -> list[Done]:
        """The tensors that are complete. Cuts the journal after them."""
        try:
            size = self._data.stat().st_size
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        found: list[Done] = []
        end = 0
        for line in text.splitlines(keepends=True):
            done = _parsed(line)
            if done is None or done.header != end or not end < done.end <= size:
                break
            end = done.end
            found.append(done)
        self._path.write_text("".join(map(_line, found)), encoding="utf-8")
        return found

    def add(self, done: Iterable[Done], *, sync: bool) -> None:
        """Add tensors whose bytes the file has."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(map(_line, done))
            file.flush()
            if sync:
                os.fsync(file.fileno())


def _line(done: Done) -> str:
    return json.dumps(done) + "\n"


def _parsed(line: str) -> Done | None:
    """The tensor of a line; None for one that was cut."""
    try:
        key, shape, *rest = json.loads(line if line.endswith("\n") else "")
        values: Any = (key, tuple(shape), *rest)
        return Done(*values)
    except (ValueError, TypeError):
        return None
