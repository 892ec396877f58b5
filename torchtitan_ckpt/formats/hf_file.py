"""Writing one safetensors file under a name no reader takes, and proving that it arrived.

A file is written as `.<name>.partial`: header first, then dense or strided ranges in any order.
What is written is hashed; `verify` reads everything back once and compares. `publish` gives the
file its name. Several processes may write ranges of one file, each verifying its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path

import torch
import xxhash

from torchtitan_ckpt.errors import Problem, SaveError
from torchtitan_ckpt.formats.hf_boxes import Ints, hull, strides_of
from torchtitan_ckpt.formats.hf_header import Item, build_header
from torchtitan_ckpt.formats.page_cache import Trail, fits, let_go
from torchtitan_ckpt.manifest import ITEM_SIZE, TensorEntry
from torchtitan_ckpt.refusals import meaning_of

PARTIAL = ".partial"
_GATHER = 1 << 20  # small neighbours are written together
_REREAD = 8 << 20

# Where one hashed stretch lies: first byte, outer sizes and strides in bytes, bytes of a run.
_Runs = tuple[int, Ints, Ints, int]


def partial_name(name: str) -> str:
    """The name of an unfinished file: hidden, and not ending as a checkpoint's files do."""
    return f".{name}{PARTIAL}"


class FileWriter:
    """One file being written. Not safe for several threads."""

    def __init__(
        self,
        folder: Path,
        name: str,
        entries: Iterable[TensorEntry],
        metadata: Mapping[str, str],
        *,
        create: bool = True,
        verified: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """With `create` the file is made with its header; without, it must be there already.

        Without `verified` nothing is hashed and `verify` has nothing to compare. With it the file
        stays in the page cache until then, if it fits.
        """
        self.folder, self.name = folder, name
        self.path = folder / partial_name(name)
        rows = [(entry.key, entry.dtype, entry.shape) for entry in entries]
        self.header, self.items = build_header(rows, metadata)
        last = max((item.start + item.length for item in self.items.values()), default=0)
        self.size = max(last, len(self.header))
        self._verified = verified
        self._kept = verified and fits(self.size)
        self._records: list[tuple[_Runs, int]] = []
        self._pending = bytearray()
        self._pending_at = 0
        self._progress = progress
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
        with self._failing("created"):
            self._fd = os.open(self.path, flags, 0o666)
        self._trail = Trail(self._fd)
        if create:
            with self._failing("written"):
                os.ftruncate(self._fd, self.size)
            self.write(0, memoryview(self.header))

    def write(self, offset: int, data: memoryview) -> None:
        """Write a dense range."""
        if len(data) < _GATHER // 4 and offset == self._pending_at + len(self._pending):
            self._pending += data
            if len(self._pending) >= _GATHER:
                self.flush()
            return
        self.flush()
        if len(data) < _GATHER // 4:
            self._pending_at, self._pending = offset, bytearray(data)
            return
        self._write_now(offset, data)

    def write_box(self, item: Item, offsets: Ints, sizes: Ints, data: memoryview) -> None:
        """Write the dense bytes of a box of a tensor to where they belong."""
        width = ITEM_SIZE[item.dtype]
        strides = strides_of(item.shape)
        start = item.start + sum(map(int.__mul__, offsets, strides)) * width
        level = 0
        while hull(item.shape, (*(1,) * level, *sizes[level:])) * width != _dense(
            sizes, level, width
        ):
            level += 1
        if level == 0:
            self.write(start, data)
            return
        self.flush()
        run = _dense(sizes, level, width)
        runs = (start, sizes[:level], tuple(s * width for s in strides[:level]), run)
        for number, at in enumerate(_starts(runs)):
            self._pwrite(at, data[number * run : (number + 1) * run])
        self._remember(runs, data)

    def verify(self) -> None:
        """Read everything that was written here once more; raises SaveError where it differs."""
        self.flush()
        block = memoryview(bytearray(_REREAD))
        for runs, digest in self._records:
            again = xxhash.xxh3_64()
            for start in _starts(runs):
                for at in range(start, start + runs[3], _REREAD):
                    part = block[: min(_REREAD, start + runs[3] - at)]
                    with self._failing("read back"):
                        got = os.preadv(self._fd, [part], at)
                    again.update(part[:got])
            if again.intdigest() != digest:
                raise SaveError(_differs(self.path, runs))

    def sync(self) -> None:
        self.flush()
        with self._failing("synchronised"):
            os.fsync(self._fd)

    def close(self) -> None:
        """Give the descriptor back; the partial file stays."""
        if self._fd < 0:
            return
        try:
            self.flush()
        finally:
            # Whatever close says, the descriptor is gone.
            descriptor, self._fd = self._fd, -1
            let_go(descriptor)
            with self._failing("closed"):
                os.close(descriptor)

    def discard(self) -> None:
        """Close and remove the partial file, whatever its state."""
        self._pending.clear()
        with contextlib.suppress(SaveError):
            self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def flush(self) -> None:
        """Hand gathered small pieces to the system, so that other processes see them."""
        if self._pending:
            data, self._pending = self._pending, bytearray()
            self._write_now(self._pending_at, memoryview(data))

    def _write_now(self, offset: int, data: memoryview) -> None:
        self._pwrite(offset, data)
        self._remember((offset, (), (), len(data)), data)

    def _remember(self, runs: _Runs, data: memoryview) -> None:
        if self._verified:
            self._records.append((runs, xxhash.xxh3_64_intdigest(data)))

    def _pwrite(self, offset: int, data: memoryview) -> None:
        with self._failing("written"):
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
            if not self._kept:
                self._trail.written(offset + done)
        if self._progress is not None:
            self._progress(len(data))

    @contextlib.contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SaveError(write_problem(self.path, verb, error)) from error


def dense_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense CPU tensor; the caller keeps the tensor alive."""
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


def publish(folder: Path, names: Iterable[str]) -> None:
    """Give finished files their names. Raises SaveError when one is not there."""
    for name in names:
        try:
            os.replace(folder / partial_name(name), folder / name)
        except OSError as error:
            raise SaveError(write_problem(folder / name, "put in place", error)) from error


def sync_folder(folder: Path) -> None:
    """Make names durable; file systems that cannot are left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_problem(path: Path, verb: str, error: OSError, code: str = "hf.write") -> Problem:
    """A failure of the system while saving, in words."""
    cause, fix = meaning_of(error)
    return Problem(
        code=code,
        what=f"a file could not be {verb}",
        where=str(path),
        actual=error.strerror or str(error),
        cause=cause,
        fix=fix,
    )


def _dense(sizes: Ints, level: int, width: int) -> int:
    count = width
    for size in sizes[level:]:
        count *= size
    return count


def _starts(runs: _Runs) -> Iterator[int]:
    start, sizes, strides, _ = runs
    for index in product(*map(range, sizes)):
        yield start + sum(map(int.__mul__, index, strides))


def _differs(path: Path, runs: _Runs) -> Problem:
    return Problem(
        code="hf.verify",
        what="what was written reads back differently",
        where=f"{path}, from byte {runs[0]}",
        cause="a failing disk or file system, or another process wrote into the file",
        fix="save to another disk; nothing was put in place",
    )
