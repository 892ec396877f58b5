"""The parts of a Qwen3 block that are not experts: norm, rotary positions, attention, feed-forward.

All of it works on local tensors: under tensor parallelism a rank holds some of the heads, and the
number of heads is read off the projection's output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_ckpt.train.models.config import Qwen3Config


class Linear(nn.Linear):
    """Without bias, and without first values, which `init_weights` or a checkpoint gives."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: torch's own draw would move the random stream."""


class Embedding(nn.Embedding):
    """Without first values, like `Linear`."""

    def reset_parameters(self) -> None:
        """Nothing, for the reasons of `Linear`."""


class RMSNorm(nn.Module):
    """Scale by the root mean square over the last dimension, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def rotary(config: Qwen3Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of shape (length, head_dim): both halves hold the same angles.

    Computed, never stored, so that a model built on the meta device has no buffer to forget.
    """
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float()
    frequencies = 1.0 / config.rope_theta ** (steps / config.head_dim)
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim/2) of x, shaped (batch, heads, length, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    turned: Tensor = x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)
    return turned


class QKVLinear(nn.Module):
    """Query, key and value projections under the name that torchtitan 0.3.0 stores them."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        keys = config.num_key_value_heads * config.head_dim
        self.wq = Linear(config.hidden_size, config.num_attention_heads * config.head_dim)
        self.wk = Linear(config.hidden_size, keys)
        self.wv = Linear(config.hidden_size, keys)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.wq(x), self.wk(x), self.wv(x)


class Attention(nn.Module):
    """Causal attention with grouped keys and values and a norm on each head's query and key."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.groups
        self.qkv_linear = QKVLinear(config)
        self.wo = Linear(config.num_attention_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, -1, self.head_dim) for part in self.qkv_linear(x))
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin).repeat_interleave(self.groups, dim=1)
        v = v.transpose(1, 2).repeat_interleave(self.groups, dim=1)
        scores = q @ k.transpose(2, 3) * self.head_dim**-0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        mixed = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
        out: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU: w1 gates, w3 goes up, w2 comes down."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.w1 = Linear(config.hidden_size, config.intermediate_size)
        self.w2 = Linear(config.intermediate_size, config.hidden_size)
        self.w3 = Linear(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out
