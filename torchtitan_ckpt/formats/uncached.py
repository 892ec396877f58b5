"""Files that are written towards the disk at once and leave nothing behind in the page cache.

What a converter writes it writes once. In the page cache that pushes out what the machine's jobs
use, and the sync at the end waits for all of it together. Linux has a flag for such writes since
6.14, on the file systems that know it; elsewhere these are ordinary writes.
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


def open_uncached(path: Path, mode: Literal["w", "r+"] = "w") -> io.BufferedWriter:
    """A buffered binary file to write from its beginning, or with `r+` from where one seeks to.

    Raises OSError as `open` and the writes of its file do.
    """
    return io.BufferedWriter(_Uncached(path, mode), _BUFFER)


def pwrite(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """`os.pwrite` past the page cache; an `offset` of -1 is the file's position.

    Raises OSError as `os.pwrite` does.
    """
    if sys.platform == "linux":
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


class _Uncached(io.FileIO):
    def write(self, data: Buffer, /) -> int:
        return pwrite(self.fileno(), memoryview(data), -1)
