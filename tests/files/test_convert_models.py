"""`convert` between native generations and expert formats, quantized files, and averages."""

import json

import pytest
import torch

from tests.files.convert_lab import (
    FIXTURES,
    dcp_tensors,
    full_step,
    go,
    hf_tensors,
    native_of,
    same,
    same_dict,
    save_dcp,
    write_hf,
)
from torchtitan_ckpt.adapter import MappingAdapter
from torchtitan_ckpt.errors import ConfigError, MismatchError, RefusedError
from torchtitan_ckpt.formats.quantized_math import dequantize, quantize_fp8
from torchtitan_ckpt.mapping.w13 import shard_fused

MOE = FIXTURES / "moe"


def test_generation_to_generation_and_back(tmp_path):
    titan = native_of("moe")
    npu = native_of("moe", generation="npu")
    assert set(titan) != set(npu)
    save_dcp(titan, tmp_path / "titan")
    done = go(tmp_path / "titan", tmp_path / "npu", to_generation="npu", config=str(MOE))
    assert done.target_format == "dcp"
    assert same_dict(dcp_tensors(tmp_path / "npu", tmp_path / "a.pt"), npu)
    # The generation of the source is seen from its keys.
    go(tmp_path / "npu", tmp_path / "back", to_generation="titan", config=str(MOE))
    assert same_dict(dcp_tensors(tmp_path / "back", tmp_path / "b.pt"), titan)
    go(tmp_path / "npu", tmp_path / "hf", config=str(MOE))
    assert same_dict(hf_tensors(tmp_path / "hf"), hf_tensors(MOE))


def test_expert_formats(tmp_path):
    standard = native_of("moe", generation="npu")
    fused = native_of("moe", generation="npu", experts="gmm")
    go(MOE, tmp_path / "gmm", to_generation="npu", save_expert_format="gmm")
    assert same_dict(dcp_tensors(tmp_path / "gmm", tmp_path / "a.pt"), fused)
    go(tmp_path / "gmm", tmp_path / "std", save_expert_format="standard", config=str(MOE))
    assert same_dict(dcp_tensors(tmp_path / "std", tmp_path / "b.pt"), standard)
    # Another generation has no fused experts: they are taken apart without being asked for.
    go(tmp_path / "gmm", tmp_path / "titan", to_generation="titan", config=str(MOE))
    assert same_dict(dcp_tensors(tmp_path / "titan", tmp_path / "c.pt"), native_of("moe"))
    go(tmp_path / "gmm", tmp_path / "hf", config=str(MOE), window=2**16)
    assert same_dict(hf_tensors(tmp_path / "hf"), hf_tensors(MOE))
    with pytest.raises(ConfigError, match="w1 and w3 apart"):
        go(tmp_path / "std", tmp_path / "no", to="hf", save_expert_format="gmm", config=str(MOE))


def test_w13_fused_by_shard_is_repaired(tmp_path):
    right = native_of("moe", generation="npu", experts="gmm")
    degree = 7
    wrong = {
        k: shard_fused(v, degree) if k.endswith("experts.w13") else v for k, v in right.items()
    }
    assert any(not torch.equal(right[k], wrong[k]) for k in right)
    save_dcp(wrong, tmp_path / "old")
    options = {"repair_w13_degree": degree, "config": str(MOE)}
    go(tmp_path / "old", tmp_path / "new", to="dcp", **options)
    assert same_dict(dcp_tensors(tmp_path / "new", tmp_path / "a.pt"), right)
    go(tmp_path / "old", tmp_path / "hf", **options)
    assert same_dict(hf_tensors(tmp_path / "hf"), hf_tensors(MOE))


def test_the_optimizer_is_not_left_under_old_names(tmp_path):
    save_dcp(full_step(), tmp_path / "step-7")
    options = {"to_generation": "npu", "config": str(FIXTURES / "dense-tied")}
    with pytest.raises(RefusedError, match="old names"):
        go(tmp_path / "step-7", tmp_path / "npu", **options)
    go(tmp_path / "step-7", tmp_path / "npu", only="model", **options)


@pytest.mark.parametrize("window", [2**16, 2**28])
def test_quantize_fp8_and_back(window, tmp_path):
    go(MOE, tmp_path / "fp8", to="hf", quantize="fp8", window=window)
    stored, plain = hf_tensors(tmp_path / "fp8"), hf_tensors(MOE)
    codes = {k for k, v in stored.items() if v.dtype == torch.float8_e4m3fn}
    assert codes == {k for k in plain if k.endswith("_proj.weight")}
    for key in codes:
        scale = stored.pop(f"{key}_scale_inv")
        values = dequantize(stored[key], scale, "fp8")
        assert torch.allclose(values.float(), plain[key].float(), rtol=0.07, atol=2**-9)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"
    with pytest.raises(RefusedError):
        go(tmp_path / "fp8", tmp_path / "dcp")
    go(tmp_path / "fp8", tmp_path / "plain", to="hf", dequantize=True, window=window)
    assert set(hf_tensors(tmp_path / "plain")) == set(plain)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    # What was dequantized quantizes to the same bytes again.
    go(tmp_path / "plain", tmp_path / "again", to="hf", quantize="fp8", window=window)
    again = hf_tensors(tmp_path / "again")
    assert all(same(again[key], stored[key]) for key in codes)
    go(tmp_path / "fp8", tmp_path / "dcp", dequantize=True, export_dtype="float32")
    native = dcp_tensors(tmp_path / "dcp", tmp_path / "x.pt")
    want = MappingAdapter(MOE).from_hf(hf_tensors(tmp_path / "plain"))
    assert all(same(native[k], v.float()) for k, v in want.items())


