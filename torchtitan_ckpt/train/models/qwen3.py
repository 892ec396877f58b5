"""Qwen3 for causal language modelling: the blocks in order, and how its weights begin.

The module tree gives torchtitan 0.3.0's FQNs. A model may hold a stretch of the layers only (a
pipeline stage); layers keep their numbers, since `layers` is a dict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchtitan_ckpt.train.models.config import Qwen3Config
from torchtitan_ckpt.train.models.layers import (
    Attention,
    Embedding,
    FeedForward,
    Linear,
    RMSNorm,
    rotary,
)
from torchtitan_ckpt.train.models.moe import MoE


class Block(nn.Module):
    """Attention, then a feed-forward or experts, each behind a norm and added to its input."""

    def __init__(self, config: Qwen3Config, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.is_moe(layer):
            self.moe = MoE(config)
        else:
            self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        inner = self.moe if hasattr(self, "moe") else self.feed_forward
        out: Tensor = x + inner(self.ffn_norm(x))
        return out


class Qwen3Model(nn.Module):
    """Tokens (batch, length) in, logits (batch, length, vocabulary) out.

    `layers` picks a stretch of the layers; `first` and `last` say whether the embedding, and the
    norm and head, belong to it.
    """

    def __init__(
        self,
        config: Qwen3Config,
        *,
        layers: Sequence[int] | None = None,
        first: bool = True,
        last: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.config = config
        self.dropout = dropout
        # Seeded anew for every step by the trainer, from the one stream that `train_state` saves.
        self.noise = torch.Generator()
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size) if first else None
        chosen = range(config.num_hidden_layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(index): Block(config, index) for index in chosen})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if last else None
        self.lm_head = Linear(config.hidden_size, config.vocab_size) if last else None
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one parameter again, where the config says so.

        Called after whatever replaces parameters (`to_empty`, tensor parallelism).
        """
        if self.config.tie_word_embeddings and self.lm_head and self.tok_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = rotary(self.config, x.shape[1], x.device)
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
            if self.training and self.dropout:
                x = x * self._mask(x)
        for block in self.layers.values():
            x = block(x, cos, sin)
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x

    def _mask(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape, generator=self.noise) >= self.dropout
        return keep.to(device=x.device, dtype=x.dtype) / (1.0 - self.dropout)

    def moe_layers(self) -> list[MoE]:
        """The expert layers held here, in order."""
        blocks = (getattr(block, "moe", None) for block in self.layers.values())
        return [moe for moe in blocks if isinstance(moe, MoE)]


def init_weights(model: nn.Module, config: Qwen3Config, seed: int) -> None:
    """Give every parameter and buffer its first value, in place, the same on any set of ranks.

    Each full tensor is drawn from a generator seeded with `seed` and the FQN, in float32; a rank
    then keeps its shards of it. So weights do not depend on how the model is split, nor on the
    order of its layers.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = _initial(name, parameter.shape, config, seed)
            _assign(parameter, full.to(parameter.dtype))
        for buffer in model.buffers():
            buffer.zero_()


def _initial(name: str, shape: torch.Size, config: Qwen3Config, seed: int) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    std = config.initializer_range
    if name.endswith(("attention.wo.weight", "w2.weight", "w2_EDF")):
        std /= (2 * config.num_hidden_layers) ** 0.5
    return torch.normal(0.0, std, tuple(shape), generator=generator)


def _assign(parameter: Tensor, full: Tensor) -> None:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        parameter.copy_(full)
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(parameter, DTensor)
    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, mesh, parameter.placements
    )
    box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
    parameter.to_local().copy_(full[box])
