"""The output folder of a job: how steps are named, published, replaced and removed.

A step is written under a name that no reader takes for a checkpoint and renamed when it is
complete, so that it is valid or invisible. Names of unfinished and of half-deleted things never
contain `step-<digits>`: torchtitan searches that pattern anywhere in a name and would load or
purge them. Local file systems only; over fsspec a step is written in place, its marker last.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from torchtitan_ckpt.errors import Problem, SaveError

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_OURS = ".torchtitan-ckpt.json"
_UNFINISHED = "unfinished."
_REMOVED = "removed."

# A step is complete when one of these is there: each is written last, under its final name.
MARKERS = (".metadata", "model.safetensors.index.json", "model.safetensors")


def step_name(step: int) -> str:
    """`step-N`."""
    return f"step-{step}"


def step_number(name: str) -> int | None:
    """N of `step-N`; None for a name that only resembles it (`step-010`, `step-1.tmp`)."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def list_steps(folder: Path) -> dict[int, Path]:
    """Step folders by number, complete or not; empty when the folder does not exist."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    numbers = {name: step_number(name) for name in names}
    return {n: folder / name for name, n in numbers.items() if n is not None}


def look_alikes(folder: Path) -> list[str]:
    """Names that resemble `step-N` and are not; they are never read, counted or removed."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(n for n in names if re.search(r"step[-_]?[0-9]", n) and step_number(n) is None)


def has_marker(path: Path) -> bool:
    """Whether a step folder shows the file that a format writes last."""
    return any((path / name).is_file() for name in MARKERS)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A folder that a save left behind. `pid` and `host` are those of the writer."""

    path: Path
    step: int
    host: str
    pid: int
    mtime: float


def begin(folder: Path, step: int) -> Path:
    """Make the folder that step N is written into, marked as ours; returns its path."""
    path = folder / f"{_UNFINISHED}{step}.{secrets.token_hex(4)}"
    path.mkdir(parents=True)
    mark = {"step": step, "host": this_host(), "pid": os.getpid()}
    (path / _OURS).write_text(json.dumps(mark))
    return path


def is_ours(path: Path) -> bool:
    """Whether a folder carries the mark of an unfinished save of ours."""
    return (path / _OURS).is_file()


def publish(path: Path, folder: Path, step: int, *, sync: bool) -> Path:
    """Give a finished folder its name `step-N`; returns it.

    A step of that number that is already there is replaced in one exchange of names, so that at
    each moment a complete one is visible. Raises SaveError for a `path` without its marker file.
    """
    if not has_marker(path):
        raise SaveError(
            Problem(
                code="save.no-marker",
                what="A save ended without the file that marks it complete.",
                where=str(path),
                expected=" or ".join(MARKERS),
                cause="a writer failed without saying so, or another process removed the file",
                fix="look at the folder; the steps before it are untouched",
            )
        )
    (path / _OURS).unlink(missing_ok=True)
    if sync:
        sync_dir(path)
    target = folder / step_name(step)
    if target.exists():
        _exchange(path, target)
        remove(path)
    else:
        os.rename(path, target)
    if sync:
        sync_dir(folder)
    return target


def this_host() -> str:
    """The name under which this host signs what it writes."""
    return socket.gethostname()


def remove(path: Path) -> None:
    """Remove a step: first its name, in one move, then its files.

    A process that dies in between leaves a folder that no reader takes for a step; `leftovers`
    finds it.
    """
    hidden = path.parent / f"{_REMOVED}{secrets.token_hex(4)}"
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def leftovers(folder: Path) -> tuple[list[Unfinished], list[Path]]:
    """Unfinished saves of ours, and half-removed folders of ours."""
    unfinished, removed = [], []
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            continue
        if re.fullmatch(re.escape(_REMOVED) + "[0-9a-f]{8}", entry.name):
            removed.append(Path(entry.path))
        elif entry.name.startswith(_UNFINISHED):
            mark = _read_mark(Path(entry.path))
            if mark is not None:
                unfinished.append(mark)
    return unfinished, removed


def _read_mark(path: Path) -> Unfinished | None:
    try:
        mark = json.loads((path / _OURS).read_text())
        return Unfinished(
            path, int(mark["step"]), str(mark["host"]), int(mark["pid"]), path.stat().st_mtime
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sync_dir(path: Path) -> None:
    """fsync a directory, so that the names in it survive a crash of the machine."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(a: Path, b: Path) -> None:
    """Swap two names in one step, or, where the file system cannot, in two.

    Linux offers this as renameat2 with RENAME_EXCHANGE, which Python does not wrap. Without it the
    old step is out of sight for the moment between two renames; a process that dies just then
    leaves the new one complete under its unfinished name.
    """
    at_cwd, exchange = -100, 2
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0
    except (OSError, AttributeError):
        done = False
    if not done:
        spare = a.parent / f"{_REMOVED}{secrets.token_hex(4)}"
        os.rename(b, spare)
        os.rename(a, b)
        os.rename(spare, a)
