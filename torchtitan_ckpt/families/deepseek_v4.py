"""DeepSeek-V4 under the hub's own names (transformers 5.24 loads these and writes others).

Every layer has experts; the first `num_hash_layers` route by token id. Layers differ by compress
ratio: 4 has a wide compressor and an indexer, 128 a narrow compressor, 0 neither. Top-level hc_head
tensors live natively in the last main layer. Only torchtitan-npu has it.
"""

from __future__ import annotations

from torchtitan_ckpt.mapping.family import Family, Row, block
from torchtitan_ckpt.mapping.layers import hashed, main, routed, with_ratio
from torchtitan_ckpt.mapping.ops import Split, Unstack
from torchtitan_ckpt.mapping.quant import FP4, FP8_E8M0, FP8_F32

_PRE, _POST = "attention.pre_attention.", "attention.post_attention."
_UP, _DOWN = "moe_intermediate_size, hidden_size", "hidden_size, moe_intermediate_size"
_HEADS = "num_attention_heads*head_dim"
_MIX = "(2+hc_mult)*hc_mult"
_COUNT, _F32 = "n_routed_experts", "float32"


def _row(hf: str, npu: str, shape: str, quant: str | None = None, dtype: str | None = None,
         layers: str = "") -> Row:  # fmt: skip
    return Row(hf, None, npu, shape, quant=quant, dtype=dtype, layers=layers)


def _compressor(
    hf: str, npu: str, width: str, norm: str, span: str, layers: str
) -> tuple[Row, ...]:
    return (
        _row(hf + "ape", npu + "ape", f"{span}, {width}", None, _F32, layers),
        _row(hf + "wkv.weight", npu + "wkv.weight", f"{width}, hidden_size", layers=layers),
        _row(hf + "wgate.weight", npu + "wgate.weight", f"{width}, hidden_size", layers=layers),
        _row(hf + "norm.weight", npu + "norm.weight", norm, layers=layers),
    )


def _mixer(hf: str, npu: str, count: str, wide: str) -> tuple[Row, ...]:
    return (
        _row(hf + "_fn", npu + "_fn", f"{count}, hc_mult*hidden_size", None, _F32),
        _row(hf + "_base", npu + "_base", count, None, _F32),
        _row(hf + "_scale", npu + "_scale", wide, None, _F32),
    )


BLOCK = (
    _row("attn.attn_sink", "attention.inner_attention.attn_sink", "num_attention_heads",
         None, _F32),
    _row("attn.wq_a.weight", _PRE + "wq_a.weight", "q_lora_rank, hidden_size", "fp8"),
    _row("attn.q_norm.weight", _PRE + "q_norm.weight", "q_lora_rank"),
    _row("attn.wq_b.weight", _PRE + "wq_b.weight", f"{_HEADS}, q_lora_rank", "fp8"),
    _row("attn.wkv.weight", _PRE + "wkv.weight", "head_dim, hidden_size", "fp8"),
    _row("attn.kv_norm.weight", _PRE + "kv_norm.weight", "head_dim"),
    _row("attn.wo_a.weight", _POST + "wo_a.weight",
         f"o_groups*o_lora_rank, {_HEADS}//o_groups", "fp8"),
    _row("attn.wo_b.weight", _POST + "wo_b.weight", "hidden_size, o_groups*o_lora_rank", "fp8"),
    _row("attn_norm.weight", "attention_norm.weight", "hidden_size"),
    _row("ffn_norm.weight", "ffn_norm.weight", "hidden_size"),
    *_mixer("hc_attn", "hc_attn", _MIX, "3"),
    *_mixer("hc_ffn", "hc_ffn", _MIX, "3"),
    _row("ffn.gate.weight", "moe.router.gate.weight", f"{_COUNT}, hidden_size"),
    Row("ffn.experts.{expert}.w1.weight", None, "moe.experts.w1", _UP, (Unstack("expert"),),
        when="not gmm", quant="expert"),
    Row("ffn.experts.{expert}.w3.weight", None, "moe.experts.w3", _UP, (Unstack("expert"),),
        when="not gmm", quant="expert"),
    Row(("ffn.experts.{expert}.w1.weight", "ffn.experts.{expert}.w3.weight"), None,
        "moe.experts.w13", _UP, (Split(1), Unstack("expert")), when="gmm", quant="expert"),
    Row("ffn.experts.{expert}.w2.weight", None, "moe.experts.w2", _DOWN, (Unstack("expert"),),
        quant="expert"),
    _row("ffn.shared_experts.w1.weight", "moe.shared_experts.w1.weight", _UP, "fp8"),
    _row("ffn.shared_experts.w3.weight", "moe.shared_experts.w3.weight", _UP, "fp8"),
    _row("ffn.shared_experts.w2.weight", "moe.shared_experts.w2.weight", _DOWN, "fp8"),
)  # fmt: skip

