"""Small configs of the shipped families, made to show faults.

Sizes are pairwise different and no head count times head size equals the hidden size, so that a
transposed weight has another shape; there are twelve layers and twelve experts, so that numbers
sorted as text show. They are nobody's published model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMMON: dict[str, Any] = {"dtype": "bfloat16", "tie_word_embeddings": False, "vocab_size": 53}
_DENSE: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 20,
    "intermediate_size": 34,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_MLA: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 20,
    "intermediate_size": 34,
    "moe_intermediate_size": 14,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_hidden_layers": 12,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 11,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
_INDEXER = {"index_n_heads": 4, "index_head_dim": 13, "index_topk": 4}

CONFIGS: dict[str, dict[str, Any]] = {
    # transformers' Llama asks for a hidden size that is a multiple of the heads.
    "llama3": {**_DENSE, "model_type": "llama", "num_attention_heads": 4},
    "qwen3": {**_DENSE, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {
        **_DENSE,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 14,
        "num_experts": 12,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    },
    "deepseek_v3": {**_MLA, "model_type": "deepseek_v3"},
    "deepseek_v32": {**_MLA, **_INDEXER, "model_type": "deepseek_v32"},
    "deepseek_v4": {
        **_COMMON,
        **_INDEXER,
        "model_type": "deepseek_v4",
        "hidden_size": 20,
        "moe_intermediate_size": 14,
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 12,
        "num_hash_layers": 2,
        "num_nextn_predict_layers": 1,
        "compress_ratios": [0, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 0],
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "qk_rope_head_dim": 4,
        "q_lora_rank": 11,
        "o_lora_rank": 7,
        "o_groups": 2,
        "hc_mult": 2,
    },
    "gpt_oss": {
        **_DENSE,
        "model_type": "gpt_oss",
        "intermediate_size": 18,
        "num_local_experts": 12,
        "attention_bias": True,
    },
}

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def sizes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Other sizes that a search may draw of a config: few and odd ones, and more than ten."""
    # One layer has no experts, and torchtitan's adapter of DeepSeek-V3 looks for one that has.
    found: dict[str, tuple[int, ...]] = {"layers": (2, 3, 14), "heads": (2, 4, 10)}
    return {**found, "experts": (2, 3, 5, 14)} if _experts(config) else found


def resized(
    config: Mapping[str, Any], *, layers: int = 0, heads: int = 0, experts: int = 0
) -> dict[str, Any]:
    """The config of a model of other sizes; 0 leaves one as it is."""
    made = dict(config)
    if layers:
        made["num_hidden_layers"] = layers
        if "num_hash_layers" in config:
            made["num_hash_layers"] = min(layers, config["num_hash_layers"])
        if "compress_ratios" in config:
            # One more for the layer that predicts a further token, as it was.
            last = config["num_hidden_layers"]
            ratios = config["compress_ratios"]
            made["compress_ratios"] = [ratios[i % last] for i in range(layers)] + ratios[last:]
    if heads:
        made["num_attention_heads"] = heads
        if config["num_key_value_heads"] == config["num_attention_heads"]:
            made["num_key_value_heads"] = heads
    if experts:
        made[_experts(config)] = experts
    return made


def _experts(config: Mapping[str, Any]) -> str:
    """The field that counts a config's experts, or an empty string."""
    return next((name for name in _EXPERTS if config.get(name)), "")
