"""What values a tensor holds, from its bytes, window by window: NaN, Inf, one value only, zero.

Works on bit patterns, so every dtype costs the same: the extremes of a window as signed and as
unsigned integers say whether anything in it is not finite, and only then is it counted. Statistics
(denormals, exponents, moments) are a second, slower pass for those who ask. Decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_ckpt.manifest import ITEM_SIZE

Words = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """The bits of a floating dtype. Magnitudes from `special` on are not finite; `inf` is the one
    that is infinite, -1 where the dtype has none."""

    bits: int
    mantissa: int
    special: int
    inf: int
    bias: int

    @property
    def mask(self) -> int:
        return (1 << (self.bits - 1)) - 1


LAYOUTS = {
    "float64": Layout(64, 52, 0x7FF << 52, 0x7FF << 52, 1023),
    "float32": Layout(32, 23, 0xFF << 23, 0xFF << 23, 127),
    "float16": Layout(16, 10, 0x1F << 10, 0x1F << 10, 15),
    "bfloat16": Layout(16, 7, 0xFF << 7, 0xFF << 7, 127),
    "float8_e5m2": Layout(8, 2, 0x1F << 2, 0x1F << 2, 15),
    "float8_e4m3fn": Layout(8, 3, 0x7F, -1, 7),
}
# Dtypes with one pattern that is no number.
_ONLY_NAN = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80, "float8_e8m0fnu": 0xFF}
_PARTS = {"complex64": "float32", "complex128": "float64"}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def part_dtype(dtype: str) -> str:
    """The dtype of the numbers an element is made of: complex ones are two floats."""
    return _PARTS.get(dtype, dtype)


@dataclass(slots=True)
class Values:
    """What has been seen of one tensor. `pattern` is the first element's, as a signed integer;
    `varied` says that another one has it not."""

    dtype: str
    count: int = 0
    pattern: int = 0
    varied: bool = False
    nans: int = 0
    infs: int = 0
    first_bad: int | None = None
    stats: Stats | None = None

    def add(self, data: memoryview, at: int = 0) -> None:
        """Look at the bytes of whole elements; `at` is the element that they begin with."""
        dtype = part_dtype(self.dtype)
        size = ITEM_SIZE[dtype]
        words: Words = np.frombuffer(data, dtype=_SIGNED[size])
        if not len(words):
            return
        unsigned = words.view(_UNSIGNED[size])
        layout = LAYOUTS.get(dtype)
        if layout is not None:
            # Positive numbers that are not finite are the largest signed patterns, negative ones
            # the largest unsigned patterns.
            if words.max() >= layout.special or unsigned.max() > layout.special + layout.mask:
                self._bad(unsigned, layout, at)
        elif dtype in _ONLY_NAN:
            self._patterns(unsigned == _ONLY_NAN[dtype], at)
        self._vary(words)
        if self.stats is not None:
            self.stats.add(unsigned, dtype)

    def merge(self, other: Values) -> None:
        if not other.count:
            return
        self.nans += other.nans
        self.infs += other.infs
        if other.first_bad is not None:
            first = self.first_bad
            self.first_bad = other.first_bad if first is None else min(first, other.first_bad)
        if not self.count:
            self.pattern = other.pattern
        self.varied = self.varied or other.varied or self.pattern != other.pattern
        self.count += other.count
        if self.stats is not None and other.stats is not None:
            self.stats.merge(other.stats)

    @property
    def constant(self) -> bool:
        """Whether all elements (at least two) have one bit pattern."""
        return self.count > 1 and not self.varied

    @property
    def zero(self) -> bool:
        return self.count > 0 and not self.varied and self.pattern == 0

    def value(self) -> str:
        """The one value of a constant tensor, for people."""
        return shown(self.pattern, self.dtype)

    def _vary(self, words: Words) -> None:
        if not self.count:
            self.pattern = int(words[0])
        if not self.varied:
            # Two ends decide nearly always; the rest is looked at only where they agree.
            self.varied = bool(words[-1] != self.pattern or (words != self.pattern).any())
        self.count += len(words)

    def _bad(self, words: Words, layout: Layout, at: int) -> None:
        magnitude = words & words.dtype.type(layout.mask)
        if layout.inf >= 0:
            infinite = magnitude == layout.inf
            self.infs += int(np.count_nonzero(infinite))
            bad = magnitude >= layout.inf
            self.nans += int(np.count_nonzero(bad)) - int(np.count_nonzero(infinite))
        else:
            bad = magnitude >= layout.special
            self.nans += int(np.count_nonzero(bad))
        self._first(bad, at)

    def _patterns(self, bad: Words, at: int) -> None:
        found = int(np.count_nonzero(bad))
        if found:
            self.nans += found
            self._first(bad, at)

    def _first(self, bad: Words, at: int) -> None:
        step = ITEM_SIZE[self.dtype] // ITEM_SIZE[part_dtype(self.dtype)]
        if np.any(bad):
            place = at + int(np.argmax(bad)) // step
            self.first_bad = place if self.first_bad is None else min(self.first_bad, place)


@dataclass(slots=True)
class Stats:
    """The slower look: moments, zeros, denormals, and how often each power of two occurs.

    Moments leave out what is not finite. `exponents` maps e to the number of values with
    2**e <= |value| < 2**(e + 1); denormals and zeros are not in it.
    """

    finite: int = 0
    total: float = 0.0
    squares: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf
    zeros: int = 0
    denormals: int = 0
    exponents: dict[int, int] = field(default_factory=dict)

    def add(self, words: Words, dtype: str) -> None:
        layout = LAYOUTS.get(dtype)
        if layout is not None:
            self._bits(words, layout)
        values = as_float64(words, dtype)
        values = values[np.isfinite(values)]
        if layout is None:
            self.zeros += int(np.count_nonzero(values == 0))
        if len(values):
            self.finite += len(values)
            self.total += float(values.sum())
            self.squares += float(np.square(values).sum())
            self.smallest = min(self.smallest, float(values.min()))
            self.largest = max(self.largest, float(values.max()))

    def merge(self, other: Stats) -> None:
        self.finite += other.finite
        self.total += other.total
        self.squares += other.squares
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
        self.zeros += other.zeros
        self.denormals += other.denormals
        for exponent, count in other.exponents.items():
            self.exponents[exponent] = self.exponents.get(exponent, 0) + count

    @property
    def mean(self) -> float:
        return self.total / self.finite if self.finite else math.nan

    @property
    def std(self) -> float:
        if not self.finite:
            return math.nan
        return math.sqrt(max(self.squares / self.finite - self.mean**2, 0.0))

    def _bits(self, words: Words, layout: Layout) -> None:
        magnitude = words & words.dtype.type(layout.mask)
        self.zeros += int(np.count_nonzero(magnitude == 0))
        biased = (magnitude >> words.dtype.type(layout.mantissa)).astype(np.int64)
        counts = np.bincount(biased)
        self.denormals += int(counts[0]) - int(np.count_nonzero(magnitude == 0))
        top = (layout.special >> layout.mantissa) + (0 if layout.inf >= 0 else 1)
        for exponent in np.nonzero(counts)[0]:
            if 0 < exponent < top:
                e = int(exponent) - layout.bias
                self.exponents[e] = self.exponents.get(e, 0) + int(counts[exponent])


def as_float64(words: Words, dtype: str) -> NDArray[np.float64]:
    """Bit patterns of any dtype but float4 as float64 values."""
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.startswith("float8"):
        import torch

        raw = torch.from_numpy(np.ascontiguousarray(words)).view(getattr(torch, dtype))
        wide: NDArray[np.float64] = raw.to(torch.float32).double().numpy()
        return wide
    if dtype == "float4_e2m1fn_x2":
        return np.full(len(words), np.nan)
    return words.view(np.dtype(dtype)).astype(np.float64)


def shown(pattern: int, dtype: str) -> str:
    """A bit pattern as the value it stands for."""
    dtype = part_dtype(dtype)
    size = ITEM_SIZE[dtype]
    words = np.array([pattern], dtype=_SIGNED[size]).view(_UNSIGNED[size])
    if dtype == "bool":
        return str(bool(words[0]))
    if "int" in dtype:
        return str(int(words.view(np.dtype(dtype))[0]))
    return f"{float(as_float64(words, dtype)[0]):g}"


def coordinate(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The coordinate of an element counted in row-major order."""
    out = []
    for size in reversed(shape):
        out.append(element % size if size else 0)
        element //= max(size, 1)
    return tuple(reversed(out))
