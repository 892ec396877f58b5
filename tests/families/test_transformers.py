"""transformers as an independent judge: its files through our tables, ours through its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.facts import TINY

pytest.importorskip("transformers", reason="wants the extra 'hf'")
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.families import hf_models
from torchtitan_ckpt.adapter import MappingAdapter
from torchtitan_ckpt.families import get, names

pytestmark = pytest.mark.needs_hf

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in names()),
    ("qwen3", {"tie_word_embeddings": False}),
    ("llama3", {"tie_word_embeddings": True}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("qwen3_moe", {"mlp_only_layers": [], "num_experts": 12}),
]

# transformers 5.24 writes names for DeepSeek-V4 that no published file has; it loads both.
V4_TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}


def hub_names(name: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if name != "deepseek_v4":
        return state
    out = {}
    for key, tensor in state.items():
        renamed = V4_TOP.get(key, key.removeprefix("model."))
        if renamed.startswith("layers.") and renamed.endswith(".attn.norm.weight"):
            renamed = renamed.replace(".attn.norm.", ".attn.kv_norm.")
        out[renamed] = tensor
    return out


@pytest.mark.parametrize(("name", "change"), CASES, ids=str)
def test_through_native_and_back_into_transformers(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    config = {**TINY[name], **change}
    model = hf_models.build(config)
    want = hf_models.logits(model, config["vocab_size"])
    file = hub_names(name, hf_models.saved(model, tmp_path / "theirs"))
    for generation in get(name).generations:
        adapter = MappingAdapter(config, generation=generation)
        native = adapter.from_hf(file)
        hf = adapter.to_hf(native)
        # transformers does not build MTP layers, so the file holds none of their keys.
        extra = {key for key in adapter.hf_entries() if key not in file}
        assert all(f".{config['num_hidden_layers']}." in k or k.startswith("mtp.") for k in extra)
        assert hf.keys() == file.keys()
        assert all(torch.equal(hf[key], file[key]) for key in file)
        ours = tmp_path / generation
        ours.mkdir()
        model.config.save_pretrained(ours)
        save_file({k: v.contiguous() for k, v in hf.items()}, ours / "model.safetensors")
        loaded, report = AutoModelForCausalLM.from_pretrained(
            ours, attn_implementation="eager", output_loading_info=True, dtype=torch.float32
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert torch.equal(hf_models.logits(loaded.eval(), config["vocab_size"]), want)


@pytest.mark.parametrize("name", names())
def test_the_config_that_transformers_saves_is_understood(name: str, tmp_path: Path) -> None:
    model = hf_models.build(TINY[name])
    model.config.save_pretrained(tmp_path)
    generation = get(name).generations[0]
    ours = MappingAdapter(TINY[name], generation=generation).hf_entries()
    assert MappingAdapter(tmp_path, generation=generation).hf_entries().keys() == ours.keys()
    by_object = MappingAdapter(model.config, generation=generation)
    assert by_object.hf_entries().keys() == ours.keys()
