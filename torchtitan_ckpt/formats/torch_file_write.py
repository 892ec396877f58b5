"""Write a `.pt` file entry by entry, in memory bounded by what the caller hands over at a time.

The file is what torch.save writes for a flat dict: an uncompressed zip with `data.pkl`, storages
aligned to 64 bytes. It appears under its name when it is complete, and not before. With a journal,
what an interrupted writer has written is kept, and the next one goes on from there.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import pack
from types import TracebackType
from typing import Any, Protocol

import torch

from torchtitan_ckpt.errors import Problem, SaveError
from torchtitan_ckpt.formats.crc import crc32
from torchtitan_ckpt.formats.hf_file import write_problem
from torchtitan_ckpt.formats.page_cache import open_file
from torchtitan_ckpt.formats.tensor_bytes import memory, plain
from torchtitan_ckpt.formats.torch_file_journal import Done, Journal
from torchtitan_ckpt.manifest import ITEM_SIZE

_ALIGN = 64
_FLAGS = 0x808  # names in UTF-8; sizes and checksum follow the data, as torch.save has it
_WIDE = 0xFFFFFFFF  # sizes and offsets from here on stand in 64-bit fields
_PREFIX = "archive/"
_NOTED = 2**28  # bytes from one note in the journal to the next
_LEGACY = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


class Sink(Protocol):
    """Takes the bytes of one tensor, in row-major order, in any number of pieces."""

    def __call__(self, data: bytes | memoryview) -> None: ...


class _Storage:
    def __init__(self, key: str, dtype: str, numel: int) -> None:
        self.key, self.dtype, self.numel = key, dtype, numel


class _Stub:
    def __init__(self, storage: _Storage, shape: tuple[int, ...]) -> None:
        self.storage, self.shape = storage, shape


class TorchFileWriter:
    """A context manager; leaving it without an exception completes the file.

    >>> with TorchFileWriter(path) as out:                                   # doctest: +SKIP
    ...     out.add("tok_embeddings.weight", tensor)
    ...     with out.tensor("output.weight", (151936, 1024), "bfloat16") as sink:
    ...         sink(block)

    `journal` is a file to keep notes in: `done` are the keys that an earlier writer of the same
    path and journal has written; they are not to be written again. What is written does not stay
    in the page cache (`page_cache`).

    Raises `SaveError` on failures of the file system and when bytes are missing or too many.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sync: bool = True,
        journal: Path | None = None,
    ) -> None:
        self._path = Path(path)
        self._partial = self._path.with_name(f".{self._path.name}.partial")
        self._sync = sync
        self._entries: list[tuple[bytes, int, int, int]] = []  # name, header, size, crc
        self._values: dict[str, Any] = {}
        self._starts: dict[str, int] = {}
        self._storages = 0
        self._journal = None if journal is None else Journal(journal, self._partial)
        self._unnoted: list[Done] = []
        with self._in_words():
            earlier = self._journal.read() if self._journal else []
            self._file = open_file(self._partial, "r+" if earlier else "w")
            for done in earlier:
                self._take(done)
            self._file.seek(self._file.truncate(earlier[-1].end if earlier else 0))
        self.done = frozenset(done.key for done in earlier)

    def __enter__(self) -> TorchFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                with self._in_words():
                    self._finish()
        finally:
            with contextlib.suppress(OSError):
                self._file.close()
            if self._journal is None:
                with contextlib.suppress(OSError):
                    self._partial.unlink()

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Write one whole tensor."""
        tensor = plain(tensor)
        with self.tensor(key, tuple(tensor.shape), str(tensor.dtype)[6:]) as sink:
            sink(memory(tensor))

    @contextlib.contextmanager
    def tensor(self, key: str, shape: tuple[int, ...], dtype: str) -> Iterator[Sink]:
        """Write a tensor in pieces: hand its bytes to the sink, all of them."""
        self._new(key)
        stub = self._stub(shape, dtype)
        nbytes = stub.storage.numel * ITEM_SIZE[dtype]
        with self._in_words():
            with self._entry(f"data/{stub.storage.key}", nbytes) as sink:
                self._starts[key] = self._file.tell()
                yield sink
            self._note(key, stub)
        self._values[key] = stub

    def _stub(self, shape: tuple[int, ...], dtype: str) -> _Stub:
        storage = _Storage(str(self._storages), dtype, math.prod(shape))
        self._storages += 1
        return _Stub(storage, tuple(shape))

    def start(self, key: str) -> int:
        """At which byte of the file the data of a tensor begins that this writer has written."""
        return self._starts[key]

    def flush(self) -> Path:
        """Hand everything to the system; the file as it can be read meanwhile."""
        with self._in_words():
            self._file.flush()
        return self._partial

    def alias(self, key: str, of: str) -> None:
        """A second name for a tensor already written (tied weights): no bytes of its own."""
        self._new(key)
        self._values[key] = self._values[of]

    def value(self, key: str, value: Any) -> None:
        """A value that is no tensor; tensors inside it are written too."""
        self._new(key)
        self._values[key] = value

    def nest(self, paths: Mapping[str, tuple[str | int, ...]]) -> None:
        """Put values under nested keys instead of their own, as DCP's `dcp_to_torch` does.

        To be called after everything was written; keys without a path stay where they are.
        """
        from torch.distributed.checkpoint._traverse import set_element

        nested: dict[str, Any] = {}
        for key, value in self._values.items():
            set_element(nested, tuple(paths.get(key, (key,))), value)
        self._values = nested

    def _new(self, key: str) -> None:
        if key in self._values:
            raise SaveError(
                Problem(code="torch.twice", what=f"two values are called {key}", where=self._where)
            )

    @property
    def _where(self) -> str:
        return str(self._path)

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = Path(error.filename or self._where)
            raise SaveError(write_problem(place, "written", error, "torch.save")) from error

    # The journal

    def _take(self, done: Done) -> None:
        """Count a tensor that an earlier writer has written."""
        stub = self._stub(done.shape, done.dtype)
        name = f"{_PREFIX}data/{stub.storage.key}".encode()
        self._entries.append((name, done.header, done.size, done.crc))
        self._values[done.key] = stub

    def _note(self, key: str, stub: _Stub) -> None:
        if self._journal is None:
            return
        _, header, size, crc = self._entries[-1]
        end = self._file.tell()
        self._unnoted.append(Done(key, stub.shape, stub.storage.dtype, header, size, crc, end))
        if end - self._unnoted[0].header >= _NOTED:
            self._file.flush()
            if self._sync:
                os.fsync(self._file.fileno())
            self._journal.add(self._unnoted, sync=self._sync)
            self._unnoted = []

    # The archive

    @contextlib.contextmanager
    def _entry(self, name: str, size: int) -> Iterator[Sink]:
        header = self._file.tell()
        raw = f"{_PREFIX}{name}".encode()
        wide = size >= _WIDE
        fixed = header + 30 + len(raw) + (20 if wide else 0)
        extra = pack("<HHQQ", 1, 16, 0, 0) if wide else b""
        padding = -(fixed + 4) % _ALIGN
        extra += b"FB" + pack("<H", padding) + b"Z" * padding
        unknown = 0xFFFFFFFF if wide else 0
        numbers = (45, _FLAGS, 0, 0, 0x21, 0, unknown, unknown, len(raw), len(extra))
        self._file.write(pack("<4s5H3I2H", b"PK\x03\x04", *numbers) + raw + extra)
        done = crc = 0

        def sink(data: bytes | memoryview) -> None:
            nonlocal done, crc
            done += len(data)
            if done <= size:
                self._file.write(data)
                crc = crc32(data, crc)

        yield sink
        if done != size:
            raise SaveError(
                Problem(
                    code="torch.bytes",
                    what="other than the announced bytes were handed over",
                    where=f"{self._where}: {name}",
                    expected=f"{size} bytes",
                    actual=f"{done} bytes",
                )
            )
        self._file.write(pack("<4sIQQ" if wide else "<4s3I", b"PK\x07\x08", crc, size, size))
        self._entries.append((raw, header, size, crc))

    def _finish(self) -> None:
        data = self._pickle()
        for name, content in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
            with self._entry(name, len(content)) as sink:
                sink(content)
        start = self._file.tell()
        for raw, header, size, crc in self._entries:
            self._file.write(_directory_entry(raw, header, size, crc))
        length = self._file.tell() - start
        count = len(self._entries)
        end64 = pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start)
        locator = pack("<4sIQI", b"PK\x06\x07", 0, start + length, 1)
        end = pack(
            "<4s4H2IH",
            b"PK\x05\x06",
            0,
            0,
            min(count, 0xFFFF),
            min(count, 0xFFFF),
            min(length, 0xFFFFFFFF),
            min(start, 0xFFFFFFFF),
            0,
        )
        self._file.write(end64 + locator + end)
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)

    def _pickle(self) -> bytes:
        out = io.BytesIO()
        writer = self

        class Pickler(pickle.Pickler):
            def persistent_id(self, value: Any) -> Any:
                if not isinstance(value, _Storage):
                    return None
                name = _LEGACY.get(value.dtype)
                if name is None:
                    kind: Any = torch.UntypedStorage
                    return ("storage", kind, value.key, "cpu", value.numel * ITEM_SIZE[value.dtype])
                return ("storage", getattr(torch, name), value.key, "cpu", value.numel)

            def reducer_override(self, value: Any) -> Any:
                if isinstance(value, torch.Tensor):
                    value = writer._nested(value)
                if isinstance(value, _Stub):
                    return _reduce(value)
                return NotImplemented

        Pickler(out, protocol=2).dump(self._values)
        return out.getvalue()

    def _nested(self, tensor: torch.Tensor) -> _Stub:
        """A tensor inside another value: its bytes are written when it is met."""
        tensor = plain(tensor)
        stub = self._stub(tuple(tensor.shape), str(tensor.dtype)[6:])
        with self._entry(f"data/{stub.storage.key}", tensor.nbytes) as sink:
            sink(memory(tensor))
        return stub


def _reduce(stub: _Stub) -> tuple[Any, tuple[Any, ...]]:
    strides: list[int] = []
    step = 1
    for n in reversed(stub.shape):
        strides.append(step)
        step *= max(n, 1)
    args: tuple[Any, ...] = (
        stub.storage,
        0,
        stub.shape,
        tuple(reversed(strides)),
        False,
        OrderedDict(),
    )
    if stub.storage.dtype in _LEGACY:
        return torch._utils._rebuild_tensor_v2, args
    return torch._utils._rebuild_tensor_v3, (*args, getattr(torch, stub.storage.dtype))


def _directory_entry(raw: bytes, header: int, size: int, crc: int) -> bytes:
    wide = [n for n in (size, size, header) if n >= _WIDE]
    extra = pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size = size if size < _WIDE else 0xFFFFFFFF
    header = header if header < _WIDE else 0xFFFFFFFF
    about = (45, 45, _FLAGS, 0, 0, 0x21, crc, size, size)
    numbers = (*about, len(raw), len(extra), 0, 0, 0, 0, header)
    return pack("<4s6H3I5H2I", b"PK\x01\x02", *numbers) + raw + extra
