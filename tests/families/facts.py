"""The published facts of fixtures/published, and helpers that families' tests share."""

from __future__ import annotations

import json
from typing import Any

import torch

from conformance.subjects.published import FACTS as FOLDER
from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.mapping.mapping import Mapping
from torchtitan_ckpt.mapping.rule import NativeOnly, Tied

CONFIGS: dict[str, Any] = json.loads((FOLDER / "configs.json").read_text())
KEYS: dict[str, Any] = json.loads((FOLDER / "keys.json").read_text())
TINY: dict[str, Any] = json.loads((FOLDER / "tiny_configs.json").read_text())
NATIVE: dict[str, Any] = json.loads((FOLDER / "native_names.json").read_text())

# Which generation and switches write a published file key for key.
EXPORTS = {
    "DeepSeek-V3.2": ("npu", ("all",)),
    "DeepSeek-V3": ("titan", ("all",)),
    "DeepSeek-V4-Flash": ("npu", ()),
    "DeepSeek-V4-Pro": ("npu", ()),
    "Qwen3-0.6B": ("titan", ("tied-head",)),
    "Qwen3-30B-A3B": ("titan", ()),
    "Qwen3-235B-A22B": ("titan", ()),
    "Llama-3.1-8B": ("titan", ()),
    "gpt-oss-20b": ("titan", ()),
}


def meta(entries: dict[str, TensorEntry]) -> dict[str, torch.Tensor]:
    return {
        key: torch.empty(e.shape, dtype=getattr(torch, e.dtype), device="meta")
        for key, e in entries.items()
    }


def fingerprints(entries: dict[str, TensorEntry], mapping: Mapping) -> dict[str, torch.Tensor]:
    """Tensors whose every element is different and exact in its dtype where the dtype allows it.

    Tied native keys hold their target's values and native-only keys zeros, as a checkpoint would.
    """
    out: dict[str, torch.Tensor] = {}
    start = 0
    for key, entry in entries.items():
        count = entry.numel
        flat = torch.arange(start, start + count)
        start += count
        match = mapping.index(0).match(key)
        declared = None if match is None else mapping.entries[match.entry]
        if isinstance(declared, NativeOnly):
            flat = torch.zeros(count)
        out[key] = flat.reshape(entry.shape).to(getattr(torch, entry.dtype))
    for declared in mapping.entries:
        if isinstance(declared, Tied) and declared.side == "native":
            out[declared.key] = out[declared.to].clone()
    return out
