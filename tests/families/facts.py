"""The published facts of fixtures/published, expanded; and helpers that families' tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.mapping.mapping import Mapping
from torchtitan_ckpt.mapping.rule import NativeOnly, Tied

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "published"
CONFIGS: dict[str, Any] = json.loads((FOLDER / "configs.json").read_text())
KEYS: dict[str, Any] = json.loads((FOLDER / "keys.json").read_text())
TINY: dict[str, Any] = json.loads((FOLDER / "tiny_configs.json").read_text())
NATIVE: dict[str, Any] = json.loads((FOLDER / "native_names.json").read_text())

DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "I64": "int64",
    "I8": "int8",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}

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


def published(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Every tensor of a published checkpoint: shape and dtype."""
    out: dict[str, tuple[tuple[int, ...], str]] = {}
    for pattern, count, shape, dtype, layers, mtp in KEYS[name]["patterns"]:
        keys = [pattern]
        for placeholder, text in (("{layer}", layers), ("{mtp}", mtp), ("{expert}", "")):
            if placeholder in pattern:
                numbers = _numbers(text) if text else range(count // len(keys))
                keys = [key.replace(placeholder, str(n)) for key in keys for n in numbers]
        assert len(keys) == count, pattern
        out.update({key: (tuple(shape), DTYPES[dtype]) for key in keys})
    assert len(out) == KEYS[name]["tensors"]
    return out


def _numbers(text: str) -> list[int]:
    out: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        out.extend(range(int(first), int(last or first) + 1))
    return out


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
