"""How many bytes an item takes in a DCP file: torch.save's archive around a payload, to the byte.

An archive's records are aligned to 64 bytes. A small real archive of the same dtype, number of
dimensions and remainder tells the length of a large one, once the digits of the larger shape are
counted in. Nothing large is ever allocated.
"""

from __future__ import annotations

import io
import math
import zipfile
from functools import lru_cache
from typing import Any

from torchtitan_ckpt.manifest import ITEM_SIZE

# From here on the archive's directory has 64-bit sizes.
_ZIP64 = 2**32
_ALIGN = 64


class _Counter(io.RawIOBase):
    """A sink that keeps nothing but the count."""

    size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self.size += count
        return count


@lru_cache(maxsize=65536)
def tensor_item_bytes(shape: tuple[int, ...], dtype: str = "float32") -> int:
    """The bytes of a stored contiguous tensor."""
    item = ITEM_SIZE[dtype]
    nbytes = math.prod(shape) * item
    small = (nbytes % _ALIGN + (_ALIGN if nbytes else 0)) // item
    sample = (small,) + (1,) * (len(shape) - 1) if shape else ()
    overhead, pickled = _sample(sample, dtype)
    longer = _digits(shape) - _digits(sample)
    size = nbytes + overhead + _head(pickled + longer) - _head(pickled)
    return size + _zip64_extra() if nbytes >= _ZIP64 else size


@lru_cache(maxsize=4096)
def _sample(shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """(bytes beside the payload, bytes of the pickle) of a real archive."""
    import torch

    value = torch.zeros(shape, dtype=getattr(torch, dtype))
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        pickled = next(i.file_size for i in archive.infolist() if i.filename.endswith("data.pkl"))
    return buffer.getbuffer().nbytes - value.numel() * value.element_size(), pickled


def _head(pickled: int) -> int:
    """Where the record after the pickle begins: 16 + 30 + 23 + 4 bytes of headers, aligned."""
    return -(-(_ALIGN + pickled + 73) // _ALIGN) * _ALIGN


def _digits(shape: tuple[int, ...]) -> int:
    """Bytes that a pickle spends on a contiguous tensor's shape, strides and element count."""
    numbers = [*shape, math.prod(shape)]
    stride = 1
    for n in reversed(shape):
        numbers.append(stride)
        stride *= max(n, 1)
    return sum(integer_bytes(n) for n in numbers)


def integer_bytes(n: int) -> int:
    """What a pickle spends on a number."""
    if n < 2**31:
        return 2 if n < 2**8 else 3 if n < 2**16 else 5
    return 2 + n.bit_length() // 8 + 1


@lru_cache(maxsize=1)
def _zip64_extra() -> int:
    """What the 64-bit directory adds, measured once."""
    import torch

    crc = torch.serialization.get_crc32_options()
    # Without checksums torch hands the bytes on unread, so the memory is never really taken.
    torch.serialization.set_crc32_options(False)
    try:
        payload = _ZIP64 + _ALIGN
        return (
            _saved(torch.empty(payload, dtype=torch.uint8))
            - payload
            - _sample((_ALIGN,), "uint8")[0]
        )
    finally:
        torch.serialization.set_crc32_options(crc)


def object_item_bytes(value: Any) -> int:
    """The bytes of a stored value that is not a tensor."""
    return _saved(value)


def _saved(value: Any) -> int:
    import torch

    sink = _Counter()
    torch.save(value, sink)  # type: ignore[arg-type]
    return sink.size
