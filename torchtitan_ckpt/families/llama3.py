"""Llama 3: native rope is interleaved and Hugging Face's half-split, so q and k rows permute.

Names and shapes: published index of Llama-3.1-8B and transformers 5.24; torchtitan 0.3.0, v0.2.2.
"""

from __future__ import annotations

from torchtitan_ckpt.families.qwen3 import DEFAULTS, DENSE, LAYER, TOP
from torchtitan_ckpt.mapping.family import Family, Row, block
from torchtitan_ckpt.mapping.layers import main
from torchtitan_ckpt.mapping.ops import RopeToHalf

ATTENTION = (
    Row(
        "self_attn.q_proj.weight",
        "attention.qkv_linear.wq.weight",
        "attention.wq.weight",
        shape="num_attention_heads*head_dim, hidden_size",
        ops=(RopeToHalf("head_dim"),),
    ),
    Row(
        "self_attn.k_proj.weight",
        "attention.qkv_linear.wk.weight",
        "attention.wk.weight",
        shape="num_key_value_heads*head_dim, hidden_size",
        ops=(RopeToHalf("head_dim"),),
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
    Row("input_layernorm.weight", "attention_norm.weight", shape="hidden_size"),
    Row("post_attention_layernorm.weight", "ffn_norm.weight", shape="hidden_size"),
    Row(
        "self_attn.rotary_emb.inv_freq",
        None,
        shape="head_dim // 2",
        why="rope frequencies of old conversions are computed, not stored",
    ),
)

FAMILY = Family(
    name="llama3",
    model_types=("llama",),
    rows=(*TOP, *block(ATTENTION, **LAYER), *block(DENSE, **LAYER)),
    sets={"main": main},
    defaults=DEFAULTS,
)
