"""Qwen3, dense: no rope permutation; q and k are normalised per head; small models tie the head.

Names and shapes: published headers and transformers 5.24; torchtitan 0.3.0 and v0.2.2.
"""

from __future__ import annotations

from torchtitan_ckpt.mapping.family import Family, Row, block
from torchtitan_ckpt.mapping.layers import main

DEFAULTS = {
    "head_dim": "hidden_size // num_attention_heads",
    "num_key_value_heads": "num_attention_heads",
}

TOP = (
    Row(
        "model.embed_tokens.weight",
        "tok_embeddings.weight",
        shape="vocab_size, hidden_size",
    ),
    Row("model.norm.weight", "norm.weight", shape="hidden_size"),
    Row(
        "lm_head.weight",
        "lm_head.weight",
        "output.weight",
        shape="vocab_size, hidden_size",
        when="not tie_word_embeddings",
    ),
    Row(
        "lm_head.weight",
        "lm_head.weight",
        "output.weight",
        shape="vocab_size, hidden_size",
        when="tie_word_embeddings",
        copy_of="model.embed_tokens.weight",
        group="tied-head",
    ),
)

ATTENTION = (
    Row(
        "self_attn.q_proj.weight",
        "attention.qkv_linear.wq.weight",
        "attention.wq.weight",
        shape="num_attention_heads*head_dim, hidden_size",
    ),
    Row(
        "self_attn.k_proj.weight",
        "attention.qkv_linear.wk.weight",
        "attention.wk.weight",
        shape="num_key_value_heads*head_dim, hidden_size",
    ),
    Row(
        "self_attn.v_proj.weight",
        "attention.qkv_linear.wv.weight",
        "attention.wv.weight",
        shape="num_key_value_heads*head_dim, hidden_size",
    ),
    Row(
        "self_attn.o_proj.weight",
        "attention.wo.weight",
        shape="hidden_size, num_attention_heads*head_dim",
    ),
    Row("self_attn.q_norm.weight", "attention.q_norm.weight", shape="head_dim"),
    Row("self_attn.k_norm.weight", "attention.k_norm.weight", shape="head_dim"),
    Row("input_layernorm.weight", "attention_norm.weight", shape="hidden_size"),
    Row("post_attention_layernorm.weight", "ffn_norm.weight", shape="hidden_size"),
)

DENSE = (
    Row("mlp.gate_proj.weight", "feed_forward.w1.weight", shape="intermediate_size, hidden_size"),
    Row("mlp.up_proj.weight", "feed_forward.w3.weight", shape="intermediate_size, hidden_size"),
    Row("mlp.down_proj.weight", "feed_forward.w2.weight", shape="hidden_size, intermediate_size"),
)

LAYER = {"hf": "model.layers.{layer}.", "titan": "layers.{layer}.", "npu": "layers.{layer}."}

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    rows=(*TOP, *block(ATTENTION, **LAYER), *block(DENSE, **LAYER)),
    sets={"main": main},
    defaults=DEFAULTS,
)
