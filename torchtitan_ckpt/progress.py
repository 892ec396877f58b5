"""Bars for work that lasts, on stderr where that is a terminal; elsewhere nothing is drawn.

A bar shows itself only when the work has lasted a while, so that short work leaves no trace, and it
shows itself even if no byte has moved by then: storage that hangs is when one wants to know.
Imports rich when a bar is drawn, and never torch.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Seconds after which a bar appears: what may take over two of them is still under way by then.
AFTER = 1.0


class Bar:
    """Rows of work, each with bytes done, rate and remaining time. Any thread may tell it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._drawn = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,  # a job's own lines are none of a bar's business
            redirect_stderr=False,
        )
        self._rows: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._last = ""
        self._timer = threading.Timer(AFTER, self._drawn.start)
        self._timer.daemon = True

    def start(self) -> None:
        """Count the seconds until the bar appears from now."""
        self._timer.start()

    def stop(self) -> None:
        """Take the bar away."""
        self._timer.cancel()
        self._timer.join()
        self._drawn.stop()

    def told(self, what: str, done: int, total: int | None) -> None:
        """`done` of `total` bytes of some work."""
        self._drawn.update(self._row(what, total), completed=done, total=total)

    def advance(self, count: int) -> None:
        """So many bytes more of the work that was named last."""
        self._drawn.advance(self._row(self._last, None), count)

    def _row(self, what: str, total: int | None) -> Any:
        with self._lock:
            if what not in self._rows:
                self._rows[what] = self._drawn.add_task(what, total=total)
            self._last = what
            return self._rows[what]


def _on_terminal() -> bool:
    """Whether stderr is a terminal. Under a daemon it is closed, or not there at all."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


@contextmanager
def bar(what: str = "", total: int | None = None, *, wanted: bool = True) -> Iterator[Bar | None]:
    """A bar while the block runs; None where stderr is no terminal, or it is not `wanted`."""
    if not wanted or not _on_terminal():
        yield None
        return
    drawn = Bar()
    if what:
        drawn.told(what, 0, total)
    drawn.start()
    try:
        yield drawn
    finally:
        drawn.stop()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A moving line while the block runs, for work of which nobody knows how much is done."""
    if not _on_terminal():
        yield
        return
    from rich.console import Console
    from rich.status import Status

    line = Status(what, console=Console(stderr=True))
    timer = threading.Timer(AFTER, line.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        line.stop()


class Lines:
    """The same for where there is no terminal, such as the log of a CI run: lines on stderr.

    A line when a stage begins, and one now and then while it lasts, so that nobody waits for
    minutes before a silent screen; work that ends within two seconds says nothing.
    """

    FIRST, NEXT, AGAIN = 2.0, 1.0, 15.0  # seconds: the first line, between stages, within one

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self._stage = self._said = ""
        self._now = ""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._keep_reminding, name="progress", daemon=True)
        self._watch.start()

    def at(self, stage: str, detail: str) -> None:
        """Work has come to `stage`; `detail` says where in it."""
        with self._lock:
            self._stage, self._now = stage, f"{stage}: {detail}"
            quiet = time.monotonic() - self._last
            if stage != self._said and quiet >= (self.NEXT if self._said else self.FIRST):
                self._say()

    def stop(self) -> None:
        """Say nothing more."""
        self._over.set()
        self._watch.join()

    def remind(self) -> None:
        """Say where the work stands if nothing was said for long."""
        with self._lock:
            quiet = time.monotonic() - self._last
            if self._now and quiet >= (self.AGAIN if self._said else self.FIRST):
                self._say()

    def _keep_reminding(self) -> None:
        while not self._over.wait(0.5):
            self.remind()

    def _say(self) -> None:
        self._last, self._said = time.monotonic(), self._stage
        print(f"{self._last - self._begun:6.0f} s  {self._now}", file=sys.stderr, flush=True)
