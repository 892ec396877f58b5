"""Which checkpoints are kept, and the thread that removes the others.

Only complete steps count towards `keep_latest_k`. Never removed: the seed, the newest complete
step, the newest full one, a step in use, and any name that is not exactly `step-N`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from torchtitan_ckpt import folder as folders
from torchtitan_ckpt.owner import FRESH, process_alive

logger = logging.getLogger(__name__)


def surplus(
    folder: Path, keep: int, *, in_use: Iterable[int] = (), is_full: Callable[[Path], bool]
) -> list[Path]:
    """Step folders that `keep_latest_k` lets go, oldest first; empty when `keep` is 0.

    `is_full` says whether a step can be resumed; it is asked only until the newest one is found.
    """
    if keep <= 0:
        return []
    steps = folders.list_steps(folder)
    complete = sorted(n for n, path in steps.items() if n > 0 and folders.has_marker(path))
    kept, rest = complete[-keep:], complete[:-keep]
    if not rest:
        return []
    newest_first = [*reversed(kept), *reversed(rest)]
    newest_full = next((n for n in newest_first if is_full(steps[n])), None)
    safe = {newest_full, *in_use}
    return [steps[n] for n in rest if n not in safe]


def remove_leftovers(folder: Path, newest_full: Path | None) -> None:
    """Remove what saves of ours left behind before `newest_full` was written; log each.

    A save that another process still works on is left alone: on this host that is certain, on
    another it is taken to go on until nothing has changed for a while.
    """
    unfinished, removed = folders.leftovers(folder)
    for path in removed:
        _remove_tree(path, "a half-removed step")
    if newest_full is None:
        return
    newest = newest_full.stat().st_mtime
    for item in unfinished:
        if item.mtime < newest and not _goes_on(item, newest):
            _remove_tree(item.path, f"an unfinished save of step {item.step}")


def _goes_on(item: folders.Unfinished, newest: float) -> bool:
    """Whether a process may still be writing."""
    if item.host != folders.this_host():
        return item.mtime + FRESH >= newest
    if item.pid == os.getpid():
        return folders.is_begun(item.path)
    return process_alive(item.pid, item.start)


def _remove_tree(path: Path, what: str) -> None:
    try:
        folders.remove(path)
        logger.info("removed %s, %s", path, what)
    except OSError as error:
        logger.warning("could not remove %s, %s: %s", path, what, error)


class Purger:
    """A thread that removes what `find` returns each time it is asked to.

    A removal that fails is logged and tried again at the next request and at `close`; it never
    stops the thread or the job.
    """

    def __init__(self, find: Callable[[], list[Path]]) -> None:
        self._find = find
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="ckpt-purge", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Look for surplus steps soon; returns at once."""
        self._wake.set()

    def close(self) -> None:
        """Finish what was asked for, and stop."""
        self._stop = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            stop = self._stop
            self._purge()
            if stop:
                return

    def _purge(self) -> None:
        try:
            paths = self._find()
        except Exception as error:  # whatever it is, the job must go on
            logger.warning("could not look for old checkpoints: %s", error)
            return
        for path in paths:
            try:
                folders.remove(path)
                logger.info("removed old checkpoint %s", path)
            except OSError as error:
                logger.warning("could not remove old checkpoint %s, will retry: %s", path, error)
