"""Small configs of the shipped families, made to show faults.

Sizes are pairwise different and no head count times head size equals the hidden size, so that a
transposed weight has another shape; there are twelve layers and twelve experts, so that numbers
sorted as text show. They are nobody's published model.
"""

from __future__ import annotations

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
