"""Chapter `files`, third part: the reader of quantized files that an adapter hands out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from conformance import codec as codecs
from conformance.checks._words import by_template, count, first_difference
from conformance.checks.files_readers import read, reader_of
from conformance.fingerprint import State
from conformance.lab import AdapterRaised, Lab, NotApplicable
from conformance.verdict import Finding

# Two blocks of 128 with a short last one in both directions: scales differ by block.
_CODES = (torch.arange(200 * 136) % 96 + 8).to(torch.uint8).reshape(200, 136)
_GRID = codecs.blocks_of(_CODES)
# Every byte, of [experts, rows, groups of 32, 16].
_BLOCKS = ((torch.arange(3 * 5 * 4 * 16) + 18) % 256).to(torch.uint8).reshape(3, 5, 4, 16)
_EXPONENTS = (torch.arange(3 * 5 * 4) % 7 + 124).to(torch.uint8).reshape(3, 5, 4)


@dataclass(frozen=True, slots=True)
class _Scene:
    """How files hold the scales of weights, and what is wrong with a reader that misreads them.

    Codes are worth their `factors`, `stored` as they are or otherwise; without a `name` they are
    not there. The rows from `first` on are read. A reader may refuse all but `published` files.
    """

    words: str
    cause: str
    remedy: str
    name: str = "weight_scale_inv"
    factors: torch.Tensor = _GRID
    stored: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone
    first: int = 0
    published: bool = False


_FP8 = (
    _Scene(
        "",
        "scales are applied to other blocks",
        "return a dequantizing reader, or raise when from_quantized is asked for",
        published=True,
    ),
    _Scene(
        " where it reads the rows from 64 on",
        "blocks are counted from the first row that is read",
        "find the block of a row by its place in the whole weight",
        first=64,
        published=True,
    ),
    _Scene(
        " where files hold no scale",
        "a weight whose scale is not found is taken for plain values",
        "refuse float8 tensors without a scale, by their names",
        name="",
        factors=torch.tensor(float("nan")),
    ),
    _Scene(
        " where the scale is named .scale",
        "a weight whose scale is not found is taken for plain values",
        "know this name too, or refuse float8 tensors without a scale",
        name="scale",
    ),
    _Scene(
        " where scales are exponents (uint8)",
        "exponents are taken for factors: a byte n means 2^(n - 127)",
        "make factors of them, or refuse scales that are no floats",
        stored=lambda grid: (grid.log2() + 127).to(torch.uint8),
    ),
    _Scene(
        " where scales are bfloat16",
        "scales of another dtype than float32 are misread or left out",
        "convert scales to float32 by value, or refuse them",
        stored=torch.Tensor.bfloat16,
    ),
    _Scene(
        " where one scale without dimensions is for the whole weight",
        "a scale that is no grid is misread or left out",
        "multiply the whole weight by it, or refuse it by its name",
        factors=torch.tensor(0.25),
    ),
)

_MXFP4 = (
    _Scene(
        " where experts are in mxfp4",
        "codes or exponents are taken for those of another place",
        "take the low half of a byte first, and 2^(n - 127) for each group of 32",
        factors=_EXPONENTS,
        published=True,
    ),
    _Scene(
        " where it reads experts in mxfp4 from 1 on",
        "blocks are counted from the first expert that is read",
        "find the blocks of an expert by its place in the whole stack",
        factors=_EXPONENTS,
        first=1,
        published=True,
    ),
)


@dataclass(frozen=True, slots=True)
class _Weight:
    """What the files hold of a quantized weight, what it is worth, and its codes as floats."""

    files: State
    values: torch.Tensor
    codes: torch.Tensor


def _fp8(scene: _Scene, key: str, number: int) -> _Weight:
    codes, factors = _CODES.roll(number, 0).view(torch.float8_e4m3fn), scene.factors / 2**number
    name = f"{key.removesuffix('weight')}{scene.name}"
    scales = {name: scene.stored(factors)} if scene.name else {}
    values = codecs.dequantized(codes, factors.expand(_GRID.shape))
    return _Weight({key: codes, **scales}, values, codes.float())


def _mxfp4(scene: _Scene, key: str, number: int) -> _Weight:
    """Asked for by the name of the blocks as they lie there, by the experts' own transposed."""
    name, blocks = key.removesuffix("_blocks"), _BLOCKS.roll(number, 1)
    scales = scene.factors - number
    values = codecs.unpacked(blocks, scales)
    codes = codecs.unpacked(blocks, torch.full_like(scales, 127))
    if key == name:
        values, codes = values.transpose(1, 2), codes.transpose(1, 2)
    return _Weight({f"{name}_blocks": blocks, f"{name}_scales": scales}, values, codes)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """A way to quantize: how a weight of it is made, its scenes, and what its files hold."""

    make: Callable[[_Scene, str, int], _Weight]
    scenes: tuple[_Scene, ...]
    words: str

    def weights(self, scene: _Scene, keys: list[str], begin: int) -> dict[str, _Weight]:
        """A weight for each key, with codes and scales of its own."""
        return {key: self.make(scene, key, number) for number, key in enumerate(keys, begin)}


