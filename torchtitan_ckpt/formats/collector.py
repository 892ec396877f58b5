"""Making many small objects without the garbage collector walking over them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Without garbage collection while many small objects are made, none of them garbage.

    Each collection walks everything alive; over the headers of a large checkpoint that costs more
    than reading them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
