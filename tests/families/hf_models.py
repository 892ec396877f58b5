"""Small transformers models with random weights everywhere, and what they write to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM


def build(config: dict[str, Any]) -> Any:
    """A model of this config; norms, biases and tables are random too, so that swaps show."""
    fields = {k: v for k, v in config.items() if k not in ("model_type", "torch_dtype")}
    hf = CONFIG_MAPPING[config["model_type"]](**fields)
    model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager").eval().float()
    make = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if not tensor.is_floating_point():
                high = config.get("n_routed_experts", 2)
                tensor.copy_(torch.randint(0, high, tensor.shape, generator=make))
                continue
            noise = torch.randn(tensor.shape, generator=make)
            if "norm" in name and tensor.dim() == 1:
                tensor.copy_(1 + 0.1 * noise)
            else:
                tensor.copy_(noise * (0.3 / max(1, tensor.shape[-1]) ** 0.5))
    if config.get("tie_word_embeddings"):
        model.tie_weights()
    return model


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers writes for the model."""
    model.save_pretrained(folder)
    out: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        out.update(load_file(file))
    return out


def logits(model: Any, vocabulary: int, length: int = 24) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(vocabulary, length)).logits


def tokens(vocabulary: int, length: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(3))
