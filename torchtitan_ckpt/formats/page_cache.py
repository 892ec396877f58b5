"""Writing large files without filling the page cache.

What is written once pushes out of the page cache what the machine's jobs use, and the sync at its
end waits for all of it together. So the system is asked, some way behind the writing, to write
what it has and to let go of it; the way is long enough to read a piece back while it is there.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUFFER = 1 << 20
_STRIDE = 8 * 2**20  # bytes from one request to the next
_TRAIL = 64 * 2**20  # bytes behind the writing that stay
_SHARE = 4  # of the memory that is available, what one result may take


def fits(nbytes: int) -> bool:
    """Whether that much can stay in the page cache until it is read back."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return True
    return nbytes <= available * 1024 // _SHARE


class Trail:
    """What of a file that is being written lies in the page cache: the last of it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._end = 0

    def written(self, end: int) -> None:
        """The file was written up to this byte."""
        if end - self._end >= _STRIDE:
            self._end = end
            if end > _TRAIL:
                let_go(self._descriptor, end - _TRAIL)


def let_go(descriptor: int, end: int = 0) -> None:
    """Start writing what of a file is not on the disk up to `end` (0: all), and drop what is."""
    _advise(descriptor, end, "POSIX_FADV_DONTNEED")


def read_no_further(descriptor: int) -> None:
    """Have the system read what is asked for and nothing after it."""
    _advise(descriptor, 0, "POSIX_FADV_RANDOM")


def _advise(descriptor: int, end: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):  # Linux and some others
        with contextlib.suppress(OSError):  # a system may refuse advice, and does as it always did
            os.posix_fadvise(descriptor, 0, end, getattr(os, advice))


def open_file(path: Path, mode: Literal["w", "r+"] = "w") -> io.BufferedWriter:
    """A buffered binary file, to write from its beginning or with `r+` from where one seeks to.

    Raises OSError as `open` and the writes of its file do.
    """
    return io.BufferedWriter(_File(path, mode), _BUFFER)


class _File(io.FileIO):
    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._trail = Trail(self.fileno())

    def write(self, data: Buffer, /) -> int:
        done = os.write(self.fileno(), data)
        self._trail.written(self.tell())
        return done

    def close(self) -> None:
        if not self.closed:
            let_go(self.fileno())
        super().close()
