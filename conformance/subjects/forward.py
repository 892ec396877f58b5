"""Pairs of models for `forward.logits`: one of the native names, and transformers'.

Both get the same weights, one side through the adapter under test. Weights are small random numbers
about their usual size, norms near 1, so that logits depend on every one of them. The native side is
the reference job's Qwen3, or torchtitan's model (`forward_titan.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from conformance.lab import Lab
    from conformance.template import Leaf

    Logits = Callable[[Mapping[str, Any], dict[str, Tensor], Tensor], Tensor]

_LENGTH = 24
# Numbers that no shape depends on, the same on both sides and simple: a plain rope, no groups of
# experts, windows shorter than the text, a choice of keys that is not.
_NUMBERS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 64,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 64,
}
_OF_TYPE: dict[str, dict[str, Any]] = {"gpt_oss": {"sliding_window": 7}}
_JOB = ("qwen3", "qwen3_moe")


def pair_of(
    config: Mapping[str, Any], native: Logits | None = None
) -> Callable[[Lab], tuple[Tensor, Tensor, str]]:
    """What a Subject's `forward` is for this config.

    `native` computes with the native names; None is the model of this config that is installed.
    The pair raises NotApplicable with the reason where it cannot run.
    """
    kind = str(config.get("model_type"))
    numbers = {**config, **_NUMBERS, **_OF_TYPE.get(kind, {})}
    return lambda lab: _pair(lab, numbers, native)


def _pair(lab: Lab, config: Mapping[str, Any], native: Logits | None) -> tuple[Tensor, Tensor, str]:
    """Logits of the native model and of transformers', for a few random tokens."""
    import torch

    kind = config["model_type"]
    _can_run(lab, kind, native)
    state = weights(lab.native, lab.seed)
    for alias, source in lab.may.tied.items():
        state[alias] = state[source]
    for key in filter(lab.native_only, state):
        state[key].zero_()  # what files cannot hold, the other model does not have
    draw = torch.Generator().manual_seed(lab.seed)
    tokens = torch.randint(config["vocab_size"], (1, _LENGTH), generator=draw)
    files = lab.convert("to_hf", state)
    theirs, name = _theirs(config, files, tokens)
    ours = (native or (_job if kind in _JOB else _titan))(config, _seen(lab, config, state), tokens)
    return ours, theirs, name


def _seen(lab: Lab, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What takes part in a forward pass; what does not is noted."""
    parts = {
        # transformers computes without the layers that predict further tokens,
        "MTP layers": rf"(mtp_layers|layers\.{config['num_hidden_layers']})\.",
        # and of a text no longer than an indexer's choice, every query sees every key.
        "the indexer of so short a text": r".*\.indexer\.",
    }
    absent = {
        key: name for key in state for name, pattern in parts.items() if re.match(pattern, key)
    }
    if absent:
        lab.notes.append(
            f"forward.logits depends on {len(state) - len(absent)} of {len(state)} tensors, not on "
            + " and ".join(sorted(set(absent.values())))
        )
    return {key: value for key, value in state.items() if key not in absent}


def _can_run(lab: Lab, kind: str, native: Logits | None) -> None:
    """Raise NotApplicable with what is missing for a model of this type."""
    from conformance.lab import NotApplicable
    from conformance.subjects import forward_titan

    why = "" if native or kind in _JOB else forward_titan.missing(kind)
    if not find_spec("transformers"):
        why = "transformers not installed"
    total = sum(leaf.numel for leaf in lab.native.values())
    if not why and total > lab.max_elements:
        why = f"{total / 1e6:.0f}M elements; models run with up to {lab.max_elements / 1e6:.0f}M"
    if why:
        raise NotApplicable(why)


def _job(config: Mapping[str, Any], state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits of the reference job's Qwen3."""
    import torch

    from torchtitan_ckpt.train.models.config import from_hf_config
    from torchtitan_ckpt.train.models.qwen3 import Qwen3Model

    model = Qwen3Model(from_hf_config(config)).eval()
    absent, unknown = model.load_state_dict(state, strict=False)
    assert not unknown, unknown
    assert set(absent) <= {"lm_head.weight"} if config["tie_word_embeddings"] else not absent
    with torch.no_grad():
        out: Tensor = model(tokens)
    return out


def _titan(config: Mapping[str, Any], state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    from conformance.subjects import forward_titan

    return forward_titan.logits(config, state, tokens)


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


def _theirs(
    config: Mapping[str, Any], files: Mapping[str, Tensor], tokens: Tensor
) -> tuple[Tensor, str]:
    """Logits of transformers' model, read from a folder as its users read theirs; and its name."""
    import tempfile

    import torch
    import transformers
    from safetensors.torch import save_file

    fields = {k: v for k, v in config.items() if k not in ("model_type", "dtype")}
    # The plain ways to compute: fused ones ask for sizes that are multiples of something.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with tempfile.TemporaryDirectory() as folder, _quiet(transformers.utils.logging):
        transformers.CONFIG_MAPPING[config["model_type"]](**fields).save_pretrained(folder)
        named = {k: v.contiguous().cpu() for k, v in files.items()}
        save_file(named, f"{folder}/model.safetensors")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **plain
        )
    with torch.no_grad():
        out: Tensor = model.eval()(tokens).logits
    return out, f"transformers {transformers.__version__} {type(model).__name__}"


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """No progress bar, and no table of keys that a model has no use for."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
