"""A loss that is no number any more, seen in what a save is about to write.

Only the train state is looked at, where a job keeps its loss by itself: a look through the weights
would cost a pass over the memory at every save, and `torchtitan-ckpt verify --deep` does that on
the disk. A save is never refused for it: what was trained is what was asked to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from torchtitan_ckpt.config import TRAIN_STATE


def warning(flat: Mapping[str, Any], step: int, keep_latest_k: int) -> str:
    """One line that names the losses in the train state that are NaN or infinite, or nothing.

    A key is a loss when its last part says so. Of a history the newest value counts; the best loss
    so far starts at infinity in many jobs and is none.
    """
    bad = []
    for key, value in flat.items():
        name = key.rpartition(".")[2].lower()
        if not key.startswith(f"{TRAIN_STATE}.") or "loss" not in name:
            continue
        newest = _newest(value)
        if newest is not None and not math.isfinite(newest) and not _starts_so(name, newest):
            bad.append(f"{key} = {newest}")
    if not bad:
        return ""
    purge = (
        f"keep_latest_k={keep_latest_k} goes on removing the older, sound steps, so stop and"
        if keep_latest_k
        else "stop and"
    )
    return (
        f"step {step} is saved with {', '.join(bad)}: the model has probably diverged; {purge} "
        "resume from before it with --checkpoint.load_step N"
    )


def _newest(value: Any) -> float | None:
    while isinstance(value, list | tuple) and value:
        value = value[-1]
    if isinstance(value, torch.Tensor):
        if value.is_meta or not value.numel() or not value.is_floating_point():
            return None
        return float(value.flatten()[-1])
    return float(value) if isinstance(value, float) else None


def _starts_so(name: str, value: float) -> bool:
    return math.isinf(value) and any(word in name for word in ("best", "min", "lowest"))
