"""stdout and stderr of a program of ours: there, able to take any character, and never a reason to
stop.

A job under a daemon has them closed. Then the next file that is opened gets the number 1 or 2, and
what C++ prints goes into it: into a checkpoint, for example.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def settle() -> None:
    """Open what is closed (to nowhere), and escape what the encoding of a stream lacks."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, "w", errors="backslashreplace", closefd=False))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard(stream: TextIO) -> None:
    """Send nowhere what is written to `stream` from now on, and what waits in its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
