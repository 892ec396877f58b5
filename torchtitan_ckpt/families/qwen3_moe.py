"""Qwen3 with experts: Qwen3's attention, experts stacked natively and one key each on disk.

`expert_bias` has no Hugging Face key: it stays native and starts at zero on import.
"""

from __future__ import annotations

from torchtitan_ckpt.families.qwen3 import ATTENTION, DEFAULTS, DENSE, LAYER, TOP
from torchtitan_ckpt.mapping.family import Family, Row, block
from torchtitan_ckpt.mapping.layers import main, sparse, sparse_complement
from torchtitan_ckpt.mapping.ops import Split, Unstack

MOE = (
    Row("mlp.gate.weight", "moe.router.gate.weight", shape="num_experts, hidden_size"),
    Row(
        None,
        "moe.expert_bias_E",
        "moe.expert_bias",
        shape="num_experts",
        when="expert_bias",
        dtype="float32",
        why="the load-balancing bias has no Hugging Face key; it starts at zero on import",
    ),
    Row(
        "mlp.experts.{expert}.gate_proj.weight",
        "moe.routed_experts.inner_experts.w1_EFD",
        "moe.experts.w1",
        shape="moe_intermediate_size, hidden_size",
        ops=(Unstack("expert"),),
        when="not gmm",
    ),
    Row(
        "mlp.experts.{expert}.up_proj.weight",
        "moe.routed_experts.inner_experts.w3_EFD",
        "moe.experts.w3",
        shape="moe_intermediate_size, hidden_size",
        ops=(Unstack("expert"),),
        when="not gmm",
    ),
    Row(
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        None,
        "moe.experts.w13",
        shape="moe_intermediate_size, hidden_size",
        ops=(Split(1), Unstack("expert")),
        when="gmm",
    ),
    Row(
        "mlp.experts.{expert}.down_proj.weight",
        "moe.routed_experts.inner_experts.w2_EDF",
        "moe.experts.w2",
        shape="hidden_size, moe_intermediate_size",
        ops=(Unstack("expert"),),
    ),
)

FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    rows=(
        *TOP,
        *block(ATTENTION, **LAYER),
        *block(DENSE, **LAYER, layers="dense"),
        *block(MOE, **LAYER, layers="moe"),
    ),
    sets={
        "main": main,
        "moe": sparse,
        "dense": sparse_complement,
    },
    counts={"expert": "num_experts"},
    defaults={
        **DEFAULTS,
        "num_experts": "num_local_experts",
        "mlp_only_layers": (),
        "decoder_sparse_step": 1,
        "expert_bias": True,
    },
)
