"""The tables against independent lists of native names, and every switch of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan_ckpt.families as families
from tests.families.facts import NATIVE, TINY, fingerprints
from torchtitan_ckpt.errors import MappingError
from torchtitan_ckpt.mapping import HfOnly, keys
from torchtitan_ckpt.mapping.compose import compose
from torchtitan_ckpt.mapping.expression import Config, evaluate

BOTH = [(name, g) for name in families.names() for g in families.get(name).generations]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


def expected_native(name: str, generation: str, gmm: bool) -> dict[str, tuple[int, ...]]:
    """Native names and shapes of the tiny config, expanded from the lists of other projects."""
    config = TINY[name]
    env = Config(config, {"num_nextn_predict_layers": 0})
    layers, mtp = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    ratios = config.get("compress_ratios", [])[:layers]
    hashed = config.get("num_hash_layers", 0)
    dense = config.get("mlp_only_layers", list(range(config.get("first_k_dense_replace", 0))))
    out: dict[str, tuple[int, ...]] = {}
    block: dict[str, tuple[int, ...]] = {}
    for pattern, shape, when in NATIVE[name][generation]:
        if "<" in pattern:
            continue
        if (when == "npu_gmm converter active") != (gmm and ".experts.w" in pattern) and (
            pattern.endswith((".w1", ".w3", ".w13")) and ".experts.w" in pattern
        ):
            continue
        if when.startswith("q_lora_rank == 0"):
            continue
        size = tuple(int(evaluate(p, env)) for p in shape.split(","))
        wanted = range(layers)
        if when.startswith("compress ratio"):
            ratio = int(when.split()[2])
            wanted = [i for i in wanted if ratios[i] == ratio]
        elif when.startswith("layer < num_hash"):
            wanted = range(hashed)
        elif when.startswith("layer >= num_hash"):
            wanted = range(hashed, layers)
        elif ".moe." in pattern and name != "deepseek_v4":
            wanted = [i for i in wanted if i not in dense]
        elif ".feed_forward." in pattern and dense:
            wanted = dense
        if pattern.startswith("layers.{layer}."):
            if not when.startswith(("compress", "layer <")) and ".feed_forward." not in pattern:
                block[pattern.removeprefix("layers.{layer}.")] = size
            for i in wanted:
                out[pattern.replace("{layer}", str(i))] = size
            continue
        pattern = pattern.replace("{num_hidden_layers-1}", str(layers - 1))
        for i in range(mtp) if "mtp}" in pattern else [0]:
            out[
                pattern.replace("{num_hidden_layers+mtp}", str(layers + i)).replace("{mtp}", str(i))
            ] = size
    for i in range(mtp):
        if name == "deepseek_v3" and generation == "npu":
            continue
        prefix = f"mtp_layers.{i}." if generation == "titan" else f"layers.{layers + i}."
        out.update({prefix + suffix: size for suffix, size in block.items()})
    return out


@pytest.mark.parametrize(("name", "generation"), BOTH)
@pytest.mark.parametrize("experts", ["standard", "gmm"])
def test_native_names_and_shapes(name: str, generation: str, experts: str) -> None:
    if experts == "gmm" and (generation == "titan" or "moe.experts.w13" not in str(NATIVE[name])):
        with pytest.raises(MappingError, match="gmm") if generation == "titan" else _nothing():
            families.get(name).mapping(TINY[name], generation, experts=experts)
        return
    mapping = families.get(name).mapping(TINY[name], generation, experts=experts)
    got = {key: e.shape for key, e in keys.native_entries(mapping).items()}
    assert got == expected_native(name, generation, experts == "gmm")


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize(("name", "generation"), BOTH)
def test_both_round_trips_are_bitwise(name: str, generation: str) -> None:
    mapping = families.get(name).mapping(TINY[name], generation)
    native = fingerprints(keys.native_entries(mapping), mapping)
    hf = mapping.to_hf(native)
    same(mapping.from_hf(hf), native)
    shuffled = dict(reversed(list(hf.items())))
    same(dict(sorted(mapping.from_hf(shuffled).items())), dict(sorted(native.items())))
    same(mapping.to_hf(mapping.from_hf(hf)), hf)


def variants() -> list[tuple[str, dict[str, Any]]]:
    deep = {"num_hidden_layers": 13}
    return [
        ("qwen3", {"tie_word_embeddings": False}),
        ("qwen3", {"head_dim": None}),
        ("llama3", {"tie_word_embeddings": True, **deep}),
        ("llama3", {"head_dim": None}),
        ("qwen3_moe", {"num_experts": 12, "mlp_only_layers": [], "decoder_sparse_step": 2, **deep}),
        ("qwen3_moe", {"num_experts": None, "num_local_experts": 11, "tie_word_embeddings": True}),
        ("deepseek_v3", {"num_nextn_predict_layers": 0, "n_routed_experts": 12, **deep}),
        ("deepseek_v3", {"num_nextn_predict_layers": 2}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3", {"topk_method": "greedy"}),
        ("deepseek_v32", {"num_nextn_predict_layers": 0, "n_routed_experts": 12, **deep}),
        ("deepseek_v4", {"num_nextn_predict_layers": 0, "num_hash_layers": 0}),
        ("deepseek_v4", {"num_hash_layers": 4, "compress_ratios": [1, 4, 128, 128, 1]}),
        ("deepseek_v4", {"compress_ratios": [4, 4, 128, 0, 0], "n_routed_experts": 12}),
        ("gpt_oss", {"num_local_experts": 12, **deep}),
    ]


@pytest.mark.parametrize(("name", "change"), variants(), ids=str)
def test_every_switch_of_a_config(name: str, change: dict[str, Any]) -> None:
    family = families.get(name)
    for generation in family.generations:
        mapping = family.mapping({**TINY[name], **change}, generation)
        native = fingerprints(keys.native_entries(mapping), mapping)
        hf = mapping.to_hf(native)
        assert set(hf) == set(keys.hf_entries(mapping))
        same(mapping.from_hf(hf), native)
        keys.coverage(mapping, native, hf)


def test_q_lora_rank_null_has_one_q_projection() -> None:
    config = {**TINY["deepseek_v3"], "q_lora_rank": None}
    hf = keys.hf_entries(families.get("deepseek_v3").mapping(config))
    assert hf["model.layers.0.self_attn.q_proj.weight"].shape == (4 * (16 + 8), 64)
    assert not [key for key in hf if "q_a_" in key or "q_b_" in key]


def test_v4_layers_by_ratio_and_hash() -> None:
    hf = keys.hf_entries(families.get("deepseek_v4").mapping(TINY["deepseek_v4"], "npu"))
    wide = [i for i in range(4) if f"layers.{i}.attn.indexer.wq_b.weight" in hf]
    assert wide == [1, 3]
    assert hf["layers.1.attn.compressor.ape"].shape == (4, 64)
    assert hf["layers.2.attn.compressor.ape"].shape == (128, 32)
    assert "layers.0.attn.compressor.ape" not in hf
    assert [i for i in range(4) if f"layers.{i}.ffn.gate.tid2eid" in hf] == [0]
    assert [i for i in range(4) if f"layers.{i}.ffn.gate.bias" in hf] == [1, 2, 3]
    assert hf["layers.0.ffn.gate.tid2eid"].dtype == "int64"


def test_without_mtp_the_files_keys_are_left_out_with_a_reason() -> None:
    family = families.get("deepseek_v3")
    full = family.mapping(TINY["deepseek_v3"])
    short = family.mapping(TINY["deepseek_v3"], mtp=False)
    hf = {k: torch.zeros(e.shape) for k, e in keys.hf_entries(full, declared=True).items()}
    native = short.from_hf(hf)
    assert not [key for key in native if key.startswith("mtp")]
    out = short.left_out(hf, 1)
    assert sum(len(item.keys) for item in out) == len([k for k in hf if ".layers.3." in k])
    assert {item.why for item in out} == {"the model is built without its MTP layers"}
    assert any(isinstance(entry, HfOnly) for entry in short.entries)


MIGRATIONS = [
    (name, experts)
    for name in families.names()
    if "titan" in families.get(name).generations
    for experts in (["standard", "gmm"] if "moe.experts.w13" in str(NATIVE[name]) else ["standard"])
]


@pytest.mark.parametrize(("name", "experts"), MIGRATIONS)
def test_migration_is_the_way_through_hugging_face(name: str, experts: str) -> None:
    family = families.get(name)
    old = family.mapping(TINY[name], "npu", experts=experts)
    new = family.mapping(TINY[name], "titan")
    migration = compose(old, new)
    native = fingerprints(keys.native_entries(old), old)
    biases = [key for key in native if key.endswith("expert_bias")]
    for number, key in enumerate(biases):
        native[key] = torch.arange(native[key].numel()) + 100.0 * (number + 1)
    moved = migration.to_hf(native)
    through = new.from_hf(old.to_hf(native))
    for key, tensor in moved.items():
        if not key.endswith("expert_bias_E") or name == "deepseek_v3":
            assert torch.equal(tensor, through[key]), key
    # What Hugging Face has no key for is kept by the migration.
    for key in biases:
        assert torch.equal(moved[key.replace("expert_bias", "expert_bias_E")], native[key])
    missing = {k for k in keys.native_entries(new) if not k.startswith("mtp_layers")} - set(moved)
    assert not missing
    same(dict(sorted(migration.from_hf(moved).items())), dict(sorted(native.items())))


def test_migration_says_what_the_older_generation_lacks() -> None:
    family = families.get("deepseek_v3")
    migration = compose(
        family.mapping(TINY["deepseek_v3"], "titan"), family.mapping(TINY["deepseek_v3"], "npu")
    )
    native = keys.native_entries(family.mapping(TINY["deepseek_v3"], "titan"))
    out = migration.left_out(native, 0)
    assert {key for item in out for key in item.keys} == {
        key for key in native if key.startswith("mtp_layers")
    }
    assert all("no MTP" in item.why for item in out)


def test_a_family_that_a_generation_lacks_is_refused_in_words() -> None:
    with pytest.raises(MappingError, match=r"torchtitan 0\.3\.0 has no DeepSeek-V4"):
        families.get("deepseek_v4").mapping(TINY["deepseek_v4"], "titan")
    with pytest.raises(MappingError, match="nearest: qwen3"):
        families.get("qwen33")
    with pytest.raises(MappingError, match="num_experts"):
        families.get("qwen3_moe").mapping({**TINY["qwen3"], "model_type": "qwen3_moe"})


def test_family_files_are_short_tables() -> None:
    folder = Path(families.__file__).parent
    for name in families.names():
        text = (folder / f"{name}.py").read_text()
        assert text.count("\n") <= 125, name
        code = [line.split("#")[0].strip() for line in text.splitlines()]
        assert not [line for line in code if line.startswith(("for ", "while ", "import re"))]
