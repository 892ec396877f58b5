"""gpt-oss: biases everywhere, sinks per head, experts in one tensor a layer.

Plain files hold the experts as [E, in, out], the transpose of the native [E, out, in]; MXFP4 files
hold codes that unpack to the same. Gate and up rows are interleaved on both sides and stay so.
"""

from __future__ import annotations

from torchtitan_ckpt.families.qwen3 import DEFAULTS, LAYER, TOP
from torchtitan_ckpt.mapping.family import Family, Row, block
from torchtitan_ckpt.mapping.layers import main
from torchtitan_ckpt.mapping.ops import Transpose
from torchtitan_ckpt.mapping.quant import MXFP4

_Q, _KV = "num_attention_heads*head_dim", "num_key_value_heads*head_dim"
_INNER = "moe.routed_experts.inner_experts."

BLOCK = (
    Row(
        "self_attn.q_proj.weight",
        "attention.qkv_linear.wq.weight",
        "attention.wq.weight",
        shape=f"{_Q}, hidden_size",
    ),
    Row(
        "self_attn.q_proj.bias",
        "attention.qkv_linear.wq.bias",
        "attention.wq.bias",
        shape=_Q,
    ),
    Row(
        "self_attn.k_proj.weight",
        "attention.qkv_linear.wk.weight",
        "attention.wk.weight",
        shape=f"{_KV}, hidden_size",
    ),
    Row(
        "self_attn.k_proj.bias",
        "attention.qkv_linear.wk.bias",
        "attention.wk.bias",
        shape=_KV,
    ),
    Row(
        "self_attn.v_proj.weight",
        "attention.qkv_linear.wv.weight",
        "attention.wv.weight",
        shape=f"{_KV}, hidden_size",
    ),
    Row(
        "self_attn.v_proj.bias",
        "attention.qkv_linear.wv.bias",
        "attention.wv.bias",
        shape=_KV,
    ),
    Row("self_attn.o_proj.weight", "attention.wo.weight", shape=f"hidden_size, {_Q}"),
    Row("self_attn.o_proj.bias", "attention.wo.bias", shape="hidden_size"),
    Row("self_attn.sinks", "attention.sinks", shape="num_attention_heads"),
    Row("input_layernorm.weight", "attention_norm.weight", shape="hidden_size"),
    Row("post_attention_layernorm.weight", "ffn_norm.weight", shape="hidden_size"),
    Row("mlp.router.weight", "moe.router.gate.weight", shape="num_local_experts, hidden_size"),
    Row("mlp.router.bias", "moe.router.gate.bias", shape="num_local_experts"),
    Row(
        None,
        "moe.expert_bias_E",
        "moe.expert_bias",
        shape="num_local_experts",
        when="expert_bias",
        dtype="float32",
        why="the load-balancing bias has no Hugging Face key; it starts at zero on import",
    ),
    Row(
        "mlp.experts.gate_up_proj",
        _INNER + "mlp1_weight_EGD",
        "moe.experts.mlp1_weight",
        shape="num_local_experts, hidden_size, 2*intermediate_size",
        ops=(Transpose(1, 2),),
        quant="mxfp4",
    ),
    Row(
        "mlp.experts.gate_up_proj_bias",
        _INNER + "mlp1_bias_EG",
        "moe.experts.mlp1_bias",
        shape="num_local_experts, 2*intermediate_size",
    ),
    Row(
        "mlp.experts.down_proj",
        _INNER + "mlp2_weight_EDF",
        "moe.experts.mlp2_weight",
        shape="num_local_experts, intermediate_size, hidden_size",
        ops=(Transpose(1, 2),),
        quant="mxfp4",
    ),
    Row(
        "mlp.experts.down_proj_bias",
        _INNER + "mlp2_bias_ED",
        "moe.experts.mlp2_bias",
        shape="num_local_experts, hidden_size",
    ),
)

FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    rows=(*TOP, *block(BLOCK, **LAYER)),
    sets={"main": main},
    defaults={**DEFAULTS, "expert_bias": True},
    layouts={"mxfp4": MXFP4},
)