def test_quantized_files_are_resharded_as_they_are(tmp_path):
    go(MOE, tmp_path / "fp8", to="hf", quantize="fp8")
    go(tmp_path / "fp8", tmp_path / "parts", to="hf", max_shard_size="60KB")
    assert same_dict(hf_tensors(tmp_path / "parts"), hf_tensors(tmp_path / "fp8"))


GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "num_local_experts": 11,
    "vocab_size": 70,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize("window", [2**16, 2**28])
def test_mxfp4_like_the_family(window, tmp_path):
    adapter = MappingAdapter(GPT_OSS)
    torch.manual_seed(3)
    plain = {
        k: torch.randn(e.shape).to(getattr(torch, e.dtype)) for k, e in adapter.hf_entries().items()
    }
    write_hf(tmp_path / "plain", plain, GPT_OSS)
    go(tmp_path / "plain", tmp_path / "q", to="hf", quantize="family", window=window)
    stored = hf_tensors(tmp_path / "q")
    wanted = adapter.hf_entries(stored=True)
    assert {k: (tuple(v.shape), str(v.dtype)[6:]) for k, v in stored.items()} == {
        k: (e.shape, e.dtype) for k, e in wanted.items()
    }
    go(tmp_path / "q", tmp_path / "dcp", dequantize=True, window=window)
    go(tmp_path / "dcp", tmp_path / "q2", quantize="mxfp4", config=str(tmp_path / "plain"))
    assert same_dict(hf_tensors(tmp_path / "q2"), stored)


def test_averages(tmp_path):
    base = native_of("dense-tied")
    models = []
    for number in range(3):
        state = {k: v.float() + number for k, v in base.items()}
        state["steps"] = torch.arange(4)
        models.append(state)
        save_dcp({**full_step(), **state}, tmp_path / f"m{number}")
    sources = {"average": (str(tmp_path / "m1"), str(tmp_path / "m2"))}
    go(tmp_path / "m0", tmp_path / "mean.pt", weights=(0.5, 0.25, 0.25), **sources)
    got = torch.load(tmp_path / "mean.pt", weights_only=True)
    want = {k: 0.5 * models[0][k] + 0.25 * models[1][k] + 0.25 * models[2][k] for k in base}
    assert same_dict(got, {**want, "steps": torch.arange(4)})
    go(tmp_path / "m0", tmp_path / "equal", **sources)
    equal = dcp_tensors(tmp_path / "equal", tmp_path / "x.pt")
    for key in base:
        assert torch.allclose(equal[key], models[1][key], rtol=1e-6, atol=1e-6)
    models[2]["steps"] = torch.arange(4) + 1
    save_dcp(models[2], tmp_path / "other")
    with pytest.raises(MismatchError, match="no float differs"):
        go(tmp_path / "m0", tmp_path / "no.pt", average=(str(tmp_path / "other"),))
    save_dcp({k: v for k, v in models[2].items() if k != "norm.weight"}, tmp_path / "less")
    with pytest.raises(MismatchError, match=r"norm\.weight"):
        go(tmp_path / "m0", tmp_path / "no.pt", average=(str(tmp_path / "less"),))


def test_pinned_dtypes_of_a_family_are_kept(tmp_path):
    state = {k: v.float() for k, v in native_of("moe").items()}
    save_dcp(state, tmp_path / "dcp")
    options = {"export_dtype": "bfloat16", "config": str(MOE)}
    go(tmp_path / "dcp", tmp_path / "half", to="dcp", **options)
    half = dcp_tensors(tmp_path / "half", tmp_path / "x.pt")
    assert half["layers.0.moe.expert_bias_E"].dtype == torch.float32
    assert half["norm.weight"].dtype == torch.bfloat16


def test_fp8_of_tensors_cut_into_many_pieces(tmp_path):
    """Rows and columns of several blocks, the last ones short, in a window of a few rows."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 264,
        "intermediate_size": 392,
        "num_hidden_layers": 1,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 62,
        "vocab_size": 30,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    torch.manual_seed(9)
    entries = MappingAdapter(config).hf_entries()
    plain = {
        k: torch.randn(e.shape).bfloat16() * (i + 1) for i, (k, e) in enumerate(entries.items())
    }
    write_hf(tmp_path / "plain", plain, config)
    for name, window in (("narrow", 2**16), ("wide", 2**28)):
        go(tmp_path / "plain", tmp_path / name, to="hf", quantize="fp8", window=window)
    narrow = hf_tensors(tmp_path / "narrow")
    assert same_dict(narrow, hf_tensors(tmp_path / "wide"))
    key = "model.layers.0.mlp.gate_proj.weight"
    codes, scale = quantize_fp8(plain[key])
    assert scale.shape == (4, 3)
    assert same(narrow[key], codes)
    assert same(narrow[f"{key}_scale_inv"], scale)