_BIAS = ("ffn.gate.bias", "moe.expert_bias", _COUNT, None, _F32)
_INDEXER = "attn.indexer."
BY_LAYER = (
    _row(*_BIAS, "routed"),
    _row("ffn.gate.tid2eid", "moe.router.tid2eid", "vocab_size, num_experts_per_tok", None, "int64",
         "hashed"),
    *_compressor("attn.compressor.", _PRE + "compressor.", "2*head_dim", "head_dim", "4", "csa"),
    *_compressor("attn.compressor.", _PRE + "compressor_128.", "head_dim", "head_dim", "128",
                 "hca"),
    _row(_INDEXER + "wq_b.weight", _PRE + "indexer.wq_b.weight",
         "index_n_heads*index_head_dim, q_lora_rank", "fp8", None, "csa"),
    _row(_INDEXER + "weights_proj.weight", _PRE + "indexer.weights_proj.weight",
         "index_n_heads, hidden_size", None, None, "csa"),
    *_compressor(_INDEXER + "compressor.", _PRE + "indexer.compressor.", "2*index_head_dim",
                 "index_head_dim", "4", "csa"),
)  # fmt: skip

MTP = (
    _row(*_BIAS),
    _row("e_proj.weight", "e_proj.weight", "hidden_size, hidden_size", "fp8"),
    _row("h_proj.weight", "h_proj.weight", "hidden_size, hidden_size", "fp8"),
    _row("enorm.weight", "enorm.weight", "hidden_size"),
    _row("hnorm.weight", "hnorm.weight", "hidden_size"),
    _row("norm.weight", "mtp_norm.weight", "hidden_size"),
    *_mixer("hc_head", "mtp_hc_head.hc_head", "hc_mult", "1"),
    Row("head.weight", None, shape="vocab_size, hidden_size", copy_of="head.weight",
        group="mtp-duplicates"),
    Row("emb.tok_emb.weight", None, shape="vocab_size, hidden_size", copy_of="embed.weight",
        group="mtp-duplicates"),
)  # fmt: skip

FAMILY = Family(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    rows=(
        _row("embed.weight", "tok_embeddings.weight", "vocab_size, hidden_size"),
        _row("norm.weight", "norm.weight", "hidden_size"),
        _row("head.weight", "output.weight", "vocab_size, hidden_size"),
        *_mixer("hc_head", "layers.{num_hidden_layers-1}.hc_head.hc_head", "hc_mult", "1"),
        *block((*BLOCK, *BY_LAYER), hf="layers.{layer}.", titan=None, npu="layers.{layer}."),
        *block((*BLOCK, *MTP), hf="mtp.{mtp}.", titan=None, npu="layers.{mtp+num_hidden_layers}."),
    ),
    sets={"main": main, "csa": with_ratio(4), "hca": with_ratio(128), "hashed": hashed,
          "routed": routed},
    counts={"expert": _COUNT, "mtp": "num_nextn_predict_layers"},
    defaults={"num_nextn_predict_layers": 0, "num_hash_layers": None, "mlp_layer_types": None,
              "compress_ratios": None},
    layouts={"fp8": FP8_E8M0, "expert": FP4, "expert_fp8": FP8_F32},
    generations=("npu",),
    missing={"titan": "torchtitan 0.3.0 has no DeepSeek-V4"},
)  # fmt: skip
