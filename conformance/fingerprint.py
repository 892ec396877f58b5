"""Tensors whose values say where they belong, for every dtype, bit for bit.

Two kinds. `noise` holds every bit pattern of numbers, and a canonical NaN: what is lost by a cast
or cleaned away shows. `Positions` numbers all elements of a state dict and writes the numbers in
digits, one digit a pass, as values that bf16, fp16, fp32 and fp64 hold exactly; so each element of
a result can be decoded to the key and the coordinate it came from, however the adapter moved it.
Nothing here compares or judges.
"""

from __future__ import annotations

import bisect
import functools
import math
import zlib
from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch

from conformance.template import Leaf

State = dict[str, torch.Tensor]

# Bits of position that one element can hold per pass. Wide types share one code of 12 bits
# (sign, 4 bits of exponent around 1.0, 7 bits of mantissa), so a declared cast between them does
# not disturb it. Narrow types count up through their finite, non-negative byte codes.
_WIDE = 12
_NARROW = {
    "bool": 1,
    "uint8": 7,
    "int8": 7,
    "float8_e4m3fn": 6,
    "float8_e5m2": 6,
    "float8_e4m3fnuz": 6,
    "float8_e5m2fnuz": 6,
    "float8_e8m0fnu": 7,
    "float4_e2m1fn_x2": 7,
}
# Elements that are numbered at a time: new memory for a whole stack of experts takes longer.
_PIECE = 1 << 17
_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a manifest's dtype name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers, on the CPU, so that NaN equals itself and -0.0 is not 0.0."""
    tensor = tensor.detach().resolve_neg().resolve_conj().contiguous().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INT_OF_SIZE[tensor.element_size()])


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The bits with one NaN for all: which of them a cast makes depends on the machine's code."""
    return bits(tensor.masked_fill(tensor.isnan(), math.nan) if has_nan(tensor) else tensor)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether dtype, element count and every bit in order are equal (shapes may differ).

    But for which NaN a NaN is.
    """
    if one.dtype != two.dtype or one.numel() != two.numel():
        return False
    return any(torch.equal(of(one).reshape(-1), of(two).reshape(-1)) for of in (bits, settled))


def blank(leaves: Mapping[str, Leaf], device: str = "meta") -> State:
    """Zeros, by default without any memory: where only keys, shapes and dtypes matter."""
    # Where nothing is held, `zeros` is `empty` at several times the price.
    make = torch.empty if device == "meta" else torch.zeros
    return {
        key: make(leaf.shape, dtype=torch_dtype(leaf.dtype), device=device)
        for key, leaf in leaves.items()
    }


def noise(leaves: Mapping[str, Leaf], seed: int, tied: Mapping[str, str] | None = None) -> State:
    """Every bit pattern of numbers, with the values of `edges` in front, some of them or all.

    An alias in `tied` holds the values of what it is tied to.
    """
    tied = tied or {}
    state = {key: _noise(tied.get(key, key), leaf, seed) for key, leaf in leaves.items()}
    return without_nan(state, {*tied, *tied.values()})


def without_nan(state: State, keys: Container[str]) -> State:
    """The state with 0 for NaN under `keys`: what may be compared with ==, which no NaN passes."""
    return {
        key: value.masked_fill(value.isnan(), 0) if key in keys and has_nan(value) else value
        for key, value in state.items()
    }


def has_nan(value: torch.Tensor) -> bool:
    """Whether a float of more than a byte is NaN somewhere."""
    wide = value.is_floating_point() and value.element_size() > 1
    return wide and bool(value.isnan().any())


EDGES = 8


@functools.lru_cache
def edges(dtype: torch.dtype) -> torch.Tensor:
    """What arithmetic and clean-ups do not keep: -0.0, NaN, the infinities, denormals, the ends."""
    info = torch.finfo(dtype)
    inf, least = math.inf, info.smallest_normal
    found = [-0.0, least * info.eps, math.nan, inf, -inf, info.max, least / 2, -1.0]
    assert len(found) == EDGES
    return torch.tensor(found, dtype=torch.float64).to(dtype)


def _noise(key: str, leaf: Leaf, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(key.encode()))
    dtype = torch_dtype(leaf.dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, leaf.shape, generator=generator).bool()
    size = dtype.itemsize
    words = torch.empty(-(-leaf.numel * size // 8), dtype=torch.int64)
    words.random_(-(1 << 63), None, generator=generator)
    raw = words.view(torch.uint8)[: leaf.numel * size]
    flat = raw.view(dtype)
    if leaf.numel and (flat.is_floating_point() or flat.is_complex()):
        # Byte-sized types have no isnan everywhere; their values fit float32.
        wrong = torch.isnan(flat.float() if size == 1 else flat)
        # Whole numbers of the element's size; a complex128 is two of them.
        whole = raw.view(_INT_OF_SIZE[min(size, 8)]).view(leaf.numel, -1)
        whole.masked_fill_(wrong.unsqueeze(1), 0)
        if flat.is_floating_point() and size > 1:
            # Two elements of a small tensor are its own, and each key begins with another edge.
            some = edges(dtype).roll(zlib.crc32(key.encode()) % EDGES)[: max(0, leaf.numel - 2)]
            flat[: len(some)] = some
    return flat.reshape(leaf.shape)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an element belongs."""

    key: str
    coordinate: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.key}[{', '.join(map(str, self.coordinate))}]"


