"""The arithmetic of quantized weights: codes and scales to values, and values to codes and scales.

Pure functions on CPU tensors. Dequantizing a part takes the part's place in the whole, so that the
block grid is always the global one. The value of a code is computed in float32, code times scale,
and rounded once to the wanted dtype. Quantizing chooses scales so that values that were
dequantized come back as the same bytes, and divides by the very scale that is stored.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

from torchtitan_ckpt.errors import Problem, SaveError
from torchtitan_ckpt.formats.quantized import BLOCK, FP8, GROUP, Scheme

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_CHUNK = 1 << 20  # elements worked on at once: stays in the processor's cache
_E4M3_SHIFT = 2.0**120  # bfloat16 reads E4M3 bits, moved into place, 2**120 too small
_SAFE_SCALE = 2.0**7  # a larger scale times 2**120 would overflow float32
_FP8_MAX, _FP4_MAX = 448.0, 6.0
_SCALE_BITS = 20  # of a float32 scale's significand: times a 4-bit code it is still exact

Offsets = tuple[int, ...] | None


# --- to values ----------------------------------------------------------------------------------


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    scheme: Scheme = "fp8",
    *,
    offsets: Offsets = None,
    dtype: torch.dtype = torch.bfloat16,
    block: int = BLOCK,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values of a tensor, or of the part of one that begins at `offsets`.

    `fp8`: `weight` [..., r, c] in float8; `scale` the blocks that the part touches, from the block
    of its first row and column on. `fp4`: `weight` int8 [..., r, c/2], `scale` [..., r, c/32], the
    part beginning at a whole group. `mxfp4`: `weight` uint8 [..., r, g, 16], `scale` [..., r, g];
    values come as [..., r, g * 32], in the order of the bytes (gpt-oss stores the transpose of its
    unquantized layout).
    """
    scale_values = scale_to_float(scale)
    if scheme == "fp8":
        shape = tuple(weight.shape)
    elif scheme == "fp4":
        shape = (*weight.shape[:-1], weight.shape[-1] * 2)
    else:
        shape = (*weight.shape[:-2], weight.shape[-2] * GROUP)
    out = torch.empty(shape, dtype=dtype) if out is None else out
    if out.numel() == 0:
        return out
    if scheme == "fp8":
        row, column = (offsets or (0,) * weight.dim())[-2:]
        for index in np.ndindex(*shape[:-2]):
            _fp8_matrix(
                weight[index], scale_values[index], row % block, column % block, block, out[index]
            )
        return out
    packed = weight.view(torch.uint8).reshape(*shape[:-1], shape[-1] // 2)
    rows = math.prod(shape[:-1])
    _fp4_rows(packed.reshape(rows, -1), scale_values.reshape(rows, -1), out)
    return out


def scale_to_float(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32; one-byte scales are exponents: 127 is 1.0, 255 is NaN."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return _exponents()[scale.view(torch.uint8).to(torch.int32)]
    return scale.to(torch.float32)


@lru_cache(maxsize=1)
def _exponents() -> torch.Tensor:
    table = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    table[255] = math.nan
    return table.to(torch.float32)


def _fp8_matrix(
    codes: torch.Tensor,
    scale: torch.Tensor,
    row: int,
    column: int,
    block: int,
    out: torch.Tensor,
) -> None:
    """`row` and `column` say how far into the first block the part begins."""
    rows, columns = codes.shape
    # One row of factors a row of blocks: the columns' blocks spread over the columns.
    factors = scale.repeat_interleave(block, dim=1)[:, column : column + columns]
    step = max(_CHUNK // max(columns * block, 1), 1) * block
    at = 0
    while at < rows:
        into = (row + at) % block
        number = (row + at) // block
        if into or rows - at < block:
            size, repeats = min(block - into, rows - at), 1
        else:
            repeats = min(step, rows - at) // block
            size = repeats * block
        part = factors[number : number + repeats].unsqueeze(1)
        target = out[at : at + size].view(repeats, size // repeats, columns)
        _scale_codes(codes[at : at + size].view(repeats, size // repeats, columns), part, target)
        at += size


def _scale_codes(codes: torch.Tensor, factors: torch.Tensor, target: torch.Tensor) -> None:
    buffer = target if target.dtype == torch.float32 else torch.empty(codes.shape)
    if codes.dtype == torch.float8_e4m3fn:
        # torch converts float8 one element at a time. The bits of E4M3, moved to where bfloat16
        # keeps them, read as the value times 2**-120, subnormal codes too; only NaN needs care.
        bits = codes.view(torch.uint8).to(torch.int16)
        magnitude = bits.bitwise_and(0x7F)
        has_nan = int(magnitude.max()) == 0x7F
        magnitude.bitwise_left_shift_(4)
        bits.bitwise_and_(0x80).bitwise_left_shift_(8).bitwise_or_(magnitude)
        buffer.copy_(bits.view(torch.bfloat16))
        if float(factors.max()) < _SAFE_SCALE:
            buffer.mul_(factors * _E4M3_SHIFT)
        else:
            buffer.mul_(_E4M3_SHIFT).mul_(factors)
        if has_nan:
            buffer[codes.view(torch.uint8).bitwise_and(0x7F) == 0x7F] = math.nan
    elif codes.dtype == torch.float8_e5m2:
        half = codes.view(torch.uint8).to(torch.int16).bitwise_left_shift_(8).view(torch.float16)
        buffer.copy_(half)
        buffer.mul_(factors)
    else:
        buffer.copy_(codes)
        buffer.mul_(factors)
    if buffer is not target:
        target.copy_(buffer)


@lru_cache(maxsize=1)
def _pairs() -> np.ndarray[Any, np.dtype[np.int32]]:
    """For each byte its two values as bfloat16, the low nibble first, in one 32-bit word."""
    table = torch.tensor(E2M1)
    low, high = table.repeat(16), table.repeat_interleave(16)
    words = torch.stack([low, high], 1).to(torch.bfloat16).view(torch.int32).reshape(-1)
    array: np.ndarray[Any, np.dtype[np.int32]] = words.numpy()
    return array


def _fp4_rows(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """E2M1 times a power of two is exact in bfloat16, so that is what is computed in."""
    rows, width = packed.shape
    flat = out.view(rows, width * 2)
    factors = scale.to(torch.bfloat16).unsqueeze(-1)
    step = max(_CHUNK // (width * 2), 1)
    for at in range(0, rows, step):
        words = np.take(_pairs(), packed[at : at + step].numpy(), mode="clip")
        values = torch.from_numpy(words).view(torch.bfloat16)
        grouped = values.view(values.shape[0], -1, GROUP)
        target = flat[at : at + step]
        if target.dtype == torch.bfloat16:
            torch.mul(grouped, factors[at : at + step], out=target.view(grouped.shape))
        else:
            target.copy_(grouped.mul_(factors[at : at + step]).view(values.shape))


# --- to codes -----------------------------------------------------------------------------------


def quantize_fp8(
    weight: torch.Tensor,
    *,
    scale_format: Literal["ue8m0", "float32"] = "ue8m0",
    scale: torch.Tensor | None = None,
    block: int = BLOCK,
    key: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes float8_e4m3fn, scales float32 [..., ceil(r/128), ceil(c/128)]) of [..., r, c].

    With `ue8m0` scales are powers of two (they fit E8M0, and values survive bfloat16); `float32`
    uses the range fully with scales of 20 significant bits, exact in float32 only. Given `scale`,
    that one is used: codes of any checkpoint come back as they were.
    """
    values = _finite(weight, key)
    *head, rows, columns = values.shape
    tall, wide = -(-rows // block), -(-columns // block)
    padded = torch.nn.functional.pad(values, (0, wide * block - columns, 0, tall * block - rows))
    grid = padded.view(*head, tall, block, wide, block)
    if scale is None:
        peak = grid.abs().amax(dim=(-3, -1))
        scale = _power_of_two(peak, 8, 464.0) if scale_format == "ue8m0" else _short_scale(peak)
    else:
        scale = scale_to_float(scale)
    codes = (grid / scale[..., :, None, :, None]).clamp_(-_FP8_MAX, _FP8_MAX)
    codes = codes.view(padded.shape)[..., :rows, :columns]
    return codes.contiguous().to(getattr(torch, FP8[0])), scale


def quantize_fp4(
    weight: torch.Tensor, *, scale: torch.Tensor | None = None, key: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [..., c/2], scales uint8 E8M0 [..., c/32]) of [..., c], c a multiple of 32."""
    values = _finite(weight, key)
    if values.dim() == 0 or values.shape[-1] % GROUP:
        raise SaveError(
            Problem(
                code="quantize.group",
                what=f"{key or 'a tensor'} cannot be stored in groups of {GROUP}",
                expected=f"a last size that is a multiple of {GROUP}",
                actual=str(list(values.shape)),
                fix="leave this tensor unquantized",
            )
        )
    groups = values.view(*values.shape[:-1], -1, GROUP)
    if scale is None:
        factors = _power_of_two(groups.abs().amax(dim=-1), 2, 7.0)
    else:
        factors = scale_to_float(scale)
    scaled = (groups / factors.unsqueeze(-1)).view(values.shape)
    # Ties go to the even code, as in IEEE rounding: each bound belongs to the code that is even.
    size = scaled.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8)
    for bound, even_below in (
        (0.25, True),
        (0.75, False),
        (1.25, True),
        (1.75, False),
        (2.5, True),
        (3.5, False),
        (5.0, True),
    ):
        code += (size > bound if even_below else size >= bound).to(torch.uint8)
    code |= torch.signbit(scaled).to(torch.uint8) << 3
    packed = code[..., 0::2] | code[..., 1::2] << 4
    exponents = torch.frexp(factors).exponent + 126
    return packed.view(torch.int8), exponents.to(torch.uint8)


def quantize_mxfp4(
    weight: torch.Tensor, *, scale: torch.Tensor | None = None, key: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks uint8 [..., out, in/32, 16], scales uint8 [..., out, in/32]) of [..., in, out]."""
    packed, exponents = quantize_fp4(weight.transpose(-1, -2).contiguous(), scale=scale, key=key)
    return packed.view(torch.uint8).reshape(*exponents.shape, GROUP // 2), exponents


def to_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Power-of-two float32 scales as F8_E8M0; raises ValueError for any other value."""
    mantissa, exponent = torch.frexp(scale)
    if not bool((mantissa == 0.5).all()):
        raise ValueError("a scale is not a power of two")
    return (exponent + 126).to(torch.uint8).view(torch.float8_e8m0fnu)


def _finite(weight: torch.Tensor, key: str) -> torch.Tensor:
    values = weight.detach().to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise SaveError(
            Problem(
                code="quantize.not-finite",
                what=f"{key or 'a tensor'} holds NaN or infinite values and cannot be quantized",
                cause="training diverged, or the weights were not loaded completely",
                fix="look for the first bad step; export unquantized to inspect the values",
            )
        )
    return values.contiguous()


def _power_of_two(peak: torch.Tensor, top: int, limit: float) -> torch.Tensor:
    """2**e with peak / 2**e in the format's last binade, [2**top, 2**(top+1)), clipped at most by
    what rounds to its maximum anyway; beyond `limit` one step more. Choosing again for the rounded
    peak gives the same e, which is what makes re-reading exact."""
    _, exponent = torch.frexp(peak)  # peak = mantissa * 2**exponent, mantissa in [0.5, 1)
    power = exponent - 1 - top
    power += (torch.ldexp(peak, -power) > limit).to(power.dtype)
    power = power.clamp_(-126, 126)
    power[peak == 0] = 0
    return torch.ldexp(torch.ones_like(peak), power)


def _short_scale(peak: torch.Tensor) -> torch.Tensor:
    """peak / 448, rounded up to 20 bits, so that code * scale is exact and gives it back."""
    mantissa, exponent = torch.frexp((peak.double() / _FP8_MAX).clamp_min(2.0**-100))
    short = torch.ldexp(
        torch.ceil(torch.ldexp(mantissa, torch.tensor(_SCALE_BITS))), exponent - _SCALE_BITS
    )
    short[peak == 0] = 1.0
    return short.to(torch.float32)