_IN_FP8 = _Scheme(_fp8, _FP8, "fp8 codes and, for each block of 128 x 128, a float32 scale")
_IN_MXFP4 = _Scheme(_mxfp4, _MXFP4, "mxfp4 codes and, for each group of 32, an exponent")


def quantized(lab: Lab) -> Iterator[Finding]:
    """With from_quantized=True, quantized weights come out as values, or the load is refused."""
    if not lab.quantized:
        raise NotApplicable("the subject does not declare quantized files (quantized)")
    firsts = [keys[0] for keys in by_template(lab.export.leaves).values()]
    stored = set(lab.stored)
    flat = [k for k in firsts if k.endswith(".weight") and len(lab.export.leaves[k].shape) == 2]
    # Where a list tells which weights have scales, those, else all that may have some.
    scaled = [k for k in flat if {f"{k}_scale_inv", f"{k.removesuffix('weight')}scale"} & stored]
    packed = [k for k in firsts if f"{k.removesuffix('_blocks')}_blocks" in stored]
    if not (flat or packed):
        raise NotApplicable("no two-dimensional weight to quantize")
    # Files of one scheme need not hold the other, which may be refused.
    schemes = ((_IN_FP8, scaled or flat, bool(scaled) or not packed), (_IN_MXFP4, packed, True))
    for scheme, keys, held in schemes:
        for scene in scheme.scenes if keys else ():
            asked = keys if scene.published else keys[-1:]
            must = scene.published and held and lab.may.quantized
            finding = _misread(lab, scheme, scene, asked, must)
            if finding is not None:
                yield finding
                if scene.published:
                    break  # the others would tell the same once more


def _misread(
    lab: Lab, scheme: _Scheme, scene: _Scene, keys: list[str], must: bool
) -> Finding | None:
    """What is wrong with what the reader makes of a scene's files, which it `must` read or may.

    The adapter is made on another folder, whose files hold other codes under the same keys.
    """
    weights, others = (scheme.weights(scene, keys, begin) for begin in (0, len(keys)))
    empty = {key: torch.full(w.values.shape, float("nan")) for key, w in weights.items()}
    targets = lab.on_device(empty)
    with tempfile.TemporaryDirectory() as root:
        folder, assets = Path(root, "step"), Path(root, "assets")
        for where, made in ((folder, weights), (assets, others)):
            where.mkdir()
            files = {name: value for one in made.values() for name, value in one.files.items()}
            # Never a scale in the file of its codes.
            codecs.write(files, where, {name: i % 3 + 1 for i, name in enumerate(files)})
        try:
            adapter = lab.adapter(str(assets))
            if not (lab.takes_assets or hasattr(adapter, "get_hf_storage_reader")):
                raise NotApplicable("the adapter has no get_hf_storage_reader")
            read(reader_of(adapter, str(folder), True), targets, scene.first)
        except AdapterRaised as error:
            if not must:
                return None
            return Finding(
                what="the quantized reader cannot read what it is declared to dequantize"
                + scene.words,
                keys=tuple(name for one in weights.values() for name in one.files),
                expected=scheme.words,
                actual=str(error).replace(f"{root}/", ""),
                cause="blocks of another size, or scales of another name",
                remedy="read published files, or do not declare it (quantized)",
            )
    got = {key: targets[key].cpu()[scene.first :] for key in keys}
    wrong = [k for k in keys if not torch.equal(got[k], weights[k].values[scene.first :])]
    return _told(scene, wrong, got, weights, others) if wrong else None


def _told(
    scene: _Scene,
    wrong: list[str],
    got: Mapping[str, torch.Tensor],
    weights: Mapping[str, _Weight],
    others: Mapping[str, _Weight],
) -> Finding:
    """The finding about weights that come out wrong, of which the first is shown."""
    key, first = wrong[0], scene.first
    hollow = bool(got[key].isnan().any())
    raw = torch.equal(got[key], weights[key].codes[first:])
    astray = torch.equal(got[key], others[key].values[first:])
    right = len(weights) - len(wrong)
    whole = torch.cat((weights[key].values[:first], got[key]))
    at, want, have = first_difference(weights[key].values, whole)
    may_refuse = "" if scene.published else ", or a refusal"
    return Finding(
        what="the quantized reader "
        + (
            "leaves a part of weights as it was"
            if hollow
            else "loads codes as weights"
            if raw
            else "gives other values than codes times scales"
        )
        + scene.words,
        keys=tuple(wrong),
        coordinate=at,
        expected=f"{want} (code times scale){may_refuse}" if scene.name else "a refusal",
        actual=f"{have} (the code)" if raw else have or "as it was",
        cause="get_hf_storage_reader ignores `path` for that of hf_assets_path"
        if astray
        else "its metadata has other sizes than what it gives: of the codes, or of another block"
        if hollow
        else f"weights are told apart by their names: {count(right, 'other')} came out right"
        if right
        else "from_quantized is ignored and the plain reader returned"
        if raw and scene.published
        else scene.cause,
        remedy=scene.remedy,
    )
