"""torchtitan_ckpt: checkpoints for torchtitan and torchtitan-npu.

A reference checkpoint manager, the formats it reads and writes, and mappings between native and
Hugging Face names. Names are loaded when they are first used, so that importing this package costs
nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_ckpt.adapter import MappingAdapter as MappingAdapter
    from torchtitan_ckpt.adapter import StateDictAdapter as StateDictAdapter
    from torchtitan_ckpt.config import CheckpointConfig as CheckpointConfig
    from torchtitan_ckpt.decision import LoadDecision as LoadDecision
    from torchtitan_ckpt.errors import CheckpointError as CheckpointError
    from torchtitan_ckpt.errors import Problem as Problem
    from torchtitan_ckpt.manager import CheckpointManager as CheckpointManager
    from torchtitan_ckpt.manifest import Manifest as Manifest
    from torchtitan_ckpt.parallel import ParallelDegrees as ParallelDegrees
    from torchtitan_ckpt.resolve import resolve as resolve

_WHERE = {
    "CheckpointConfig": "config",
    "CheckpointError": "errors",
    "CheckpointManager": "manager",
    "LoadDecision": "decision",
    "Manifest": "manifest",
    "MappingAdapter": "adapter",
    "ParallelDegrees": "parallel",
    "Problem": "errors",
    "StateDictAdapter": "adapter",
    "resolve": "resolve",
}

__all__ = [*_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
