"""The reference training job behind `scripts/run_train.sh`, and its registry of configs.

Small real training, so that checkpoints are exercised by what they are for. This module is the
default MODULE: its functions are the CONFIG names. Importing it needs no torch.
"""

from torchtitan_ckpt.train.config import JobConfig
from torchtitan_ckpt.train.registry import (
    qwen3_debug,
    qwen3_from_assets,
    qwen3_load_only_debug,
    qwen3_moe_debug,
    qwen3_tied_debug,
)

__all__ = [
    "JobConfig",
    "qwen3_debug",
    "qwen3_from_assets",
    "qwen3_load_only_debug",
    "qwen3_moe_debug",
    "qwen3_tied_debug",
]
