"""Files that somebody else made, before anything is known of them: opened only where they are
regular files (a pipe would make a reader wait for ever, a device read without end), small ones read
up to a limit, links not followed out of the folder. Raises `OSError` and `ValueError`; the callers
know the words.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

SMALL = 64 * 2**20  # a config or an index that somebody reads whole


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor of a regular file. Raises `OSError` for what is none."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return descriptor


def read_json(path: Path, limit: int = SMALL) -> Any:
    """What a JSON file holds. Raises `OSError`, or `ValueError` for what is no JSON or too much."""
    with open(open_regular(path), "rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    try:
        return json.loads(raw.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def leaves(root: Path, name: str) -> bool:
    """Whether a name inside `root` is a link out of it.

    Links may stay inside the folder, or go where the Hugging Face cache puts its files: from
    `snapshots/<revision>/` to the `blobs/` beside `snapshots`. Raises what `Path.resolve` raises.
    """
    base, target = root.resolve(), (root / name).resolve()
    blobs = base.parent.parent / "blobs" if base.parent.name == "snapshots" else base
    return base not in target.parents and blobs not in target.parents
