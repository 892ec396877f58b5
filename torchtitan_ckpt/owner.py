"""The owner record of an output folder: which process saves into it, so that a second one is told.

The record says host, pid, start time of the process and when it last showed a sign of life. It is
advice, never a lock: a dead owner blocks nobody, and a live one does not either, because every
step is published in one move and two writers cannot mix their files. A `Heartbeat` keeps the sign
of life fresh between saves, however far apart they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = ".owner.json"

# An owner on another host counts as alive this long after its last sign of life, in seconds.
FRESH = 120.0


@dataclass(frozen=True, slots=True)
class Owner:
    """A process. `start` is in clock ticks since boot, which tells a reused pid apart."""

    host: str
    pid: int
    start: int
    heartbeat: float


def myself() -> Owner:
    """The record of this process, with a fresh heartbeat."""
    pid = os.getpid()
    return Owner(socket.gethostname(), pid, _start_of(pid), time.time())


def read(folder: Path) -> Owner | None:
    """The record in a folder; None when there is none, or none that can be read."""
    try:
        data = json.loads((folder / NAME).read_text())
        return Owner(
            str(data["host"]), int(data["pid"]), int(data["start"]), float(data["heartbeat"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(folder: Path) -> None:
    """Put this process's record into a folder.

    In place: a reader that meets a half-written record takes it for none, which harms nobody, and
    no temporary file can be left behind.
    """
    (folder / NAME).write_text(json.dumps(asdict(myself())))


def release(folder: Path) -> None:
    """Remove the record if it is this process's, or can be nobody's. Never raises."""
    found = read(folder)
    if found is None or is_me(found):
        with contextlib.suppress(OSError):
            (folder / NAME).unlink(missing_ok=True)


class Heartbeat:
    """A thread that signs this process's record anew until it is closed, so that another host does
    not take a job for dead between two saves.

    A record of another process is left alone: the next save says that there is one. It takes away
    its own when it ends, and ours is put back. What fails is tried again: a record that cannot be
    written must not disturb the training.
    """

    def __init__(self, folder: Path, every: float = FRESH / 4) -> None:
        self._folder = folder
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-owner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; nothing is written afterwards."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            found = read(self._folder)
            if found is None or is_me(found):
                with contextlib.suppress(OSError):
                    write(self._folder)


def is_me(owner: Owner | None) -> bool:
    """Whether a record is that of this process."""
    mine = myself()
    return owner is not None and (owner.host, owner.pid, owner.start) == (
        mine.host,
        mine.pid,
        mine.start,
    )


def is_alive(owner: Owner) -> bool:
    """Whether the owner still runs: certain on this host, by its heartbeat on another."""
    if owner.host == socket.gethostname():
        return process_alive(owner.pid, owner.start)
    return time.time() - owner.heartbeat < FRESH


def is_gone(owner: Owner) -> bool:
    """Whether the owner has certainly ended; of another host nothing is certain."""
    return owner.host == socket.gethostname() and not process_alive(owner.pid, owner.start)


def process_alive(pid: int, start: int) -> bool:
    """Whether the process of this host that began at `start` still runs and is no zombie.

    In containers a restarted job often gets the pid that the dead one had.
    """
    return _pid_alive(pid) and _start_of(pid) == start


def _pid_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _stat_field(pid, 0) != "Z"


def _start_of(pid: int) -> int:
    field = _stat_field(pid, 19)
    return int(field) if field else 0


def _stat_field(pid: int, index: int) -> str:
    """A field of /proc/PID/stat, counted from the state; empty where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[index]
