"""What a checkpoint holds - keys, shapes, dtypes, where each shard lies - and never its data.

Every format describes itself as a `Manifest`; comparing, planning, verifying and converting all
start from one. Dtypes are torch's names without the prefix (`bfloat16`, `float8_e4m3fn`), so that
this module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# Bytes of one element. float4_e2m1fn_x2 holds two values a byte and counts as one.
ITEM_SIZE: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float4_e2m1fn_x2": 1,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint64": 8,
        "uint32": 4,
        "uint16": 2,
        "uint8": 1,
        "bool": 1,
        "complex64": 8,
        "complex128": 16,
    }
)


def is_floating(dtype: str) -> bool:
    """Whether a dtype name is a floating one (casts and export dtypes concern only these)."""
    return dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor and where its bytes lie.

    `offsets` and `sizes` are in elements, one number a dimension. `file` is relative to the
    checkpoint. `byte_offset` and `byte_length` are those of the stored item, which for DCP is a
    small zip archive around the payload.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    byte_offset: int
    byte_length: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its global shape, its dtype, and its shards (one, for unsharded formats)."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_SIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A value that is not a tensor (a pickle in DCP and `.pt`)."""

    key: str
    file: str
    byte_offset: int
    byte_length: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything known of a checkpoint without reading data. `files` maps names to bytes."""

    path: str
    format: str
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, ObjectEntry] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    info: Mapping[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self.tensors) | frozenset(self.objects)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())