class Positions:
    """All elements of a state dict, numbered from 1; 0 is an element from nowhere.

    `tied` names aliases: they hold the numbers of what they are tied to.
    """

    def __init__(self, leaves: Mapping[str, Leaf], tied: Mapping[str, str] | None = None) -> None:
        self.leaves = dict(leaves)
        tied = {k: v for k, v in (tied or {}).items() if k in leaves and v in leaves}
        # Kinds of one code after another, so that a kind's own numbers are global ones less a
        # constant: eleven booleans then need four passes, whatever else the model holds.
        kinds = {_kind(leaf.dtype): None for leaf in self.leaves.values()}
        self.keys = [
            key
            for kind in kinds
            for key, leaf in self.leaves.items()
            if key not in tied and _kind(leaf.dtype) == kind
        ]
        self.bases: list[int] = []
        self._spaces: dict[str, tuple[int, int]] = {}
        total = 1
        for key in self.keys:
            leaf = self.leaves[key]
            first, size = self._spaces.get(_kind(leaf.dtype), (total - 1, 0))
            self._spaces[_kind(leaf.dtype)] = (first, size + leaf.numel)
            self.bases.append(total)
            total += leaf.numel
        self.total = total
        self._base = dict(zip(self.keys, self.bases, strict=True))
        self._base.update({alias: self._base[source] for alias, source in tied.items()})
        self._tied = tied
        self.passes = max(
            (-(-size.bit_length() // _bits(kind)) for kind, (_, size) in self._spaces.items()),
            default=1,
        )
        self.passes = max(1, self.passes)

    def source(self, key: str) -> str:
        """The key whose numbers `key` holds: itself, unless it is tied."""
        return self._tied.get(key, key)

    def span(self, key: str) -> tuple[int, int]:
        """The first number of a tensor and how many it has."""
        return self._base[key], self.leaves[key].numel

    def numbers(self, key: str) -> torch.Tensor:
        """The numbers of a tensor's elements, in its shape."""
        base, leaf = self._base[key], self.leaves[key]
        return torch.arange(base, base + leaf.numel, dtype=torch.int64).reshape(leaf.shape)

    def state(self, which: int) -> State:
        """Pass `which`: the state dict whose values are that digit of each element's number."""
        out: State = {}
        for key, leaf in self.leaves.items():
            kind = _kind(leaf.dtype)
            first, width = self._base[key] - self._spaces[kind][0], _bits(kind)
            values = torch.empty(leaf.numel, dtype=torch_dtype(leaf.dtype))
            for at in range(0, leaf.numel, _PIECE):
                part = values[at : at + _PIECE]
                digit = torch.arange(first + at, first + at + len(part)) >> (which * width)
                part.copy_(_codes(leaf.dtype)[digit & ((1 << width) - 1)])
            out[key] = values.reshape(leaf.shape)
        return out

    def decode(self, digits: list[torch.Tensor]) -> torch.Tensor:
        """Numbers of the elements of one result, from its values in all passes; 0 is unknown."""
        kind = _kind(str(digits[0].dtype).removeprefix("torch."))
        first, size = self._spaces.get(kind, (0, 0))
        width = _bits(kind)
        number = torch.zeros(digits[0].shape, dtype=torch.int64)
        known = torch.ones(digits[0].shape, dtype=torch.bool)
        for which, value in enumerate(digits):
            digit, valid = _decode(value, 1 << width)
            if which * width < 62:
                number |= digit << (which * width)
            known &= valid
        return torch.where(known & (number > 0) & (number <= size), number + first, 0)

    def place(self, number: int) -> Place | None:
        """The key and coordinate of a number; None for an element from nowhere."""
        if number <= 0 or number >= self.total:
            return None
        index = bisect.bisect_right(self.bases, number) - 1
        # Empty tensors share their base with the next one, which is the one meant.
        key, rest = self.keys[index], number - self.bases[index]
        coordinate = []
        for size in reversed(self.leaves[key].shape):
            coordinate.append(rest % size)
            rest //= size
        return Place(key, tuple(reversed(coordinate)))

    def owners(self, numbers: torch.Tensor) -> set[str]:
        """Keys that a set of numbers comes from."""
        known = numbers[numbers > 0]
        if not known.numel():
            return set()
        index = torch.bucketize(known, torch.tensor(self.bases), right=True) - 1
        return {self.keys[i] for i in torch.unique(index).tolist()}


def code_of(dtype: str) -> str:
    """Dtypes of one code decode alike: floats, complex and integer ones, and each narrow dtype."""
    if dtype in _NARROW:
        return dtype
    kind = torch_dtype(dtype)
    return "float" if kind.is_floating_point else "complex" if kind.is_complex else "integer"


def _kind(dtype: str) -> str:
    """Dtypes that share a code, and so a space of numbers."""
    return dtype if dtype in _NARROW else "wide"


def _bits(kind: str) -> int:
    return _NARROW.get(kind, _WIDE)


@functools.lru_cache
def _codes(dtype: str) -> torch.Tensor:
    """The value of each digit."""
    return _encode(torch.arange(1 << _bits(_kind(dtype))), dtype)


def _encode(digit: torch.Tensor, dtype: str) -> torch.Tensor:
    kind = torch_dtype(dtype)
    if dtype == "bool":
        return digit.bool()
    if dtype in _NARROW:
        return digit.to(torch.uint8).view(kind)
    if kind.is_complex:
        half = _encode(digit, str(kind.to_real()).removeprefix("torch."))
        # The parts differ, so that a conjugate or exchanged parts are no number.
        return torch.complex(half, -half)
    if kind.is_floating_point:
        code = (
            ((digit >> 11) & 1) * -(1 << 31)
            | (((digit >> 7) & 15) + 119) << 23
            | (digit & 127) << 16
        )
        return code.to(torch.int32).view(torch.float32).to(kind)
    return digit.to(kind)


def _decode(value: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    name = str(value.dtype).removeprefix("torch.")
    value = value.detach().resolve_neg().resolve_conj().contiguous().cpu()
    if name in _NARROW:
        digit = value.view(torch.uint8).to(torch.int64)
        return digit, digit < limit
    if value.dtype.is_floating_point:
        code = value.to(torch.float32).view(torch.int32)
        exponent = ((code >> 23) & 255) - 119
        valid = ((code & 0xFFFF) == 0) & (exponent >= 0) & (exponent < 16)
        digit = ((code >> 31) & 1) << 11 | (exponent & 15) << 7 | (code >> 16) & 127
        return digit.to(torch.int64), valid & (digit < limit)
    if value.is_complex():
        digit, valid = _decode(value.real, limit)
        return digit, valid & (value.imag == -value.real)
    digit = value.to(torch.int64)
    return digit.clamp(0, limit - 1), (digit >= 0) & (digit < limit)
