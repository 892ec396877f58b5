"""Two tensors, window by window: how many elements differ, by how much, the first and the worst.

Bits decide: NaN equals NaN of the same bits, and -0.0 is not 0.0. Where the dtypes differ, the
wider one is rounded to the narrower and compared there. Fast when right: equal windows cost one
comparison of memory, and coordinates are looked for only where it fails.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchtitan_ckpt.manifest import ITEM_SIZE, is_floating
from torchtitan_ckpt.scan import as_float64

Ints = tuple[int, ...]
Array = NDArray[Any]
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOWER = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def _memcmp() -> Any:
    """The C library's memcmp, which lets other threads run; None where it is not found."""
    try:
        found = ctypes.CDLL(None).memcmp
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return found


_MEMCMP = _memcmp()


@dataclass(frozen=True, slots=True)
class Spot:
    """One element that differs: its coordinate, both values, both bit patterns (hexadecimal)."""

    at: Ints
    a: str
    b: str
    bits_a: str
    bits_b: str
    apart: float


@dataclass(slots=True)
class Tally:
    """What comparing two tensors has found so far.

    `differing` elements have other bits (after rounding to the narrower dtype); `far` of them are
    beyond the tolerance. `exact` says that no rounding was needed. `rounded` are (dtype, side):
    every differing value of that side is the other's, rounded to that dtype.
    """

    dtype_a: str
    dtype_b: str
    count: int = 0
    differing: int = 0
    far: int = 0
    one_nan: int = 0
    max_abs: float = 0.0
    max_ulps: int = 0
    exact: bool = True
    first: Spot | None = None
    worst: Spot | None = None
    rounded: frozenset[tuple[str, str]] | None = None

    @property
    def narrow(self) -> str:
        """The dtype in which both are compared."""
        return narrower(self.dtype_a, self.dtype_b)

    @property
    def verdict(self) -> str:
        if self.far or self.one_nan:
            return "different"
        if self.differing:
            return "close"
        return "equal" if self.dtype_a == self.dtype_b else "dtype"

    def merge(self, other: Tally) -> None:
        """Add what was found in another part of the same tensors."""
        self.count += other.count
        self.differing += other.differing
        self.far += other.far
        self.one_nan += other.one_nan
        self.max_abs = max(self.max_abs, other.max_abs)
        self.max_ulps = max(self.max_ulps, other.max_ulps)
        self.exact = self.exact and other.exact
        if other.first and (self.first is None or other.first.at < self.first.at):
            self.first = other.first
        if other.worst and (self.worst is None or other.worst.apart > self.worst.apart):
            self.worst = other.worst
        if other.rounded is not None:
            mine = self.rounded
            self.rounded = other.rounded if mine is None else mine & other.rounded


