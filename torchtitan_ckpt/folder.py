"""The output folder of a job: how steps are named, published, replaced and removed.

A step is written under a name that no reader takes for a checkpoint and renamed when it is
complete, so that it is valid or invisible. Names of unfinished and of half-deleted things never
contain `step-<digits>`: torchtitan searches that pattern anywhere in a name and would load or
purge them. Local file systems only; over fsspec a step is written in place, its marker last.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import operator
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex, cast

from torchtitan_ckpt import owner
from torchtitan_ckpt.errors import ConfigError, Problem, SaveError

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
# Who writes is told by the name: a mark inside would come after the folder and go before its
# last renaming, and a process that dies in between would leave a folder that is nobody's.
_UNFINISHED = re.compile(r"unfinished\.(\d+)\.([A-Za-z0-9]+)\.(\d+)\.(\d+)\.[0-9a-f]{8}")
_REPLACED = re.compile(r"replaced\.(\d+)\.[0-9a-f]{8}")
_REMOVED = re.compile(r"removed\.[0-9a-f]{8}")

# The folders of this process's saves that are neither published nor abandoned.
_begun: set[str] = set()

# What renaming a folder answers when its new name is that of a step, a link or a file.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)

# What a file system answers that cannot swap two names, among them NFS and FUSE.
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

# A step is complete when one of these is there: each is written last, under its final name.
MARKERS = (".metadata", "model.safetensors.index.json", "model.safetensors")


def step_name(step: int) -> str:
    """`step-N`."""
    return f"step-{step}"


def step_number(name: str) -> int | None:
    """N of `step-N`; None for a name that only resembles it (`step-010`, `step-1.tmp`)."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def whole(step: object) -> int:
    """A caller's step as an int: `step-10.0` would be a name that no reader knows."""
    try:
        return operator.index(cast(SupportsIndex, step))
    except TypeError:
        raise ConfigError(
            Problem(
                code="config.step",
                what="A step is a whole number.",
                expected="an int",
                actual=f"{step!r} ({type(step).__name__})",
                fix="int(step)",
            )
        ) from None


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
    """A folder that a save left behind. `host`, `pid` and `start` are those of the writer (`start`
    as in the owner record); `mtime` is when anything in it last changed."""

    path: Path
    step: int
    host: str
    pid: int
    start: int
    mtime: float


def begin(folder: Path, step: int) -> Path:
    """Make the folder that step N is written into, its name signed by us; returns its path."""
    me = owner.myself()
    path = folder / f"unfinished.{step}.{this_host()}.{me.pid}.{me.start}.{secrets.token_hex(4)}"
    _begun.add(path.name)
    path.mkdir(parents=True)
    return path


def abandon(path: Path) -> None:
    """Remove the folder of a save that failed, as far as that can be done."""
    shutil.rmtree(path, ignore_errors=True)
    _begun.discard(path.name)


def is_begun(path: Path) -> bool:
    """Whether this process is writing into a folder that it made: in another thread, by another
    manager, or under a signal handler that saves."""
    return path.name in _begun


def is_ours(path: Path) -> bool:
    """Whether this is the folder of an unfinished save of ours, and is there."""
    return _UNFINISHED.fullmatch(path.name) is not None and path.is_dir()


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
                fix="look at the folder, and save again",
            )
        )
    if sync:
        sync_dir(path)
    target = folder / step_name(step)
    old = _put_in_place(path, target, step)
    if old is not None:
        try:
            remove(old)
        except OSError as error:  # the new step is in place; `leftovers` finds the old one
            logger.warning("could not remove %s, which was replaced: %s", old, error)
    if sync:
        sync_dir(folder)
    _begun.discard(path.name)
    return target


def this_host() -> str:
    """This host's name in the names of unfinished folders: letters and digits only, so that it
    cannot look like a step."""
    return re.sub(r"[^A-Za-z0-9]", "", owner.myself().host)[:32] or "host"


