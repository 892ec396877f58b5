"""torchtitan's models as the native side of `forward.logits`, on the CPU.

A model of `titan_configs.py`, or of torchtitan's registry, computes in float32. Its FlexAttention,
which compiles for minutes here, is written out; its experts' casts to bfloat16 are left out, and
their grouped products, which ask for aligned sizes, are done one by one.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from conformance.subjects import titan_configs

State = Mapping[str, Tensor]

# torchtitan-npu's names of DeepSeek-V3.2 as torchtitan's of V3.
_NPU = {
    "output.weight": "lm_head.weight",
    "attention.pre_attention.": "attention.",
    "attention.post_attention.": "attention.",
    "moe.expert_bias": "moe.expert_bias_E",
    "moe.experts.w1": "moe.routed_experts.inner_experts.w1_EFD",
    "moe.experts.w2": "moe.routed_experts.inner_experts.w2_EDF",
    "moe.experts.w3": "moe.routed_experts.inner_experts.w3_EFD",
}


def missing(model_type: str) -> str:
    """Why no torchtitan model of this type can run here, or an empty string."""
    if model_type not in titan_configs.LAYERS:
        return f"neither torchtitan nor the reference job has a model of {model_type}"
    # torchtitan's experts import triton.
    absent = [name for name in ("torchtitan", "triton") if not find_spec(name)]
    return f"{' and '.join(absent)} not installed" if absent else ""


def logits(config: Mapping[str, Any], state: State, tokens: Tensor) -> Tensor:
    """Logits of torchtitan's model of these sizes and numbers."""
    if config["model_type"] == "deepseek_v32":
        state = _as_v3(state)
    return run(titan_configs.of(config), config, state, tokens)


def run(model_config: Any, numbers: Mapping[str, Any], state: State, tokens: Tensor) -> Tensor:
    """Logits of a torchtitan model with the `numbers` of the other side."""
    model = settled(model_config, numbers).build()
    model.load_state_dict(state, strict=True)
    for layer in model.layers.values():
        layer.attention.inner_attention = _Attention()
    with torch.no_grad(), _Plain(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # float32 is no dtype of autocast here
        out: Tensor = model.eval()(
            tokens,
            attention_masks=_masks(tokens.shape[1], numbers.get("sliding_window")),
            positions=torch.arange(tokens.shape[1])[None],
        )
    return out


def _as_v3(state: State) -> State:
    """DeepSeek-V3.2's tensors as those of V3: without the indexer its attention is V3's."""
    out = {}
    for key, value in state.items():
        for old, new in _NPU.items():
            key = key.replace(old, new)
        out[key] = value
    return out


def settled(model_config: Any, numbers: Mapping[str, Any]) -> Any:
    """A copy with the numbers that no tensor's shape depends on: eps, rope, routing, windows."""
    from torchtitan.models.common.attention import FlexAttention

    made = copy.deepcopy(model_config)
    made.norm.eps = numbers["rms_norm_eps"]
    if hasattr(made, "mtp_layers"):
        made.mtp_layers = []
    for index, layer in enumerate(made.layers):
        attention = layer.attention
        norms = [getattr(attention, name, None) for name in ("qk_norm", "q_norm", "kv_norm")]
        for norm in filter(None, (layer.attention_norm, layer.ffn_norm, *norms)):
            norm.eps = numbers["rms_norm_eps"]
        attention.rope = dataclasses.replace(
            attention.rope,
            theta=numbers["rope_parameters"]["rope_theta"],
            scaling="none",
            max_seq_len=numbers["max_position_embeddings"],
        )
        attention.inner_attention = FlexAttention.Config()
        if hasattr(attention, "sliding_window_size"):
            # transformers slides in every layer of even number.
            attention.sliding_window_size = None if index % 2 else numbers["sliding_window"]
        if layer.moe is not None:
            _route(layer.moe, numbers)
    return made


def _route(moe: Any, numbers: Mapping[str, Any]) -> None:
    router = moe.router
    router.top_k = moe.routed_experts.token_dispatcher.top_k = numbers["num_experts_per_tok"]
    router.num_expert_groups = router.num_limited_groups = None
    router.route_norm = True
    sigmoid = "deepseek" in numbers["model_type"]
    router.score_func = "sigmoid" if sigmoid else "softmax"
    router.route_scale = numbers["routed_scaling_factor"] if sigmoid else 1.0


def _masks(length: int, window: int | None) -> Any:
    """Which key a query sees; gpt-oss takes both kinds and chooses by layer."""
    row = torch.arange(length)
    causal = row[:, None] >= row[None, :]
    if window is None:
        return causal
    near = causal & (row[:, None] - row[None, :] < window)
    return {"basic_mask": causal, "sliding_window_mask": near}


class _Attention(torch.nn.Module):
    """Attention over (batch, length, heads, size), written out; masks are boolean matrices."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        copies = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
        scores = torch.einsum("blnh,bmnh->bnlm", q, k) * (scale or q.shape[-1] ** -0.5)
        scores = scores.masked_fill(~attention_masks, float("-inf"))
        out = torch.einsum("bnlm,bmnh->blnh", scores.softmax(-1), v)
        return out_transform(out, scores.logsumexp(-1).transpose(1, 2)) if out_transform else out


class _Plain(TorchFunctionMode):
    """Experts in float32, one after another."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            return args[0]
        if func is torch._grouped_mm:
            rows, weights = args
            begins = [0, *kwargs["offs"].tolist()]
            return torch.cat(
                [
                    rows[begin:end] @ weight
                    for begin, end, weight in zip(begins, begins[1:], weights, strict=False)
                ]
            )
        return func(*args, **(kwargs or {}))
