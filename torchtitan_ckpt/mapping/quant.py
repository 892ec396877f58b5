"""How quantized checkpoints lay a weight out: dtypes, shapes and names of codes and scales.

Declarations only, for manifests and key lists; reading and writing the codes is the business of
`formats/quantized.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_ckpt.mapping.view import Shape


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout. `block` is in elements along the last two dimensions, as stored.

    `per_byte` values share an element along the last dimension. `drop` is taken off the key and
    `weight` and `scale` put on. `grouped` (gpt-oss): stored transposed, [..., out, in/32, 16] for a
    logical [..., in, out].
    """

    weight_dtype: str
    scale_dtype: str
    block: tuple[int, int]
    scale: str
    weight: str = ".weight"
    drop: str = ".weight"
    per_byte: int = 1
    grouped: bool = False

    def keys(self, key: str) -> tuple[str, str]:
        base = key.removesuffix(self.drop) if self.drop else key
        return base + self.weight, base + self.scale

    def shapes(self, shape: Shape) -> tuple[Shape, Shape]:
        """Shapes of the codes and of the scales for a weight of this logical shape."""
        *lead, rows, cols = shape
        if self.grouped:
            rows, cols = cols, rows
        down, across = self.block
        scales = (*lead, -(-rows // down), -(-cols // across))
        if self.grouped:
            return (*lead, rows, cols // across, across // self.per_byte), scales
        return (*lead, rows, cols // self.per_byte), scales


FP8 = Layout("float8_e4m3fn", "float32", (128, 128), ".weight_scale_inv")
FP8_E8M0 = Layout("float8_e4m3fn", "float8_e8m0fnu", (128, 128), ".scale")
FP4 = Layout("int8", "float8_e8m0fnu", (1, 32), ".scale", per_byte=2)
MXFP4 = Layout("uint8", "uint8", (1, 32), "_scales", "_blocks", "", per_byte=2, grouped=True)
# The -Base checkpoints of DeepSeek-V4, as reported publicly; not inspected.
FP8_F32 = Layout("float8_e4m3fn", "float32", (128, 128), ".scale")