def remove(path: Path) -> None:
    """Remove a step: first its name, in one move, then its files.

    A process that dies in between leaves a folder that no reader takes for a step; `leftovers`
    finds it. Another remover of the same folder is no error.
    """
    hidden = path.parent / f"removed.{secrets.token_hex(4)}"
    try:
        os.rename(path, hidden)
    except FileNotFoundError:
        return
    if hidden.is_symlink() or hidden.is_file():
        hidden.unlink()
        return
    while True:
        try:
            shutil.rmtree(hidden)
            return
        except FileNotFoundError:
            if not hidden.exists():
                return


def leftovers(folder: Path) -> tuple[list[Unfinished], list[Path]]:
    """Unfinished saves of ours, and folders of ours that only wait for their removal."""
    unfinished, removed = [], []
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    for entry in entries:
        path = Path(entry.path)
        replaced = _REPLACED.fullmatch(entry.name)
        if _REMOVED.fullmatch(entry.name) or (
            replaced and os.path.lexists(folder / step_name(int(replaced[1])))
        ):
            removed.append(path)
        elif (match := _UNFINISHED.fullmatch(entry.name)) and path.is_dir():
            step, host, pid, start = int(match[1]), match[2], int(match[3]), int(match[4])
            unfinished.append(Unfinished(path, step, host, pid, start, _last_change(path)))
    return unfinished, removed


def recover(folder: Path) -> list[Path]:
    """Give steps their names back that were taken away to be replaced, and were not.

    That takes a file system that cannot swap two names, and a process that died or met an error
    just then. Returns the steps; logs nothing.
    """
    back = []
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        match = _REPLACED.fullmatch(name)
        if match is None:
            continue
        target = folder / step_name(int(match[1]))
        if not os.path.lexists(target):
            os.rename(folder / name, target)
            back.append(target)
    return back


def _last_change(path: Path) -> float:
    """When a folder or a file in it last changed; 0 when it has gone."""
    times = [0.0]
    try:
        times.append(path.stat().st_mtime)
        with os.scandir(path) as entries:
            times += [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
    except OSError:
        pass  # it is being removed
    return max(times)


def sync_dir(path: Path) -> None:
    """fsync a directory, so that the names in it survive a crash of the machine."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _put_in_place(new: Path, target: Path, step: int) -> Path | None:
    """Give `new` the name `target`; returns where what had that name is now. Another job may take
    or free the name at any time."""
    while True:
        try:
            os.rename(new, target)
            return None
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        try:
            return _exchange(new, target, step)
        except OSError as error:
            if error.errno not in (errno.ENOENT, *_TAKEN):
                raise


def _exchange(new: Path, target: Path, step: int) -> Path:
    """Put `new` in the place of `target` in one step, or, where the file system cannot, in two.

    Returns where the old one is now. Linux offers this as renameat2 with RENAME_EXCHANGE, which
    Python does not wrap. Without it the old step is out of sight for the moment between two
    renames; for a process that dies just then, `recover` brings it back.
    """
    at_cwd, exchange = -100, 2
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        swap = libc.renameat2
    except (OSError, AttributeError):
        return _replace_in_two(new, target, step)
    if swap(at_cwd, os.fsencode(new), at_cwd, os.fsencode(target), exchange) == 0:
        return new
    code = ctypes.get_errno()
    if code not in _NO_EXCHANGE:
        raise OSError(code, os.strerror(code), str(target))
    return _replace_in_two(new, target, step)


def _replace_in_two(new: Path, target: Path, step: int) -> Path:
    spare = target.parent / f"replaced.{step}.{secrets.token_hex(4)}"
    os.rename(target, spare)
    try:
        os.rename(new, target)
    except OSError:
        # If this fails as well, or another process was faster, `recover` sees to it.
        with contextlib.suppress(OSError):
            os.rename(spare, target)
        raise
    return spare
