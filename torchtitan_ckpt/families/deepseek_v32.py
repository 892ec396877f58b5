"""DeepSeek-V3.2: V3 with an indexer in every layer; every norm is F32 on the hub.

Only torchtitan-npu has it: native names under `pre_attention` and `post_attention`, MTP layers at
the main index. Its MTP has no norm of its own and uses the main one.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan_ckpt.families.deepseek_v3 import (
    AFTER,
    COUNTS,
    DEFAULTS,
    DENSE,
    LAYER,
    MOE,
    SETS,
    latent,
)
from torchtitan_ckpt.families.qwen3 import TOP
from torchtitan_ckpt.mapping.family import Family, Row, block
from torchtitan_ckpt.mapping.quant import FP8

_PRE, _POST = "attention.pre_attention.", "attention.post_attention."
_HEADS = "index_n_heads*index_head_dim"

INDEXER = (
    Row("self_attn.indexer.wq_b.weight", _PRE + "indexer.wq_b.weight", quant="fp8",
        shape=f"{_HEADS}, q_lora_rank"),
    Row("self_attn.indexer.wk.weight", _PRE + "indexer.wk.weight", quant="fp8",
        shape="index_head_dim, hidden_size"),
    Row("self_attn.indexer.k_norm.weight", _PRE + "indexer.k_norm.weight", dtype="float32",
        shape="index_head_dim"),
    Row("self_attn.indexer.k_norm.bias", _PRE + "indexer.k_norm.bias", dtype="float32",
        shape="index_head_dim"),
    Row("self_attn.indexer.weights_proj.weight", _PRE + "indexer.weights_proj.weight",
        shape="index_n_heads, hidden_size"),
)  # fmt: skip

MTP = (
    Row("enorm.weight", "enorm.weight", dtype="float32", shape="hidden_size"),
    Row("hnorm.weight", "hnorm.weight", dtype="float32", shape="hidden_size"),
    Row("eh_proj.weight", "eh_proj.weight", shape="hidden_size, 2*hidden_size"),
    Row("shared_head.norm.weight", None, dtype="float32", shape="hidden_size",
        copy_of="model.norm.weight", group="mtp-norm", emit=True,
        import_loss="torchtitan-npu's MTP uses the main norm; the file's own is not kept",
        why="torchtitan-npu's MTP has no norm of its own and uses the main norm"),
    Row("embed_tokens.weight", None, shape="vocab_size, hidden_size",
        copy_of="model.embed_tokens.weight", group="mtp-duplicates"),
    Row("shared_head.head.weight", None, shape="vocab_size, hidden_size",
        copy_of="lm_head.weight", group="mtp-duplicates"),
)  # fmt: skip

ATTENTION = (*latent(_PRE, _POST, "float32"), *INDEXER)
_NORM = replace(TOP[1], dtype="float32")

FAMILY = Family(
    name="deepseek_v32",
    model_types=("deepseek_v32",),
    rows=(
        TOP[0],
        _NORM,
        *TOP[2:],
        *block(ATTENTION, **LAYER),
        *block(DENSE, **LAYER, layers="dense"),
        *block(MOE, **LAYER, layers="moe"),
        *block(
            (*ATTENTION, *MOE, *MTP), hf=AFTER, titan=None, npu="layers.{mtp+num_hidden_layers}."
        ),
    ),
    sets=SETS,
    counts=COUNTS,
    defaults=DEFAULTS,
    layouts={"fp8": FP8},
    generations=("npu",),
    missing={"titan": "torchtitan 0.3.0 has no DeepSeek-V3.2"},
)
