"""Readers of files broken on purpose, each named for its check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance import codec
from tests.specimens.packed import PacksExperts, packed
from tests.specimens.right import QuantizedReader, Right
from tests.specimens.specimen import BLIND, Specimen


class ReturnsPath(Right):
    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return path


class NotAskedWhetherQuantized(Right):
    """Managers ask with two arguments."""

    def get_hf_storage_reader(self, path: str) -> Any:  # type: ignore[override]
        return super().get_hf_storage_reader(path)


class PlainForQuantized(Right):
    """from_quantized is ignored."""

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return super().get_hf_storage_reader(path)


def _after_reading(reader: Any, edit: Callable[[torch.Tensor], Any], name: str = "") -> Any:
    """The reader, and `edit` on each matrix or stack of such a name that it has read."""
    read = reader.read_data

    def wrong(plan: Any, planner: Any) -> Any:
        done = read(plan, planner)
        for key, value in planner.state_dict.items():
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and name in key:
                edit(value)
        return done

    reader.read_data = wrong
    return reader


class SmallBlocks(Right):
    """Scales are sought for blocks of half the size."""

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        reader = super().get_hf_storage_reader(path, from_quantized)
        if from_quantized:
            reader.block_size = 64
        return reader


class OtherScales(Right):
    """Each scale is applied twice."""

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        reader = super().get_hf_storage_reader(path, from_quantized)
        return _after_reading(reader, lambda w: w.mul_(0.25)) if from_quantized else reader


class ShortBlockUnscaled(Right):
    """Only whole blocks are dequantized; what is left at the edge has the scale 1."""

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        reader = super().get_hf_storage_reader(path, from_quantized)
        if not from_quantized:
            return reader
        return _after_reading(reader, lambda w: w[len(w) // 128 * 128 :].mul_(4))


class ReversesRows(Right):
    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        reader = super().get_hf_storage_reader(path, from_quantized)
        return reader if from_quantized else _after_reading(reader, lambda w: w.copy_(w.flip(0)))


class OfTheAssets(Right):
    """Reads the folder that it was made on, plain files (`on[0]`) or quantized ones (`on[1]`)."""

    on = (True, False)

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        wrong = self.on[from_quantized] and self.hf_assets_path
        return super().get_hf_storage_reader(wrong or path, from_quantized)


class QuantizedOfTheAssets(OfTheAssets):
    on = (False, True)


class OnNoFolder(Right):
    def __init__(self, hf_assets_path: str | None = None) -> None:
        super().__init__(hf_assets_path)
        del self.hf_assets_path


class ExpertsInDoubt(Right):
    """The scales of experts are applied twice."""

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        reader = super().get_hf_storage_reader(path, from_quantized)
        return (
            _after_reading(reader, lambda w: w.mul_(2), ".experts.") if from_quantized else reader
        )


class NegativeExperts(PacksExperts):
    """The upper bit of a code is read as the sign of the others."""

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        reader = super().get_hf_storage_reader(path, from_quantized)
        return _after_reading(reader, lambda w: w.neg_(), "gate_up") if from_quantized else reader


def dequantizing(kind: type[QuantizedReader]) -> type:
    """The right adapter with another reader of quantized files."""

    class Reads(Right):
        def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
            if from_quantized:
                return kind(path=path, target_dtype=torch.float32)
            return super().get_hf_storage_reader(path)

    return Reads


class TakesCodesWithoutScale(QuantizedReader):
    """As torch's: a weight is quantized where a scale of one name is beside it."""

    def refused(self, scale: Any) -> str:
        return super().refused(scale) if scale else ""


class ExponentsAreFactors(QuantizedReader):
    """As torch's: whatever the dtype of the scales is, they are multiplied with."""

    def refused(self, scale: Any) -> str:
        return "" if scale and len(scale.size) == 2 else super().refused(scale)


class ScaleWithoutDimensionsIsNone(QuantizedReader):
    """What is no grid is taken for something else than scales."""

    def read_metadata(self) -> Any:
        metadata = super().read_metadata()
        stored = metadata.state_dict_metadata
        for key, scale in list(self._weight_scale_mapping.items()):
            if not stored[scale].size:
                del self._weight_scale_mapping[key]
        return metadata

    def refused(self, scale: Any) -> str:
        return "" if scale and not scale.size else super().refused(scale)


class CountsFromTheSlice(QuantizedReader):
    """The first block is that of the first row that is read."""

    def _dequantize_tensor(self, weight: Any, scale_inv: Any, *_: Any) -> torch.Tensor:
        return codec.dequantized(weight, scale_inv)


class PermutesBeforeScaling(QuantizedReader):
    """Rows are turned while they are codes, and their scales are not."""

    def _dequantize_tensor(self, weight: Any, *rest: Any) -> torch.Tensor:
        return super()._dequantize_tensor(weight.float().flip(0), *rest).flip(0)


def _fp8(name: str, kind: type[QuantizedReader], kinds: str) -> Specimen:
    adapter = dequantizing(kind)
    return Specimen(name, "files.quantized", ".weight", adapter, kinds, True, BLIND)


SPECIMENS: tuple[Specimen, ...] = (
    Specimen(
        "fp8-blocks-of-half-the-size",
        "files.quantized",
        "weight_scale_inv",
        SmallBlocks,
        "FP8-07",
        False,
        BLIND,
    ),
    Specimen("reader-is-a-path", "files.reader", "model.", ReturnsPath, "HFS-04", True, BLIND),
    Specimen(
        "reader-not-asked-whether-quantized",
        "files.reader",
        "model.",
        NotAskedWhetherQuantized,
        "",
        False,
        BLIND,
    ),
    Specimen(
        "reader-reverses-rows", "files.reader", "self_attn", ReversesRows, "LAY-07", False, BLIND
    ),
    Specimen(
        "plain-reader-for-fp8",
        "files.quantized",
        ".weight",
        PlainForQuantized,
        "FP8-03",
        True,
        BLIND,
    ),
    Specimen("scales-applied-twice", "files.quantized", ".weight", OtherScales, "", False, BLIND),
    Specimen(
        "short-block-unscaled",
        "files.quantized",
        ".weight",
        ShortBlockUnscaled,
        "FP8-07",
        True,
        BLIND,
    ),
    Specimen("reader-of-the-assets", "files.reader", "model.", OfTheAssets, "", True, BLIND),
    Specimen("says-no-folder", "files.reader", "model.", OnNoFolder, "", True, BLIND),
    Specimen(
        "quantized-reader-of-the-assets",
        "files.quantized",
        ".weight",
        QuantizedOfTheAssets,
        "",
        True,
        BLIND,
    ),
    Specimen(
        "scales-of-experts-twice", "files.quantized", ".experts.", ExpertsInDoubt, "", True, BLIND
    ),
    Specimen(
        "mxfp4-with-other-signs",
        "files.quantized",
        "gate_up_proj",
        make=lambda: packed(NegativeExperts),
        alone=True,
    ),
    _fp8("codes-without-scale-are-weights", TakesCodesWithoutScale, "FP8-03"),
    _fp8("exponents-are-factors", ExponentsAreFactors, "FP8-04"),
    _fp8("scale-without-dimensions-is-none", ScaleWithoutDimensionsIsNone, "FP8-05"),
    _fp8("blocks-from-the-slice-on", CountsFromTheSlice, "FP8-08"),
    _fp8("rows-permuted-before-scaling", PermutesBeforeScaling, "FP8-02"),
)
