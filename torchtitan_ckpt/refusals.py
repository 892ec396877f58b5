"""What a refusal of the operating system means, and what to do about it: one table for all.

Readers, writers and the command line put the words into a Problem of their own; this module knows
neither their codes nor their files.
"""

from __future__ import annotations

import errno
from typing import NamedTuple


class Refusal(NamedTuple):
    """The likely cause and the next step."""

    cause: str
    fix: str


_PERMISSION = Refusal(
    "no permission", "correct the permissions of the file and its folder, or run as their owner"
)
_STORAGE = "look at the storage and the system's log, then try again or use another disk"
REFUSALS = {
    errno.ENOSPC: Refusal(
        "the disk is full", "free space, keep fewer checkpoints (keep_latest_k), or write elsewhere"
    ),
    errno.EDQUOT: Refusal("the quota is used up", "free space, or ask for a larger quota"),
    errno.EFBIG: Refusal("the file may not grow so large", "look at ulimit -f and the file system"),
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: Refusal("the file system is read-only", "write elsewhere, or mount it writable"),
    errno.EIO: Refusal("the disk or the network file system failed", _STORAGE),
    errno.ETIMEDOUT: Refusal("the storage did not answer", _STORAGE),
    errno.ESTALE: Refusal("the network file system lost the file", "mount it again"),
    errno.ENOENT: Refusal(
        "something removed it meanwhile, or the nodes do not share the folder",
        "use a folder that every node sees, and see what else removes files there",
    ),
    errno.ENOTDIR: Refusal("a part of the path is a file", "correct the path"),
    errno.EEXIST: Refusal("a file lies where a folder should be", "remove it, or go elsewhere"),
    errno.EISDIR: Refusal("a folder lies where a file should be", "remove it, or go elsewhere"),
    errno.ELOOP: Refusal("a link leads back to itself", "remove the link"),
    errno.ENAMETOOLONG: Refusal("a name is too long", "name it shorter"),
    errno.EMFILE: Refusal("this process has too many files open", "raise ulimit -n"),
    errno.ENFILE: Refusal("the system has too many files open", "close some, or raise fs.file-max"),
}


def meaning_of(error: OSError) -> Refusal:
    """The table's words; where it has none no cause, for the error itself says what is known."""
    return REFUSALS.get(error.errno or 0, Refusal("", _STORAGE))
