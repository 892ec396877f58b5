"""Writing files through the page cache, or past it.

What is written once and not read again pushes out of the page cache what the machine's jobs use,
and the sync at its end waits for all of it together. Linux has a flag for writes that go to the
disk at once and leave nothing behind, since 6.14 and on the file systems that know it; elsewhere
these are ordinary writes. What is read back soon, and fits, is better kept.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing_extensions import Buffer

_RWF_DONTCACHE = 0x80  # include/uapi/linux/fs.h; Python has no name for it
_UNKNOWN = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_BUFFER = 1 << 20
_SHARE = 4  # of the memory that is available, what one result may take


def fits(nbytes: int) -> bool:
    """Whether that much can stay in the page cache until it is read back."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return True
    return nbytes <= available * 1024 // _SHARE


def open_file(path: Path, mode: Literal["w", "r+"] = "w", *, kept: bool) -> io.BufferedWriter:
    """A buffered binary file to write from its beginning, or with `r+` from where one seeks to.

    Raises OSError as `open` and the writes of its file do.
    """
    return io.BufferedWriter(_File(path, mode, kept), _BUFFER)


def pwrite(descriptor: int, data: bytes | memoryview, offset: int, *, kept: bool) -> int:
    """`os.pwrite`, past the page cache unless `kept`; at -1 it writes at the file's position.

    Raises OSError as `os.pwrite` does.
    """
    if not kept and sys.platform == "linux":
        try:
            return os.pwritev(descriptor, [data], offset, _RWF_DONTCACHE)
        except NotImplementedError:
            pass  # a Python built for an old C library
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
    if offset < 0:
        return os.write(descriptor, data)
    return os.pwrite(descriptor, data, offset)


class _File(io.FileIO):
    def __init__(self, path: Path, mode: str, kept: bool) -> None:
        super().__init__(path, mode)
        self._kept = kept

    def write(self, data: Buffer, /) -> int:
        return pwrite(self.fileno(), memoryview(data), -1, kept=self._kept)
