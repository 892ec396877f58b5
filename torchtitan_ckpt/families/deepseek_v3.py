"""DeepSeek-V3: latent attention, experts, MTP layers that follow the main ones on disk.

`q_lora_rank` null replaces the two q projections by one. torchtitan 0.3.0 counts MTP layers from 0;
torchtitan v0.2.2 has none. Official files hold FP8 blocks; the router's bias is F32 and stays so.
"""

from __future__ import annotations

from torchtitan_ckpt.families.qwen3 import TOP
from torchtitan_ckpt.mapping.family import Family, Row, block
from torchtitan_ckpt.mapping.layers import after_dense, first_dense, main
from torchtitan_ckpt.mapping.ops import Split, Unstack
from torchtitan_ckpt.mapping.quant import FP8

_QK = "num_attention_heads*(qk_nope_head_dim+qk_rope_head_dim)"
_KV = "num_attention_heads*(qk_nope_head_dim+v_head_dim)"
_INNER = "moe.routed_experts.inner_experts."
_UP, _DOWN = "moe_intermediate_size, hidden_size", "hidden_size, moe_intermediate_size"
_SHARED = "moe_intermediate_size*n_shared_experts"
_COUNT = "n_routed_experts"


def latent(pre: str, post: str, norm: str | None) -> tuple[Row, ...]:
    """The attention rows with native names under `pre`, the output projection's under `post`."""
    return (
        Row("self_attn.q_a_proj.weight", pre + "wq_a.weight", quant="fp8",
            shape="q_lora_rank, hidden_size", when="q_lora_rank"),
        Row("self_attn.q_a_layernorm.weight", pre + "q_norm.weight", dtype=norm,
            shape="q_lora_rank", when="q_lora_rank"),
        Row("self_attn.q_b_proj.weight", pre + "wq_b.weight", quant="fp8",
            shape=f"{_QK}, q_lora_rank", when="q_lora_rank"),
        Row("self_attn.q_proj.weight", pre + "wq.weight", quant="fp8",
            shape=f"{_QK}, hidden_size", when="not q_lora_rank"),
        Row("self_attn.kv_a_proj_with_mqa.weight", pre + "wkv_a.weight", quant="fp8",
            shape="kv_lora_rank+qk_rope_head_dim, hidden_size"),
        Row("self_attn.kv_a_layernorm.weight", pre + "kv_norm.weight", dtype=norm,
            shape="kv_lora_rank"),
        Row("self_attn.kv_b_proj.weight", pre + "wkv_b.weight", quant="fp8",
            shape=f"{_KV}, kv_lora_rank"),
        Row("self_attn.o_proj.weight", post + "wo.weight", quant="fp8",
            shape="hidden_size, num_attention_heads*v_head_dim"),
        Row("input_layernorm.weight", "attention_norm.weight", dtype=norm, shape="hidden_size"),
        Row("post_attention_layernorm.weight", "ffn_norm.weight", dtype=norm, shape="hidden_size"),
    )  # fmt: skip


DENSE = (
    Row("mlp.gate_proj.weight", "feed_forward.w1.weight", quant="fp8",
        shape="intermediate_size, hidden_size"),
    Row("mlp.up_proj.weight", "feed_forward.w3.weight", quant="fp8",
        shape="intermediate_size, hidden_size"),
    Row("mlp.down_proj.weight", "feed_forward.w2.weight", quant="fp8",
        shape="hidden_size, intermediate_size"),
)  # fmt: skip

_GATE, _UPS = "mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"

MOE = (
    Row("mlp.gate.weight", "moe.router.gate.weight", shape=f"{_COUNT}, hidden_size"),
    Row("mlp.gate.e_score_correction_bias", "moe.expert_bias_E", "moe.expert_bias",
        dtype="float32", shape=_COUNT, when="topk_method == 'noaux_tc' and expert_bias"),
    Row("mlp.gate.e_score_correction_bias", None, dtype="float32", shape=_COUNT,
        when="topk_method == 'noaux_tc' and not expert_bias",
        why="the model is built without load balancing and has no router bias"),
    Row(None, "moe.expert_bias_E", "moe.expert_bias", dtype="float32", shape=_COUNT,
        when="topk_method != 'noaux_tc' and expert_bias",
        why="files of this topk_method hold no router bias"),
    Row(_GATE, _INNER + "w1_EFD", "moe.experts.w1", quant="fp8", shape=_UP,
        ops=(Unstack("expert"),), when="not gmm"),
    Row(_UPS, _INNER + "w3_EFD", "moe.experts.w3", quant="fp8", shape=_UP,
        ops=(Unstack("expert"),), when="not gmm"),
    Row((_GATE, _UPS), None, "moe.experts.w13", quant="fp8", shape=_UP,
        ops=(Split(1), Unstack("expert")), when="gmm"),
    Row("mlp.experts.{expert}.down_proj.weight", _INNER + "w2_EDF", "moe.experts.w2",
        quant="fp8", shape=_DOWN, ops=(Unstack("expert"),)),
    Row("mlp.shared_experts.gate_proj.weight", "moe.shared_experts.w1.weight", quant="fp8",
        shape=f"{_SHARED}, hidden_size", when="n_shared_experts"),
    Row("mlp.shared_experts.up_proj.weight", "moe.shared_experts.w3.weight", quant="fp8",
        shape=f"{_SHARED}, hidden_size", when="n_shared_experts"),
    Row("mlp.shared_experts.down_proj.weight", "moe.shared_experts.w2.weight", quant="fp8",
        shape=f"hidden_size, {_SHARED}", when="n_shared_experts"),
)  # fmt: skip

MTP = (
    Row("enorm.weight", "enorm.weight", shape="hidden_size"),
    Row("hnorm.weight", "hnorm.weight", shape="hidden_size"),
    Row("eh_proj.weight", "eh_proj.weight", shape="hidden_size, 2*hidden_size"),
    Row("shared_head.norm.weight", "mtp_norm.weight", shape="hidden_size"),
    Row("embed_tokens.weight", None, shape="vocab_size, hidden_size",
        copy_of="model.embed_tokens.weight", group="mtp-duplicates"),
    Row("shared_head.head.weight", None, shape="vocab_size, hidden_size",
        copy_of="lm_head.weight", group="mtp-duplicates"),
)  # fmt: skip

LAYER = {"hf": "model.layers.{layer}.", "titan": "layers.{layer}.", "npu": "layers.{layer}."}
AFTER = "model.layers.{mtp+num_hidden_layers}."
ATTENTION = latent("attention.", "attention.", None)
SETS = {"main": main, "dense": first_dense, "moe": after_dense}
COUNTS = {"expert": _COUNT, "mtp": "num_nextn_predict_layers"}
DEFAULTS = {
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "n_shared_experts": 0,
    "topk_method": "'noaux_tc'",
    "expert_bias": True,
}

FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    rows=(
        *TOP,
        *block(ATTENTION, **LAYER),
        *block(DENSE, **LAYER, layers="dense"),
        *block(MOE, **LAYER, layers="moe"),
        *block((*ATTENTION, *MOE, *MTP), hf=AFTER, titan="mtp_layers.{mtp}.", npu=None),
    ),
    sets=SETS,
    counts=COUNTS,
    defaults=DEFAULTS,
    layouts={"fp8": FP8},
    missing={"npu": "torchtitan v0.2.2 has no MTP layers for this family"},
)
