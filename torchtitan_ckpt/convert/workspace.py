"""The place where a conversion is written before it gets its name, and how it gets it.

It lies beside the target (one file system, so that renaming is atomic), is hidden, and its name
holds no part of the target's: torchtitan searches folder names for `step-<digits>`. It outlives a
killed run, and the same command goes on from it; another command for the same target begins anew.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash

from torchtitan_ckpt.errors import Problem, SaveError
from torchtitan_ckpt.formats.hf_file import sync_folder, write_problem

PREFIX = ".convert-"


class Workspace:
    """`out/` becomes the target; `journal/` and `files/` are for resuming.

    `word` stands for the source and the options; what another word left behind is removed.
    """

    def __init__(self, target: Path, word: str) -> None:
        self.target, self.word = target, word
        name = xxhash.xxh3_64_hexdigest(str(target.absolute()).encode())
        self.root = target.absolute().parent / f"{PREFIX}{name}"
        self.out, self.journal, self.files = (
            self.root / part for part in ("out", "journal", "files")
        )

    def refuse_taken(self) -> None:
        """The target must not exist, unless it is an empty folder."""
        if not self.target.exists() and not self.target.is_symlink():
            return
        if self.target.is_dir() and not any(self.target.iterdir()):
            return
        raise SaveError(
            Problem(
                code="convert.taken",
                what="the target exists already, and nothing is overwritten",
                where=str(self.target),
                fix="name another target, or remove it first",
            )
        )

    def refuse_full(self, needed: int) -> None:
        """Raise when the file system has less than `needed` bytes, counting what is kept here."""
        place = self.root
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        mine = 0
        if self._own():
            mine = sum(p.stat().st_size for p in self.root.rglob("*") if p.is_file())
        if free + mine < needed:
            raise SaveError(
                Problem(
                    code="convert.no-space",
                    what="there is not enough space for the result",
                    where=str(place),
                    expected=f"{needed} bytes",
                    actual=f"{free} bytes are free",
                    fix="free space, or convert to another disk; nothing was written",
                )
            )

    def free_bytes(self) -> int:
        place = self.root
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def open(self) -> bool:
        """Make the place; True when an earlier run of the same conversion left something."""
        resumed = self._own()
        try:
            if not resumed and self.root.exists():
                shutil.rmtree(self.root)
            for folder in (self.out, self.journal, self.files):
                folder.mkdir(parents=True, exist_ok=True)
            (self.root / "word").write_text(self.word, encoding="utf-8")
        except OSError as error:
            raise SaveError(write_problem(self.root, "made", error)) from error
        return resumed

    def _own(self) -> bool:
        try:
            return (self.root / "word").read_text(encoding="utf-8") == self.word
        except OSError:
            return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second conversion to the same target out; a dead one keeps nobody out."""
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            yield
            return
        path = self.root.with_name(self.root.name + ".lock")
        handle = -1
        try:
            while True:
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Whoever held it before may have removed the file that was opened.
                    if path.exists() and os.path.samestat(os.fstat(handle), os.stat(path)):
                        break
                    os.close(handle)
                except BlockingIOError as error:
                    raise SaveError(self._running()) from error
                except OSError as error:
                    if handle < 0:
                        raise SaveError(write_problem(path, "made", error)) from error
                    break  # a file system without locks
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
        finally:
            if handle >= 0:
                os.close(handle)

    def _running(self) -> Problem:
        return Problem(
            code="convert.running",
            what="another conversion writes to this target",
            where=str(self.target),
            fix="wait for it, or name another target",
        )

    def publish(self, single: str | None, *, sync_files: bool) -> None:
        """Give the finished result its name: the whole folder, or its one file."""
        try:
            self.refuse_taken()
            if single is not None:
                if self.target.is_dir():
                    self.target.rmdir()
                os.replace(self.out / single, self.target)
            else:
                if sync_files:
                    sync_folder(self.out)
                os.replace(self.out, self.target)
            if sync_files:
                sync_folder(self.target.absolute().parent)
        except OSError as error:
            raise SaveError(write_problem(self.target, "put in place", error)) from error
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
