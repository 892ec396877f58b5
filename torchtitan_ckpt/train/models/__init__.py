"""The job's own models: Qwen3 dense and MoE in plain torch, with torchtitan 0.3.0's names.

Small and readable on purpose: they are the independent forward pass behind a checkpoint, not a fast
one. What they compute is compared with the transformers library on `fixtures/qwen3`.
"""

from torchtitan_ckpt.train.models.config import Qwen3Config

__all__ = ["Qwen3Config"]
