"""What a process does to a folder, seen while it does it: opens for writing, renames, removals.

Whoever watches is called just before each, in the thread that does it, and may look, wait or copy.
Python's audit hooks tell of them, whatever library writes; a process of its own is not seen.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = frozenset({"os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"})


@dataclass(frozen=True, slots=True)
class Deed:
    """What is about to happen: `event` as Python calls it, and whether it empties the file."""

    event: str
    path: Path
    empties: bool


@dataclass(slots=True)
class _Watcher:
    folder: Path
    act: Callable[[Deed], None]


_watchers: list[_Watcher] = []
_acting = threading.local()
_hooked: list[bool] = []


@contextmanager
def watched(folder: str, act: Callable[[Deed], None]) -> Iterator[None]:
    """Call `act` before each deed below `folder`; what `act` itself does is not told."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_hook)  # for the life of the process: there is no way to take it away
    watcher = _Watcher(Path(folder), act)
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watchers or getattr(_acting, "now", False):
        return
    if event == "open":
        flags = args[2] if isinstance(args[2], int) else 0
        if not flags & _WRITES:
            return
    elif event in _CHANGES:
        flags = 0
    else:
        return
    try:
        path = Path(os.fsdecode(args[0]))
    except TypeError:  # a file descriptor, which was opened before
        return
    deed = Deed(event, path, bool(flags & os.O_TRUNC))
    _acting.now = True
    try:
        for watcher in tuple(_watchers):
            if path.is_relative_to(watcher.folder):
                watcher.act(deed)
    finally:
        _acting.now = False


def copy_of(folder: str | Path, into: str | Path) -> None:
    """Copy a folder that threads may be removing things from."""
    with contextlib.suppress(shutil.Error):  # raised at the end, with what was gone meanwhile
        shutil.copytree(folder, into, dirs_exist_ok=True)


class Kills:
    """What a kill would leave of `folder`, at each moment at which something in it changes.

    Each is a copy in `into`, numbered. An open that empties a file is copied as it leaves the file.
    """

    def __init__(self, folder: str, into: str) -> None:
        self.folder, self.into = Path(folder), Path(into)
        self.moments: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def __call__(self, deed: Deed) -> None:
        with self._lock:
            copy = self.into / str(len(self.moments))
            copy_of(self.folder, copy)
            inside = deed.path.relative_to(self.folder)
            if deed.empties and (copy / inside).is_file():
                (copy / inside).write_bytes(b"")
            verb = deed.event.rpartition(".")[2]
            self.moments.append((str(copy), f"{verb} of {inside}"))


class Stall:
    """Keeps writers in other threads waiting at their first open, until `end`."""

    def __init__(self, limit: float = 30.0) -> None:
        self._reached, self._go, self._limit = threading.Event(), threading.Event(), limit
        self._caller = threading.get_ident()

    def __call__(self, deed: Deed) -> None:
        if deed.event == "open" and threading.get_ident() != self._caller:
            self._reached.set()
            self._go.wait(self._limit)

    def begun(self, limit: float = 5.0) -> bool:
        """Whether a writer got there; none does where another process writes."""
        return self._reached.wait(limit)

    def end(self) -> None:
        self._go.set()

    def end_in(self, seconds: float) -> None:
        """For a call that may rightly wait for the writer."""
        threading.Timer(seconds, self.end).start()


@contextmanager
def stalled(folder: str) -> Iterator[Stall]:
    """Writers below `folder` in other threads make no progress inside the block."""
    stall = Stall()
    with watched(folder, stall):
        try:
            yield stall
        finally:
            stall.end()
