"""torchtitan's configs of small models, from the sizes that a Hugging Face config gives.

Sizes only: the numbers that no shape depends on are `forward_titan.settled`'s. No model is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def of(config: Mapping[str, Any]) -> Any:
    """torchtitan's config of a model of these sizes."""
    from torchtitan.models.common import Embedding, Linear, RMSNorm

    family, model, layer = LAYERS[config["model_type"]]
    made = getattr(importlib.import_module(f"torchtitan.models.{family}.model"), model)
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    return made.Config(
        dim=size,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=size),
        norm=RMSNorm.Config(normalized_shape=size),
        lm_head=Linear.Config(in_features=size, out_features=vocabulary),
        layers=[layer(config, number) for number in range(config["num_hidden_layers"])],
        enable_weight_tying=config["tie_word_embeddings"],
    )


def _llama3_layer(config: Mapping[str, Any], number: int) -> Any:
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.config_utils import make_gqa_config
    from torchtitan.models.llama3.model import Llama3TransformerBlock

    return Llama3TransformerBlock.Config(
        attention=make_gqa_config(
            dim=config["hidden_size"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            wqkv_param_init={},
            wo_param_init={},
            inner_attention=FlexAttention.Config(),
            rope=ComplexRoPE.Config(dim=config["head_dim"], max_seq_len=1),
        ),
        feed_forward=_feed_forward(config, config["intermediate_size"]),
        **_norms(config),
    )


def _deepseek_layer(config: Mapping[str, Any], number: int) -> Any:
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.deepseek_v3 import make_mla_attention_config
    from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock

    ranks = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    dense = number < config["first_k_dense_replace"]
    return DeepSeekV3TransformerBlock.Config(
        attention=make_mla_attention_config(
            layer_id=number,
            dim=config["hidden_size"],
            n_heads=config["num_attention_heads"],
            q_lora_rank=config["q_lora_rank"] or 0,
            **{name: config[name] for name in ranks},
            attn_backend="flex",
            linear_init={},
            norm_init={},
            depth_init=lambda layer: {},
            rope=ComplexRoPE.Config(dim=config["qk_rope_head_dim"], max_seq_len=1),
        ),
        feed_forward=_feed_forward(config, config["intermediate_size"]) if dense else None,
        moe=None if dense else _experts(config),
        **_norms(config),
    )


def _experts(config: Mapping[str, Any]) -> Any:
    from torchtitan.models.common import config_utils as make

    size, hidden = config["hidden_size"], config["moe_intermediate_size"]
    count = config["n_routed_experts"]
    return make.make_moe_config(
        num_experts=count,
        router=make.make_router_config(dim=size, num_experts=count, gate_param_init={}),
        routed_experts=make.make_routed_experts_config(
            dim=size,
            hidden_dim=hidden,
            num_experts=count,
            top_k=1,
            param_init={},
            comm_backend="standard",
        ),
        shared_experts=_feed_forward(config, hidden * config["n_shared_experts"]),
    )


def _gpt_oss_layer(config: Mapping[str, Any], number: int) -> Any:
    from torchtitan.models.common import CosSinRoPE, Linear
    from torchtitan.models.common.attention import FlexAttention, QKVLinear
    from torchtitan.models.common.config_utils import (
        make_router_config,
        make_token_dispatcher_config,
    )
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.gpt_oss.model import Attention, GptOssTransformerBlock
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE

    size, head, count = config["hidden_size"], config["head_dim"], config["num_local_experts"]
    queries, keys = (config[name] * head for name in ("num_attention_heads", "num_key_value_heads"))

    def linear(rows: int, columns: int) -> Any:
        return Linear.Config(in_features=columns, out_features=rows, bias=True)

    return GptOssTransformerBlock.Config(
        attention=Attention.Config(
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=head,
            dim=size,
            qkv_linear=QKVLinear.Config(
                head_dim=head, wq=linear(queries, size), wkv=linear(keys, size)
            ),
            wo=linear(size, queries),
            inner_attention=FlexAttention.Config(),
            rope=CosSinRoPE.Config(dim=head, max_seq_len=1),
        ),
        moe=GptOssMoE.Config(
            num_experts=count,
            router=make_router_config(dim=size, num_experts=count, gate_param_init={}, bias=True),
            routed_experts=RoutedExperts.Config(
                inner_experts=GptOssGroupedExperts.Config(
                    dim=size, hidden_dim=config["intermediate_size"], num_experts=count
                ),
                token_dispatcher=make_token_dispatcher_config(
                    num_experts=count, top_k=1, comm_backend="standard", hidden_dim=size
                ),
            ),
        ),
        **_norms(config),
    )


def _feed_forward(config: Mapping[str, Any], hidden: int) -> Any:
    from torchtitan.models.common.config_utils import make_ffn_config

    return make_ffn_config(
        dim=config["hidden_size"], hidden_dim=hidden, w1_param_init={}, w2w3_param_init={}
    )


def _norms(config: Mapping[str, Any]) -> dict[str, Any]:
    from torchtitan.models.common import RMSNorm

    names = ("attention_norm", "ffn_norm")
    return {name: RMSNorm.Config(normalized_shape=config["hidden_size"]) for name in names}


# Hugging Face's model type -> torchtitan's module and class, and how a layer is made.
LAYERS: dict[str, tuple[str, str, Callable[[Mapping[str, Any], int], Any]]] = {
    "llama": ("llama3", "Llama3Model", _llama3_layer),
    "deepseek_v3": ("deepseek_v3", "DeepSeekV3Model", _deepseek_layer),
    "deepseek_v32": ("deepseek_v3", "DeepSeekV3Model", _deepseek_layer),
    "gpt_oss": ("gpt_oss", "GptOssModel", _gpt_oss_layer),
}