def narrower(a: str, b: str) -> str:
    """The dtype of fewer bits; of two floats before an integer, of two equals the second."""
    if is_floating(a) != is_floating(b):
        return a if is_floating(a) else b
    return a if ITEM_SIZE[a] < ITEM_SIZE[b] else b


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Elements this near count as close: `ulps` units in the last place of the narrower dtype, or
    `atol` in absolute terms."""

    ulps: int = 4
    atol: float = 0.0


@dataclass(slots=True)
class Window:
    """Compares dense CPU tensors of equal shape; `add` returns what was found."""

    tolerance: Tolerance = field(default_factory=Tolerance)

    def add(self, a: torch.Tensor, b: torch.Tensor, offsets: Ints) -> Tally:
        """Compare two boxes that begin at `offsets` of their tensors."""
        tally = Tally(_name(a), _name(b), count=a.numel())
        if not a.numel():
            return tally
        if a.dtype == b.dtype:
            if same_memory(a, b):
                return tally
            self._differ(tally, a, b, a, b, offsets)
            return tally
        narrow = getattr(torch, tally.narrow)
        near_a, near_b = a.to(narrow), b.to(narrow)
        wide, low = (a, near_a) if b.dtype == narrow else (b, near_b)
        tally.exact = bool(torch.equal(_bits(low.to(wide.dtype)), _bits(wide)))
        if not same_memory(near_a, near_b):
            self._differ(tally, a, b, near_a, near_b, offsets)
        return tally

    def _differ(
        self,
        tally: Tally,
        a: torch.Tensor,
        b: torch.Tensor,
        near_a: torch.Tensor,
        near_b: torch.Tensor,
        offsets: Ints,
    ) -> None:
        shape = tuple(a.shape)
        words_a, words_b = _words(near_a), _words(near_b)
        parts = words_a.size // a.numel()
        places = np.nonzero((words_a != words_b).reshape(-1, parts).any(axis=1))[0]
        if not len(places):
            return
        kind = tally.narrow
        floating = is_floating(kind)
        value_a, value_b = (_wide(t.reshape(-1)[torch.from_numpy(places)]) for t in (a, b))
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(value_a - value_b)
        apart[value_a == value_b] = 0.0
        nan_a, nan_b = np.isnan(value_a), np.isnan(value_b)
        apart[nan_a & nan_b] = 0.0
        apart[nan_a ^ nan_b] = np.inf
        tally.differing = len(places)
        tally.one_nan = int(np.count_nonzero(nan_a ^ nan_b))
        tally.max_abs = float(apart[~(nan_a ^ nan_b)].max(initial=0.0))
        far = apart > self.tolerance.atol
        if floating and parts == 1:
            ulps = np.abs(_ordered(words_a[places], kind) - _ordered(words_b[places], kind))
            ulps[nan_a & nan_b] = 0
            known = ulps[~(nan_a | nan_b)]
            tally.max_ulps = int(known.max()) if len(known) else 0
            far &= ulps > self.tolerance.ulps
        tally.far = int(np.count_nonzero(far))
        tally.rounded = self._rounded(value_a, value_b, a, b, places) if floating else frozenset()
        for name, place in (("first", 0), ("worst", int(np.argmax(apart)))):
            setattr(
                tally, name, _spot(a, b, int(places[place]), float(apart[place]), shape, offsets)
            )

    @staticmethod
    def _rounded(
        value_a: Array, value_b: Array, a: torch.Tensor, b: torch.Tensor, places: Array
    ) -> frozenset[tuple[str, str]]:
        found = set()
        for name in _LOWER:
            dtype = getattr(torch, name)
            for side, rough, fine in (("b", value_b, value_a), ("a", value_a, value_b)):
                if dtype.itemsize >= min(a.element_size(), b.element_size()):
                    continue
                # A glance at a few values spares the rest of them where it cannot be.
                if all(_is_rounded(fine[:n], rough[:n], dtype) for n in (64, len(fine))):
                    found.add((name, side))
        return frozenset(found)


def _is_rounded(fine: Array, rough: Array, dtype: torch.dtype) -> bool:
    low = torch.from_numpy(fine).float().to(dtype).double().numpy()
    return bool(np.array_equal(low, rough, equal_nan=True))


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors of one dtype and shape have the same bits."""
    a, b = a.contiguous(), b.contiguous()
    return same_at(a.data_ptr(), b.data_ptr(), a.numel() * a.element_size())


def same_at(a: int, b: int, size: int) -> bool:
    """Whether `size` bytes at two addresses are the same."""
    if _MEMCMP is None:
        return ctypes.string_at(a, size) == ctypes.string_at(b, size)
    return not size or _MEMCMP(a, b, size) == 0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _words(tensor: torch.Tensor) -> Array:
    """The bit patterns of a tensor, flat; complex elements are two."""
    flat = tensor.contiguous().reshape(-1)
    size = flat.element_size()
    if flat.is_complex():
        size //= 2
    words: Array = flat.view(_SIGNED[min(size, 8)]).numpy()
    return words


def _wide(tensor: torch.Tensor) -> NDArray[np.float64]:
    """Values as float64, complex ones by magnitude; float4 by its codes."""
    if tensor.is_complex():
        tensor = tensor.abs()
    kind = _name(tensor)
    if kind.endswith("_x2"):
        tensor = tensor.view(torch.uint8)
        kind = "uint8"
    words = _words(tensor)
    unsigned = words.view(words.dtype.str.replace("i", "u"))
    return as_float64(unsigned, kind).copy()


def _ordered(words: Array, kind: str) -> Array:
    """Bit patterns of floats as integers in the order of their values, -0.0 and 0.0 as one."""
    wide = words.astype(np.int64)
    if kind in ("float8_e8m0fnu", "float4_e2m1fn_x2"):
        return wide & 0xFF
    lowest = -(1 << (8 * words.dtype.itemsize - 1))
    if words.dtype.itemsize == 8:
        # Half of each, so that no difference of two overflows.
        return np.where(wide < 0, -(wide & 0x7FFF_FFFF_FFFF_FFFF), wide) // 2
    return np.where(wide < 0, lowest - wide, wide)


def _spot(
    a: torch.Tensor, b: torch.Tensor, place: int, apart: float, shape: Ints, offsets: Ints
) -> Spot:
    rest, local = place, []
    for size in reversed(shape):
        local.append(rest % size)
        rest //= size
    at = tuple(o + i for o, i in zip(offsets, reversed(local), strict=True))
    one, two = (t.reshape(-1)[place : place + 1] for t in (a, b))
    return Spot(at, _text(one), _text(two), _hex(one), _hex(two), apart)


def _text(one: torch.Tensor) -> str:
    if _name(one).endswith("_x2"):
        return _hex(one)
    value = one.to(torch.float64).item() if one.is_floating_point() else one.item()
    if isinstance(value, float) and not math.isnan(value):
        return f"{value:.9g}"
    return str(value)


def _hex(one: torch.Tensor) -> str:
    return "0x" + bytes(_bits(one).numpy().tobytes()[::-1]).hex()


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
