"""Pairs of models for `forward.logits`: the reference job's Qwen3 and transformers'.

Both get the same weights, one side through the adapter under test. Weights are small random numbers
about their usual size, norms near 1, so that logits depend on every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from conformance.lab import Lab
    from conformance.template import Leaf

_LENGTH = 24
# What a table of names does without and a model does not.
_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
}


def pair_of(config: Mapping[str, Any]) -> Callable[[Lab], tuple[Any, Any, str]] | None:
    """What a Subject's `forward` is for this config; None where no two models of it can run."""
    if config.get("model_type") not in ("qwen3", "qwen3_moe") or not find_spec("transformers"):
        return None
    return lambda lab: _logits(lab, {**_DEFAULTS, **config})


def _logits(lab: Lab, config: Mapping[str, Any]) -> tuple[Tensor, Tensor, str]:
    """Logits of the reference job's model and of transformers', for a few random tokens."""
    import torch
    import transformers

    from torchtitan_ckpt.train.models.config import from_hf_config
    from torchtitan_ckpt.train.models.qwen3 import Qwen3Model

    state = weights(lab.native, lab.seed)
    for alias, source in lab.may.tied.items():
        state[alias] = state[source]
    for key in filter(lab.native_only, state):
        state[key].zero_()  # what files cannot hold, the other model does not have
    ours = Qwen3Model(from_hf_config(config)).eval()
    absent, unknown = ours.load_state_dict(state, strict=False)
    assert set(absent) <= set(lab.may.tied), absent
    assert not unknown, unknown
    fields = {k: v for k, v in config.items() if k not in ("model_type", "dtype")}
    made = transformers.CONFIG_MAPPING[config["model_type"]](**fields)
    theirs = _theirs(made, lab.convert("to_hf", state))
    tokens = torch.randint(
        config["vocab_size"], (1, _LENGTH), generator=torch.Generator().manual_seed(lab.seed)
    )
    with torch.no_grad():
        name = f"transformers {transformers.__version__} {type(theirs).__name__}"
        return ours(tokens), theirs(tokens).logits, name


def weights(native: Mapping[str, Leaf], seed: int) -> dict[str, Tensor]:
    """float32 weights of a model that could have been trained a little."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    made = {}
    for key, leaf in native.items():
        noise = torch.randn(leaf.shape, generator=draw)
        norm = len(leaf.shape) == 1 and "norm" in key
        made[key] = 1 + 0.1 * noise if norm else noise * leaf.shape[-1] ** -0.5
    return made


def _theirs(config: Any, files: Mapping[str, Tensor]) -> Any:
    """transformers' model of these tensors, read from a folder as its users read theirs."""
    import tempfile

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # The plain ways to compute: fused ones ask for sizes that are multiples of something.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            named = {k: v.contiguous().cpu() for k, v in files.items()}
            save_file(named, f"{folder}/model.safetensors")
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plain)
    finally:
        if shown:
            logging.enable_progress_bar()
    return model.eval()
