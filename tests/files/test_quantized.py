"""Quantized weights: told apart by dtype and shape, refused when they do not pair, exact values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from torchtitan_ckpt.errors import MismatchError, NotFoundError, RefusedError, SaveError
from torchtitan_ckpt.formats import hf
from torchtitan_ckpt.formats.quantized import (
    describe,
    detect,
    is_quantized,
    logical_manifest,
    scale_shape,
    stored_entries,
)
from torchtitan_ckpt.formats.quantized_math import (
    E2M1,
    dequantize,
    quantize_fp4,
    quantize_fp8,
    quantize_mxfp4,
    scale_to_float,
    to_e8m0,
)

FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu


def write(root: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """One tensor a file, so that every scale lies in another file than its weight."""
    import json

    root.mkdir(exist_ok=True)
    weight_map = {}
    for number, (key, tensor) in enumerate(tensors.items()):
        name = f"part-{number:03d}.safetensors"
        save_file({key: tensor}, root / name)
        weight_map[key] = name
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return root


def by_hand_fp8(codes: torch.Tensor, scale: torch.Tensor, block: int = 128) -> torch.Tensor:
    """Element by element, written apart from the code under test."""
    values, factors = codes.to(torch.float32), scale_to_float(scale)
    out = torch.empty(codes.shape)
    for row in range(codes.shape[0]):
        for start in range(0, codes.shape[1], block):
            part = values[row, start : start + block]
            out[row, start : start + block] = part * factors[row // block, start // block]
    return out


def by_hand_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = []
    for byte_row, scale_row in zip(
        packed.view(torch.uint8).tolist(), scale.view(torch.uint8).tolist(), strict=True
    ):
        row = []
        for column, byte in enumerate(byte_row):
            factor = 2.0 ** (scale_row[column // 16] - 127)
            row += [E2M1[byte & 15] * factor, E2M1[byte >> 4] * factor]
        out.append(row)
    return torch.tensor(out)


def all_codes(rows: int, columns: int) -> torch.Tensor:
    """Every code but NaN, in an order that no transposition or swap leaves alone."""
    codes = torch.arange(rows * columns) * 7 % 256
    codes[(codes & 0x7F) == 0x7F] = 3
    return codes.to(torch.uint8).view(rows, columns).view(FP8)


def scales(rows: int, columns: int) -> torch.Tensor:
    return 0.5 + torch.arange(rows * columns).view(rows, columns) / 3


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32, 1: torch.uint8}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


# --- loading ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(256, 384), (576, 130), (100, 50), (200, 136), (1, 1), (129, 257)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_blocks_in_other_files(
    tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    codes, scale = all_codes(*shape), scales(*scale_shape("fp8", shape))
    root = write(
        tmp_path / "m",
        {"a.weight": codes, "norm.weight": torch.ones(3, dtype=dtype), "a.weight_scale_inv": scale},
    )
    out = {
        "a.weight": torch.full(shape, math.nan, dtype=dtype),
        "norm.weight": torch.zeros(3, dtype=dtype),
    }
    hf.load(root, out, dequantize=True)
    assert same(out["a.weight"], by_hand_fp8(codes, scale).to(dtype))
    assert torch.equal(out["norm.weight"], torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("kind", ["f32", "bf16", "e8m0", "u8"])
def test_v4_scales_of_every_dtype(tmp_path: Path, kind: str) -> None:
    exponents = torch.tensor([[120, 127, 130], [126, 128, 119]], dtype=torch.uint8)
    scale = {
        "f32": scale_to_float(exponents),
        "bf16": scale_to_float(exponents).bfloat16(),
        "e8m0": exponents.view(E8M0),
        "u8": exponents,
    }[kind]
    codes = all_codes(200, 300)
    root = write(
        tmp_path / "m", {"a.weight": codes, "a.scale": scale, "hc_attn_scale": torch.ones(3)}
    )
    out = {"a.weight": torch.full((200, 300), math.nan), "hc_attn_scale": torch.zeros(3)}
    hf.load(root, out, dequantize=True)
    assert same(out["a.weight"], by_hand_fp8(codes, scale_to_float(exponents)))
    assert torch.equal(out["hc_attn_scale"], torch.ones(3))


def test_v4_experts_in_fp4(tmp_path: Path) -> None:
    packed = (torch.arange(6 * 48) * 11 % 256).to(torch.uint8).view(6, 48)
    scale = (118 + torch.arange(18)).to(torch.uint8).view(6, 3)
    tensors = {"e.11.w1.weight": packed.view(torch.int8), "e.11.w1.scale": scale.view(E8M0)}
    root = write(tmp_path / "m", tensors)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = {"e.11.w1.weight": torch.full((6, 96), math.nan, dtype=dtype)}
        hf.load(root, out, dequantize=True)
        assert same(out["e.11.w1.weight"], by_hand_fp4(packed, scale).to(dtype))


def gpt_oss() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    blocks = (torch.arange(3 * 10 * 2 * 16) * 13 % 256).to(torch.uint8).view(3, 10, 2, 16)
    scale = (119 + torch.arange(60) % 17).to(torch.uint8).view(3, 10, 2)
    values = torch.stack([by_hand_fp4(blocks[e].reshape(10, 32), scale[e]) for e in range(3)])
    return {
        "mlp.experts.gate_up_proj_blocks": blocks,
        "mlp.experts.gate_up_proj_scales": scale,
    }, values


def test_gpt_oss_unpacks_to_the_transposed_plain_layout(tmp_path: Path) -> None:
    tensors, values = gpt_oss()
    root = write(tmp_path / "m", tensors)
    out = {"mlp.experts.gate_up_proj": torch.full((3, 64, 10), math.nan)}
    hf.load(root, out, dequantize=True)
    assert same(out["mlp.experts.gate_up_proj"], values.transpose(1, 2).contiguous())


def test_gpt_oss_as_torchtitans_adapter_asks_for_it(tmp_path: Path) -> None:
    tensors, values = gpt_oss()
    root = write(tmp_path / "m", tensors)
    out = {"mlp.experts.gate_up_proj_blocks": torch.full((3, 10, 64), math.nan)}
    hf.load(root, out, dequantize=True)
    assert same(out["mlp.experts.gate_up_proj_blocks"], values)


def test_a_rank_with_two_runs_of_a_transposed_tensor(tmp_path: Path) -> None:
    """A strided shard holds several boxes, one after the other in its own memory."""
    from torchtitan_ckpt.formats import hf_io, hf_read
    from torchtitan_ckpt.formats.hf_boxes import Box

    tensors, values = gpt_oss()
    root = write(tmp_path / "m", tensors)
    item = detect(hf.read_manifest(root))["mlp.experts.gate_up_proj"]
    local = torch.full((3, 20, 10), math.nan)
    boxes = (Box((0, 0, 0), (3, 8, 10), (0, 0, 0)), Box((0, 40, 0), (3, 12, 10), (0, 8, 0)))
    plan = hf_read._Plan({}, [])
    with hf_io.Files(root) as files:
        hf_read._plan_quantized(plan, files, item, local, boxes)
        for call in plan.calls:
            call()
    plain = values.transpose(1, 2)
    assert same(local, torch.cat([plain[:, :8], plain[:, 40:52]], 1))


def test_fp8_experts_stacked_in_one_tensor(tmp_path: Path) -> None:
    codes = all_codes(5 * 130, 140).view(5, 130, 140)
    scale = scales(5 * 2, 2).view(5, 2, 2)
    root = write(tmp_path / "m", {"experts.gate": codes, "experts.gate_scale_inv": scale})
    out = {"experts.gate": torch.full((5, 130, 140), math.nan)}
    hf.load(root, out, dequantize=True)
    assert same(
        out["experts.gate"], torch.stack([by_hand_fp8(codes[e], scale[e]) for e in range(5)])
    )


def test_the_parts_are_cut_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan_ckpt.formats import hf_read, quantized_math

    monkeypatch.setattr(hf_read, "_DEQUANTIZE_CHUNK", 3000)
    monkeypatch.setattr(quantized_math, "_CHUNK", 2000)
    codes, scale = all_codes(700, 300), scales(6, 3)
    packed, factors = quantize_fp4(torch.randn(90, 320))
    tensors = {
        "a.weight": codes,
        "a.weight_scale_inv": scale,
        "b.weight": packed,
        "b.scale": factors.view(E8M0),
    }
    root = write(tmp_path / "m", tensors)
    out = {
        "a.weight": torch.full((700, 300), math.nan),
        "b.weight": torch.full((90, 320), math.nan),
    }
    hf.load(root, out, dequantize=True)
    assert same(out["a.weight"], by_hand_fp8(codes, scale))
    assert same(out["b.weight"], by_hand_fp4(packed, factors))


def test_only_the_needed_blocks_are_read(tmp_path: Path) -> None:
    """A target that is a part is what a sharded load makes; here through the box reader."""
    from torchtitan_ckpt.formats import hf_io, hf_read

    codes, scale = all_codes(1024, 512), scales(8, 4)
    root = write(tmp_path / "m", {"a.weight": codes, "a.weight_scale_inv": scale})
    item = detect(hf.read_manifest(root))["a.weight"]
    out = torch.full((100, 512), math.nan)
    with hf_io.Files(root) as files:
        hf_read._read_values(files, item, (300, 0), (100, 512), out)
        assert files.bytes_read == 100 * 512 + 2 * 4 * 4
    assert same(out, by_hand_fp8(codes, scale)[300:400])


# --- refusals -----------------------------------------------------------------------------------


def refused(root: Path, state: dict[str, torch.Tensor], **options: bool) -> dict[str, str]:
    before = {k: v.clone() for k, v in state.items()}
    with pytest.raises(RefusedError) as caught:
        hf.load(root, state, **options)
    for key, value in state.items():
        assert torch.equal(value, before[key]), "nothing moves"
    assert all(p.fix and p.where for p in caught.value.problems)
    return {p.code: str(p) for p in caught.value.problems}


GOOD = {"a.weight": all_codes(130, 140), "a.weight_scale_inv": scales(2, 2)}
TARGET = {"a.weight": torch.full((130, 140), 7.0)}


@pytest.mark.parametrize("kind", ["fp8", "fp4", "mxfp4"])
def test_a_quantized_file_is_not_loaded_as_plain_values(tmp_path: Path, kind: str) -> None:
    tensors = {
        "fp8": GOOD,
        "fp4": {
            "a.weight": torch.zeros(4, 16, dtype=torch.int8),
            "a.scale": torch.zeros(4, 1, dtype=torch.uint8).view(E8M0),
        },
        "mxfp4": gpt_oss()[0],
    }[kind]
    root = write(tmp_path / "m", tensors)
    state = {k: torch.full(v.shape, 7.0) for k, v in tensors.items()}
    problem = refused(root, state)["quantized.not-asked"]
    assert "part-000.safetensors" in problem
    assert "dequantize=True" in problem
    assert next(iter(tensors)) in problem


def test_the_codes_themselves_only_by_name_of_the_wish(tmp_path: Path) -> None:
    root = write(tmp_path / "m", GOOD)
    out = {"a.weight": torch.zeros(130, 140).to(FP8), "a.weight_scale_inv": torch.zeros(2, 2)}
    refused(root, {k: v for k, v in out.items() if v.dtype == torch.float32})
    hf.load(root, out, raw=True)
    assert same(out["a.weight"], GOOD["a.weight"])


def test_the_flag_on_a_plain_file_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"a.weight": torch.ones(3)})
    assert "quantized.plain" in refused(root, {"a.weight": torch.zeros(3)}, dequantize=True)


FAULTS = {
    "no scale": (
        {"a.weight": all_codes(130, 140), "n": torch.ones(2)},
        "quantized.no-scale",
        "a.weight_scale_inv",
    ),
    "scale alone": (
        {**GOOD, "b.weight_scale_inv": scales(2, 2)},
        "quantized.no-weight",
        "b.weight",
    ),
    "scale of plain": (
        {**GOOD, "b.weight": torch.ones(9, 9), "b.weight_scale_inv": scales(1, 1)},
        "quantized.no-weight",
        "float32",
    ),
    "wrong shape": (
        {"a.weight": all_codes(130, 140), "a.weight_scale_inv": scales(2, 3)},
        "quantized.scale-shape",
        "[2, 2]",
    ),
    "transposed": (
        {"a.weight": all_codes(130, 300), "a.weight_scale_inv": scales(3, 2)},
        "quantized.scale-shape",
        "[2, 3]",
    ),
    "scalar": (
        {"a.weight": all_codes(130, 140), "a.weight_scale_inv": torch.tensor(2.0)},
        "quantized.scale-shape",
        "one number",
    ),
    "per row": (
        {"a.weight": all_codes(130, 140), "a.weight_scale_inv": scales(130, 1)},
        "quantized.scale-shape",
        "[130, 1]",
    ),
    "other name": (
        {"a.weight": all_codes(130, 140), "a.weight_scale": scales(2, 2)},
        "quantized.unknown-scale",
        "a.weight_scale",
    ),
    "activation scale": (
        {**GOOD, "a.input_scale": torch.tensor(1.0)},
        "quantized.unknown-scale",
        "a.input_scale",
    ),
    "integer scale": (
        {
            "a.weight": all_codes(130, 140),
            "a.weight_scale_inv": torch.ones(2, 2, dtype=torch.int32),
        },
        "quantized.scale-dtype",
        "int32",
    ),
    "int8 with float": (
        {"a.weight": torch.zeros(4, 16, dtype=torch.int8), "a.scale": torch.ones(4, 1)},
        "quantized.scale-dtype",
        "float32",
    ),
    "fp4 shape": (
        {
            "a.weight": torch.zeros(4, 16, dtype=torch.int8),
            "a.scale": torch.zeros(4, 2, dtype=torch.uint8),
        },
        "quantized.scale-shape",
        "[4, 1]",
    ),
    "fp4 width": (
        {
            "a.weight": torch.zeros(4, 10, dtype=torch.int8),
            "a.scale": torch.zeros(4, 1, dtype=torch.uint8),
        },
        "quantized.weight-shape",
        "[4, 10]",
    ),
    "fp8 vector": (
        {"a.weight": all_codes(1, 9)[0], "a.weight_scale_inv": scales(1, 1)},
        "quantized.weight-shape",
        "[9]",
    ),
    "blocks alone": (
        {"a_blocks": torch.zeros(2, 3, 1, 16, dtype=torch.uint8)},
        "quantized.no-scale",
        "a_scales",
    ),
    "scales alone": (
        {**GOOD, "b_scales": torch.zeros(2, 3, 1, dtype=torch.uint8)},
        "quantized.no-weight",
        "b_blocks",
    ),
    "block shape": (
        {
            "a_blocks": torch.zeros(2, 3, 1, 8, dtype=torch.uint8),
            "a_scales": torch.zeros(2, 3, 1, dtype=torch.uint8),
        },
        "quantized.weight-shape",
        "16",
    ),
    "lone e8m0": (
        {**GOOD, "b.factor": torch.zeros(2, dtype=torch.uint8).view(E8M0)},
        "quantized.unknown-scale",
        "b.factor",
    ),
    "twice": (
        {**gpt_oss()[0], "mlp.experts.gate_up_proj": torch.ones(3, 64, 10)},
        "quantized.twice",
        "gate_up_proj_blocks",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_pair_is_refused_before_data_moves(tmp_path: Path, name: str) -> None:
    tensors, code, named = FAULTS[name]
    root = write(tmp_path / "m", tensors)
    found = refused(root, {"a.weight": torch.full((130, 140), 7.0)}, dequantize=True)
    assert code in found, found
    assert named in found[code]
    if code != "quantized.no-weight":
        plain = refused(root, {"a.weight": torch.full((130, 140), 7.0)})
        assert plain


def test_all_faults_at_once(tmp_path: Path) -> None:
    tensors = {
        "a.weight": all_codes(130, 140),
        "b.weight_scale_inv": scales(2, 2),
        "c.weight": all_codes(3, 3),
        "c.scale": scales(2, 2),
    }
    found = refused(write(tmp_path / "m", tensors), {}, dequantize=True)
    assert set(found) == {"quantized.no-scale", "quantized.no-weight", "quantized.scale-shape"}


def test_a_wrong_target_is_a_mismatch(tmp_path: Path) -> None:
    root = write(tmp_path / "m", GOOD)
    for target, code in (
        (torch.zeros(130, 140, dtype=torch.int32), "load.dtype"),
        (torch.zeros(140, 130), "load.shape"),
    ):
        with pytest.raises(MismatchError) as caught:
            hf.load(root, {"a.weight": target}, dequantize=True)
        assert [p.code for p in caught.value.problems] == [code]


@pytest.mark.parametrize(
    "name", ["a.scale", "norm.scale", "a_scale", "hc_head_scale", "a_scales", "weight_scale"]
)
def test_plain_tensors_with_such_names_stay_plain(tmp_path: Path, name: str) -> None:
    tensors = {"a.weight": torch.randn(4, 4), name: torch.randn(3)}
    root = write(tmp_path / "m", tensors)
    assert not is_quantized(hf.read_manifest(root))
    out = {k: torch.zeros_like(v) for k, v in tensors.items()}
    hf.load(root, out)
    assert torch.equal(out[name], tensors[name])


def test_int8_without_a_scale_is_an_integer(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"a.weight": torch.arange(6, dtype=torch.int8)})
    out = {"a.weight": torch.zeros(6, dtype=torch.int8)}
    hf.load(root, out)
    assert torch.equal(out["a.weight"], torch.arange(6, dtype=torch.int8))


# --- what a consumer sees -----------------------------------------------------------------------


def test_the_logical_manifest(tmp_path: Path) -> None:
    packed = {
        "e.weight": torch.zeros(4, 32, dtype=torch.int8),
        "e.scale": torch.zeros(4, 2, dtype=torch.uint8).view(E8M0),
    }
    root = write(tmp_path / "m", {**GOOD, **packed, **gpt_oss()[0], "norm": torch.ones(3)})
    physical = hf.read_manifest(root)
    seen = logical_manifest(physical)
    assert {k: (e.shape, e.dtype) for k, e in seen.tensors.items()} == {
        "a.weight": ((130, 140), "bfloat16"),
        "e.weight": ((4, 64), "bfloat16"),
        "mlp.experts.gate_up_proj": ((3, 64, 10), "bfloat16"),
        "norm": ((3,), "float32"),
    }
    assert logical_manifest(physical, "float32").tensors["a.weight"].dtype == "float32"
    assert describe(detect(physical).values()) == (
        "fp8 128x128 blocks (1 tensors), fp4 in int8 (1 tensors), mxfp4 (1 tensors)"
    )


def test_published_counts_pair_up() -> None:
    """Scales of a layer of each published layout, by keys and shapes alone."""
    from torchtitan_ckpt.manifest import Manifest, TensorEntry

    entries = [
        TensorEntry("layers.0.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "float8_e4m3fn"),
        TensorEntry("layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv", (5, 56), "float32"),
        TensorEntry("layers.0.ffn.experts.10.w1.weight", (2048, 2048), "int8"),
        TensorEntry("layers.0.ffn.experts.10.w1.scale", (2048, 128), "float8_e8m0fnu"),
        TensorEntry("layers.0.mlp.experts.gate_up_proj_blocks", (32, 5760, 90, 16), "uint8"),
        TensorEntry("layers.0.mlp.experts.gate_up_proj_scales", (32, 5760, 90), "uint8"),
        TensorEntry("layers.0.ffn.gate.tid2eid", (129, 6), "int64"),
    ]
    found = detect(Manifest("x", "hf", {e.key: e for e in entries}))
    assert {k: (v.scheme, v.shape) for k, v in found.items()} == {
        "layers.0.self_attn.kv_a_proj_with_mqa.weight": ("fp8", (576, 7168)),
        "layers.0.ffn.experts.10.w1.weight": ("fp4", (2048, 4096)),
        "layers.0.mlp.experts.gate_up_proj": ("mxfp4", (32, 2880, 5760)),
    }


# --- arithmetic ---------------------------------------------------------------------------------


def test_every_fp8_code_has_torchs_value() -> None:
    for dtype in (FP8, torch.float8_e5m2):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(2, 128)
        for factor in (1.0, 3.0, 2.0**-100, 2.0**-148, 2.0**30, 2.0**110, 1.1e30):
            scale = torch.full((1, 1), factor)
            got = dequantize(codes, scale, dtype=torch.float32)
            want = codes.to(torch.float32) * factor
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.nan_to_num(0, 1, 2), want.nan_to_num(0, 1, 2)), factor
            assert torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())


def test_exponent_scales() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    values = scale_to_float(every)
    assert values[127] == 1.0
    assert values[0] == 2.0**-127
    assert values[255].isnan()
    assert torch.equal(values[:255], every.view(E8M0)[:255].to(torch.float32))
    assert torch.equal(to_e8m0(values[:255]).view(torch.uint8), every[:255])
    with pytest.raises(ValueError, match="power of two"):
        to_e8m0(torch.tensor([3.0]))


def test_fp4_over_every_byte_and_exponent() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for exponent in (0, 1, 100, 127, 200, 252, 254):
        scale = torch.full((16, 1), exponent, dtype=torch.uint8)
        got = dequantize(packed.view(torch.int8), scale, "fp4", dtype=torch.float32)
        assert same(got, by_hand_fp4(packed, scale)), exponent
    nan = dequantize(packed, torch.full((16, 1), 255, dtype=torch.uint8), "fp4")
    assert bool(nan.isnan().all())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_part_is_the_part_of_the_whole(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 400))
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    height, width = (
        data.draw(st.integers(1, rows - row)),
        data.draw(st.integers(1, columns - column)),
    )
    codes, scale = all_codes(rows, columns), scales(*scale_shape("fp8", (rows, columns)))
    part = dequantize(
        codes[row : row + height, column : column + width],
        scale[
            row // 128 : (row + height - 1) // 128 + 1,
            column // 128 : (column + width - 1) // 128 + 1,
        ],
        offsets=(row, column),
        dtype=torch.float32,
    )
    assert same(part, by_hand_fp8(codes, scale)[row : row + height, column : column + width])


def wild(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values * torch.exp2(torch.randint(-30, 30, (shape[0], 1), generator=generator).float())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from(["ue8m0", "float32"]),
    st.booleans(),
)
def test_fp8_comes_back_as_the_same_bytes(
    seed: int, rows: int, columns: int, how: str, coarse: bool
) -> None:
    weight = wild((rows, columns), seed)
    if coarse:  # values between the codes that decide how a peak is rounded
        weight = torch.randint(
            440, 520, (rows, columns), generator=torch.Generator().manual_seed(seed)
        ).float()
    codes, scale = quantize_fp8(weight, scale_format=how)
    values = dequantize(codes, scale, dtype=torch.float32)
    again, scale_again = quantize_fp8(values, scale_format=how)
    assert same(again, codes)
    assert same(scale_again, scale)
    if how == "ue8m0":
        half = dequantize(codes, scale, dtype=torch.bfloat16)
        assert same(half.float(), values), "a power of two loses nothing in bfloat16"
        assert same(quantize_fp8(half)[0], codes)
        assert same(scale_to_float(to_e8m0(scale)), scale)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 6), st.booleans())
def test_fp4_comes_back_as_the_same_bytes(seed: int, rows: int, groups: int, coarse: bool) -> None:
    weight = wild((rows, groups * 32), seed)
    if coarse:
        weight = (
            torch.randint(-33, 33, weight.shape, generator=torch.Generator().manual_seed(seed))
            / 4.0
        )
    codes, scale = quantize_fp4(weight)
    values = dequantize(codes, scale, "fp4", dtype=torch.bfloat16)
    again, scale_again = quantize_fp4(values)
    assert same(again, codes)
    assert same(scale_again, scale)


def test_mxfp4_comes_back_as_the_same_bytes_and_transposed() -> None:
    weight = torch.randn(3, 64, 10)
    blocks, scale = quantize_mxfp4(weight)
    assert blocks.shape == (3, 10, 2, 16)
    values = dequantize(blocks, scale, "mxfp4", dtype=torch.float32).transpose(1, 2)
    assert float((values - weight).abs().max()) < 0.5
    again, scale_again = quantize_mxfp4(values)
    assert same(again, blocks)
    assert same(scale_again, scale)


@pytest.mark.parametrize("how", ["ue8m0", "float32"])
def test_fp8_rounding_is_at_the_formats_floor(how: str) -> None:
    """FP8-06: three bits of mantissa round by at most 1/16 of the value, or half of the smallest
    step of the block; a scale that was rounded after dividing would give up to a factor of two."""
    weight = wild((400, 300), 1)
    codes, scale = quantize_fp8(weight, scale_format=how)
    error = (dequantize(codes, scale, dtype=torch.float32) - weight).abs()
    grown = scale.repeat_interleave(128, 0)[:400].repeat_interleave(128, 1)[:, :300]
    assert bool((error <= torch.maximum(weight.abs() / 16, grown * 2.0**-10) * 1.001).all())
    assert float(codes.float().abs().max()) <= 448


def test_fp4_rounding_is_at_the_formats_floor() -> None:
    weight = wild((300, 320), 2)
    codes, scale = quantize_fp4(weight)
    error = (dequantize(codes, scale, "fp4", dtype=torch.float32) - weight).abs()
    grown = scale_to_float(scale).repeat_interleave(32, 1)
    scaled = weight.abs() / grown
    step = torch.where(scaled < 2, 0.5, torch.where(scaled < 4, 1.0, 2.0))
    assert bool((error <= grown * step / 2).all())
    assert float(scaled.max()) <= 7


def test_fp4_ties_go_to_the_even_code() -> None:
    values = torch.zeros(1, 32)
    values[0, :7] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values[0, 8:15] = -values[0, :7]
    one = torch.full((1, 1), 127, dtype=torch.uint8)
    codes, _ = quantize_fp4(values, scale=one)
    got = dequantize(codes, one, "fp4", dtype=torch.float32)[0]
    assert got[:7].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert got[8:15].tolist() == [-v for v in got[:7].tolist()]


def test_a_reader_hands_out_slices_of_values(tmp_path: Path) -> None:
    tensors, values = gpt_oss()
    codes, scale = all_codes(300, 200), scales(3, 2)
    tensors |= {"a.weight": codes, "a.weight_scale_inv": scale, "n": torch.arange(12).view(3, 4)}
    root = write(tmp_path / "m", tensors)
    with pytest.raises(RefusedError):
        hf.open_reader(root)
    with hf.open_reader(root, dequantize=True, dtype="float32") as reader:
        assert set(reader.manifest.tensors) == {"a.weight", "mlp.experts.gate_up_proj", "n"}
        part = reader.read("a.weight", (130, 7), (150, 190))
        assert same(part, by_hand_fp8(codes, scale)[130:280, 7:197])
        part = reader.read("mlp.experts.gate_up_proj", (1, 33, 2), (2, 30, 5))
        assert same(part, values.transpose(1, 2)[1:3, 33:63, 2:7].contiguous())
        assert reader.read("n", (1, 0)).tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
        with pytest.raises(NotFoundError, match=r"nearest: a\.weight"):
            reader.read("a.weigth")
    with hf.open_reader(root, raw=True) as reader:
        assert same(reader.read("a.weight"), codes)


def test_given_scales_give_any_codes_back() -> None:
    codes, scale = all_codes(300, 200), scales(3, 2)
    values = dequantize(codes, scale, dtype=torch.float32)
    again, kept = quantize_fp8(values, scale=scale)
    assert same(again, codes)
    assert same(kept, scale)
    packed = (torch.arange(6 * 48) * 11 % 256).to(torch.uint8).view(6, 48)
    factors = (118 + torch.arange(18)).to(torch.uint8).view(6, 3)
    again, kept = quantize_fp4(dequantize(packed, factors, "fp4"), scale=factors)
    assert same(again.view(torch.uint8), packed)
    assert same(kept, factors)


def test_zeros_and_tiny_values_are_quantized_and_bad_ones_refused() -> None:
    weight = torch.zeros(130, 64)
    weight[129, 3] = 1e-40
    weight[0, 0] = -0.0
    codes, scale = quantize_fp8(weight)
    assert bool(torch.isfinite(scale).all())
    assert bool((scale > 0).all())
    assert bool((dequantize(codes, scale, dtype=torch.float32)[:128] == 0).all())
    packed, factors = quantize_fp4(weight)
    assert same(quantize_fp4(dequantize(packed, factors, "fp4", dtype=torch.float32))[0], packed)
    for bad in (math.nan, math.inf):
        weight[5, 5] = bad
        for quantize in (quantize_fp8, quantize_fp4):
            with pytest.raises(SaveError, match=r"layers\.5\.w.*NaN or infinite"):
                quantize(weight, key="layers.5.w")
    with pytest.raises(SaveError, match="multiple of 32"):
        quantize_fp4(torch.ones(3, 33))


def test_a_quantized_export_is_read_back(tmp_path: Path) -> None:
    """Each scheme through its own entries, names, shapes and dtypes as published."""
    weight, experts = torch.randn(200, 320), torch.randn(3, 64, 10)
    tensors: dict[str, torch.Tensor] = {}
    for key, scheme, scale_kind in (
        ("v3.weight", "fp8", "inv"),
        ("v4.weight", "fp8", "e8m0"),
        ("e.weight", "fp4", "e8m0"),
    ):
        code_entry, scale_entry = stored_entries(scheme, key, (200, 320), scale=scale_kind)
        codes, scale = quantize_fp4(weight) if scheme == "fp4" else quantize_fp8(weight)
        tensors[code_entry.key] = codes
        if scale_entry.dtype == "float8_e8m0fnu":
            scale = scale.view(E8M0) if scheme == "fp4" else to_e8m0(scale)
        tensors[scale_entry.key] = scale
        for entry in (code_entry, scale_entry):
            assert (tuple(tensors[entry.key].shape), str(tensors[entry.key].dtype)[6:]) == (
                entry.shape,
                entry.dtype,
            )
    code_entry, scale_entry = stored_entries("mxfp4", "g.down_proj", (3, 64, 10))
    tensors[code_entry.key], tensors[scale_entry.key] = quantize_mxfp4(experts)
    assert tuple(tensors[code_entry.key].shape) == code_entry.shape
    assert tuple(tensors[scale_entry.key].shape) == scale_entry.shape
    hf.save(tensors, tmp_path / "m")
    out = {k: torch.full((200, 320), math.nan) for k in ("v3.weight", "v4.weight", "e.weight")}
    out["g.down_proj"] = torch.full((3, 64, 10), math.nan)
    hf.load(tmp_path / "m", out, dequantize=True)
    assert bool(((out["v3.weight"] - weight).abs() <= weight.abs() / 16 + 1e-3).all())
    assert same(out["v3.weight"], out["v4.weight"])
    assert float((out["e.weight"] - weight).abs().max()) < 1
    assert float((out["g.down_proj"] - experts).abs().max()) < 1


@pytest.mark.parametrize("shape", [(200, 136), (576, 130)])
def test_torchs_reader_agrees(tmp_path: Path, shape: tuple[int, int]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

    codes, scale = quantize_fp8(torch.randn(shape), scale_format="float32")
    hf.save(
        {"a.weight": codes, "a.weight_scale_inv": scale, "b": torch.ones(2)},
        tmp_path / "m",
        file_map={"a.weight": 1, "a.weight_scale_inv": 2, "b": 2},
    )
    theirs = {"a.weight": torch.zeros(shape, dtype=torch.bfloat16)}
    dcp.load(
        theirs,
        storage_reader=QuantizedHuggingFaceStorageReader(
            str(tmp_path / "m"), target_dtype=torch.bfloat16
        ),
        no_dist=True,
    )
    ours = {"a.weight": torch.zeros(shape, dtype=torch.bfloat16), "b": torch.zeros(2)}
    hf.load(tmp_path / "m", ours, dequantize=True)
    assert same(ours["a.weight"], theirs["a.weight"])
