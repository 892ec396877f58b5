"""The experts of a Qwen3 MoE block: router, stacked weights, and the bias that spreads the load.

Under expert parallelism each rank holds a slice of the experts. Tokens are gathered over the
expert-parallel group, every rank computes its own experts on all of them, and the sum comes back:
no all-to-all, so it runs over gloo as well. Clarity before speed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_ckpt.train.models.collectives import gather_rows, sum_ranks
from torchtitan_ckpt.train.models.config import Qwen3Config
from torchtitan_ckpt.train.models.layers import Linear


class Router(nn.Module):
    """Softmax over all experts, then the best `top_k`; the bias decides who, never how much."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, config.num_experts)
        self.top_k = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and expert numbers, both (tokens, top_k), for x of shape (tokens, hidden)."""
        scores = self.gate(x).softmax(-1, dtype=torch.float32)
        ranked = scores if bias is None else scores + bias
        chosen = ranked.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen


class InnerExperts(nn.Module):
    """All experts of a layer, stacked: w1 and w3 are (E, F, D), w2 is (E, D, F).

    Set by expert parallelism: `first` is the number of the first expert that this rank holds,
    `group` the ranks that share them, and `copies` how often each token reaches an expert, since
    the ranks of a tensor-parallel group bring the same ones.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        count, inner, hidden = (
            config.num_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        self.w1_EFD = nn.Parameter(torch.empty(count, inner, hidden))
        self.w2_EDF = nn.Parameter(torch.empty(count, hidden, inner))
        self.w3_EFD = nn.Parameter(torch.empty(count, inner, hidden))
        self.first = 0
        self.group: Any = None
        self.copies = 1

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of the chosen experts for x of shape (tokens, hidden)."""
        if self.group is None:
            return self._local(x, weights, chosen)
        x, weights = (gather_rows(part, self.group) for part in (x, weights))
        chosen = gather_rows(chosen, self.group)
        out = sum_ranks(self._local(x, weights, chosen), self.group)
        tokens = out.shape[0] // self.group.size()
        return out.narrow(0, self.group.rank() * tokens, tokens)

    def _local(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        w1, w2, w3 = (self._own(part) for part in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        out = torch.zeros_like(x)
        for slot in range(w1.shape[0]):
            token, place = torch.where(chosen == self.first + slot)
            row = x[token]
            row = (F.silu(row @ w1[slot].T) * (row @ w3[slot].T)) @ w2[slot].T
            out = out.index_add(0, token, row * weights[token, place, None])
        return out

    def _own(self, value: Tensor) -> Tensor:
        """This rank's part of a weight, which expert parallelism makes a DTensor."""
        to_local = getattr(value, "to_local", None)
        if to_local is None:
            return value
        own: Tensor = to_local()
        if self.copies > 1 and own.requires_grad:
            own.register_hook(lambda gradient: gradient / self.copies)  # type: ignore[no-untyped-call]
        return own


class RoutedExperts(nn.Module):
    """The level that torchtitan 0.3.0's names have between a block's experts and their weights."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.inner_experts = InnerExperts(config)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out: Tensor = self.inner_experts(x, weights, chosen)
        return out


class MoE(nn.Module):
    """Router, experts, and, with `load_balance_coeff`, a bias moved after every step."""

    expert_bias_E: Tensor | None
    tokens_per_expert_E: Tensor

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.coeff = config.load_balance_coeff
        self.router = Router(config)
        self.routed_experts = RoutedExperts(config)
        # float32 whatever the model's dtype: bfloat16 would swallow steps of a thousandth.
        bias = None if self.coeff is None else torch.zeros(config.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias_E", bias, persistent=True)
        counts = torch.zeros(config.num_experts, dtype=torch.float32)
        self.register_buffer("tokens_per_expert_E", counts, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat, self.expert_bias_E)
        if self.training:
            with torch.no_grad():
                count = self.tokens_per_expert_E.numel()
                self.tokens_per_expert_E += torch.bincount(chosen.flatten(), minlength=count)
        out: Tensor = self.routed_experts(flat, weights, chosen).reshape(x.shape)
        return out

    @torch.no_grad()
    def move_bias(self) -> None:
        """Raise the bias of experts that got too few tokens, lower the others, count afresh."""
        if self.expert_bias_E is not None and self.coeff is not None:
            counts = self.tokens_per_expert_E
            delta = self.coeff * torch.sign(counts.mean() - counts)
            self.expert_bias_E += delta - delta.mean()
        self.tokens_per_expert_E.zero_()
