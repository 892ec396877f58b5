"""MappingAdapter: every kind of config, torchtitan's protocol, the index, dtypes of an export."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from torchtitan_ckpt.adapter import MappingAdapter, StateDictAdapter
from torchtitan_ckpt.errors import ConfigError, MappingError, MismatchError
from torchtitan_ckpt.hf_load import load_native

MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 20,
    "intermediate_size": 28,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 13,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_experts": 11,
    "mlp_only_layers": [3],
    "vocab_size": 37,
    "tie_word_embeddings": False,
}
DENSE = {**MOE, "model_type": "llama", "tie_word_embeddings": True, "num_hidden_layers": 2}
DEEP = {
    "model_type": "deepseek_v32",
    "hidden_size": 20,
    "intermediate_size": 28,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "index_n_heads": 2,
    "index_head_dim": 7,
    "n_routed_experts": 11,
    "n_shared_experts": 1,
    "vocab_size": 37,
}


@dataclass
class JobConfig:
    model_type: str = "qwen3_moe"
    hidden_size: int = 20
    intermediate_size: int = 28
    moe_intermediate_size: int = 12
    num_hidden_layers: int = 13
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 6
    num_experts: int = 11
    mlp_only_layers: list[int] = field(default_factory=lambda: [3])
    vocab_size: int = 37
    tie_word_embeddings: bool = False
    load_balance_coeff: float | None = None


def values(adapter: MappingAdapter, dtype: str = "float32") -> dict[str, torch.Tensor]:
    out = {}
    for number, (key, entry) in enumerate(adapter.native_entries(dtype).items()):
        count = entry.numel
        flat = (torch.arange(count) + 10_000 * number) % 30_011
        zero = key.endswith("expert_bias_E")
        out[key] = (flat * (not zero)).reshape(entry.shape).to(getattr(torch, entry.dtype))
    for key, target in adapter.tied_native.items():
        out[key] = out[target].clone()
    return out


def write(adapter: MappingAdapter, folder: Path, config: dict, files: int = 3) -> dict:
    hf = adapter.to_hf(values(adapter))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {k: v.contiguous() for i, (k, v) in enumerate(hf.items()) if i % files == number}
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return hf


def test_every_kind_of_config_gives_one_table(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    want = MappingAdapter(MOE).hf_entries()
    for config in (tmp_path, tmp_path / "config.json", JobConfig()):
        assert MappingAdapter(config).hf_entries() == want
    assert MappingAdapter(object(), tmp_path).hf_entries() == want
    with pytest.raises(ConfigError, match="no-config"):
        MappingAdapter(object())
    with pytest.raises(ConfigError, match="unreadable-config"):
        MappingAdapter(tmp_path / "nothing.json")
    with pytest.raises(MappingError, match="model_type 'bert'"):
        MappingAdapter({**MOE, "model_type": "bert"})


def test_a_model_without_the_bias_is_not_given_one() -> None:
    with_bias, without = MappingAdapter(MOE), MappingAdapter(JobConfig())
    biases = {key for key in with_bias.native_entries() if key.endswith("expert_bias_E")}
    assert len(biases) == 12
    assert with_bias.native_entries().keys() - without.native_entries().keys() == biases
    hf = with_bias.to_hf(values(with_bias))
    assert biases <= with_bias.from_hf(hf).keys()
    assert not biases & without.from_hf(hf).keys()
    like = {k: v for k, v in values(with_bias).items() if k not in biases}
    assert not biases & with_bias.from_hf(hf, like=like).keys()


def test_protocol_and_index(tmp_path: Path) -> None:
    hf = write(MappingAdapter(MOE), tmp_path / "hf", MOE)
    adapter = MappingAdapter(MOE, str(tmp_path / "hf"))
    assert isinstance(adapter, StateDictAdapter)
    assert adapter.hf_assets_path == str(tmp_path / "hf")
    assert adapter.fqn_to_index_mapping == {k: i % 3 + 1 for i, k in enumerate(hf)}
    assert MappingAdapter(MOE).fqn_to_index_mapping is None


def test_the_index_lists_only_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    weights = ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "stray.key")
    index = {"weight_map": dict.fromkeys(weights, "model-00002-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plain = MappingAdapter(tmp_path, tmp_path).fqn_to_index_mapping
    assert plain == {"model.embed_tokens.weight": 2, "model.norm.weight": 2}
    full = MappingAdapter(tmp_path, tmp_path, emit=("tied-head",)).fqn_to_index_mapping
    assert full == {**plain, "lm_head.weight": 2}


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_torchs_own_loader_reads_through_our_reader(config: dict, tmp_path: Path) -> None:
    adapter = MappingAdapter(config)
    write(adapter, tmp_path / "hf", config)
    want = values(adapter)
    empty = {k: torch.full_like(v, float("nan")) for k, v in want.items()}
    for key, target in adapter.tied_native.items():
        empty[key] = empty[target]
    template = adapter.to_hf(empty)
    dcp.load(
        template, storage_reader=adapter.get_hf_storage_reader(str(tmp_path / "hf")), no_dist=True
    )
    got = adapter.from_hf(template)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
@pytest.mark.parametrize("window", [200, 1 << 20])
def test_a_load_by_plan_fills_in_place(config: dict, window: int, tmp_path: Path) -> None:
    adapter = MappingAdapter(config)
    write(adapter, tmp_path / "hf", config)
    want = values(adapter)
    got = {k: torch.full_like(v, float("nan")) for k, v in want.items()}
    places = {k: v.data_ptr() for k, v in got.items()}
    load_native(adapter, tmp_path / "hf", got, window=window)
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert {k: v.data_ptr() for k, v in got.items()} == places
    part = {k: torch.zeros_like(v, dtype=torch.bfloat16) for k, v in want.items() if ".1." in k}
    load_native(adapter, tmp_path / "hf", part)
    assert all(torch.equal(part[key], want[key].bfloat16()) for key in part)


def test_a_load_by_plan_compares_before_it_reads(tmp_path: Path) -> None:
    adapter = MappingAdapter(MOE)
    write(adapter, tmp_path / "hf", MOE)
    other = MappingAdapter({**MOE, "num_hidden_layers": 14, "vocab_size": 38})
    native = {k: torch.zeros(e.shape) for k, e in other.native_entries().items()}
    with pytest.raises(MismatchError) as error:
        load_native(other, tmp_path / "hf", native)
    assert {p.code for p in error.value.problems} == {"load.missing", "load.shape"}
    assert not any(bool(v.any()) for v in native.values())
    smaller = MappingAdapter({**MOE, "num_hidden_layers": 12})
    native = {k: torch.zeros(e.shape) for k, e in smaller.native_entries().items()}
    with pytest.raises(MismatchError, match="no rule matches"):
        load_native(smaller, tmp_path / "hf", native)
    with pytest.raises(MappingError, match=r"unknown-keys"):
        load_native(adapter, tmp_path / "hf", {"layers.0.wq": torch.zeros(1)})


def test_pinned_tensors_and_integers_keep_their_dtype_in_an_export() -> None:
    adapter = MappingAdapter(DEEP)
    hf = adapter.cast(adapter.to_hf(values(adapter)), "bfloat16")
    pinned = {k for k, v in hf.items() if v.dtype == torch.float32}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in pinned
    assert "model.norm.weight" in pinned
    assert all("norm" in k or k.endswith("e_score_correction_bias") for k in pinned)
    assert hf["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert adapter.export_dtype("model.norm.weight", "int64", "bfloat16") == "int64"
    plan = adapter.plan_to_hf(adapter.native_entries(), export_dtype="bfloat16")
    assert {k: e.dtype for k, e in plan.targets.items()} == {
        k: str(v.dtype)[6:] for k, v in hf.items()
    }


def test_what_an_export_leaves_out_is_said() -> None:
    adapter = MappingAdapter(DEEP)
    said = "\n".join(str(item) for item in adapter.left_out(values(adapter)))
    assert "model.layers.2.embed_tokens.weight" in said
    assert "switch on: emit='mtp-duplicates'" in said
    assert "model.layers.2.shared_head.norm.weight" in adapter.to_hf(values(adapter))
    file = adapter.to_hf(values(adapter))
    file["model.layers.2.shared_head.norm.weight"] = torch.randn(20)
    assert adapter.from_hf(file).keys() == values(adapter).keys()


def test_quantized_files_load_by_plan_and_through_torchs_loader(tmp_path: Path) -> None:
    adapter = MappingAdapter(DEEP)
    want = {k: (v % 17).to(v.dtype) for k, v in values(adapter).items()}
    file = {k: v.contiguous() for k, v in adapter.to_hf(want).items()}
    for key in [k for k in file if k.endswith(("experts.7.up_proj.weight", "kv_b_proj.weight"))]:
        codes = (file[key] / 2).to(torch.float8_e4m3fn)  # halves of 0..16: exact
        assert torch.equal(codes.float() * 2, file[key])
        file[key] = codes
        file[key + "_scale_inv"] = torch.full((1, 1), 2.0)
    save_file(file, tmp_path / "model.safetensors")
    got = {k: torch.full_like(v, float("nan")) for k, v in want.items()}
    load_native(adapter, tmp_path, got, dequantize=True)
    assert all(torch.equal(got[key], want[key]) for key in want)
    template = adapter.to_hf({k: torch.zeros_like(v) for k, v in want.items()})
    del template["model.layers.2.shared_head.norm.weight"]
    reader = adapter.get_hf_storage_reader(str(tmp_path), from_quantized=True)
    dcp.load(template, storage_reader=reader, no_dist=True)
    again = adapter.from_hf(template)
    assert all(torch.equal(again[key], want[key]) for key in want)
