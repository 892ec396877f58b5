"""What a Qwen3 model is made of, under the names of Hugging Face's `config.json`.

Needs no torch, so that a command line can be read without it. It describes; nothing is built here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torchtitan_ckpt.errors import ConfigError, DamagedError, NotFoundError, Problem

MODEL_TYPES = ("qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """Sizes of a Qwen3 model. `num_experts == 0` makes every layer dense.

    `load_balance_coeff` is the trainer's, not Hugging Face's: how far a step moves the bias that
    spreads tokens over the experts; None leaves the bias out of the model and of its state dict.
    """

    model_type: str = "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 512
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    load_balance_coeff: float | None = 1e-3

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError(*problems)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer holds experts (transformers' own rule)."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def groups(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def to_hf(self) -> dict[str, Any]:
        """The fields of a `config.json` that transformers understands."""
        out = asdict(self)
        out.pop("load_balance_coeff")
        out["mlp_only_layers"] = list(self.mlp_only_layers)
        if self.model_type == "qwen3":
            for name in _MOE_FIELDS:
                out.pop(name)
        arch = "Qwen3MoeForCausalLM" if self.model_type == "qwen3_moe" else "Qwen3ForCausalLM"
        return {**out, "architectures": [arch], "hidden_act": "silu", "attention_bias": False}


_MOE_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)


def from_hf_config(config: Mapping[str, Any], *, where: str = "config.json") -> Qwen3Config:
    """A `Qwen3Config` from a parsed `config.json`, of transformers 4 or 5.

    Raises ConfigError, with everything at once, where the file asks for something that these models
    do not compute (another family, scaled RoPE, sliding windows, biases) or lacks a size.
    """
    problems: list[Problem] = []

    def refuse(field: str, expected: str) -> None:
        problems.append(
            Problem(
                code="train.model-config",
                what=f"the reference job's Qwen3 does not compute {field}={config.get(field)!r}",
                where=where,
                expected=expected,
                actual=repr(config.get(field)),
            )
        )

    if config.get("model_type") not in MODEL_TYPES:
        refuse("model_type", " or ".join(MODEL_TYPES))
    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "silu")
    for flag in ("attention_bias", "use_sliding_window"):
        if config.get(flag):
            refuse(flag, "false")
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        refuse("rope_scaling" if config.get("rope_scaling") else "rope_parameters", "plain RoPE")

    values: dict[str, Any] = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    for item in fields(Qwen3Config):
        if config.get(item.name) is not None:
            values[item.name] = config[item.name]
        elif item.name == "num_experts" and config.get("num_local_experts") is not None:
            values["num_experts"] = config["num_local_experts"]  # transformers 5's attribute
        elif item.default is MISSING and item.name == "head_dim" and config.get("hidden_size"):
            values["head_dim"] = config["hidden_size"] // config.get("num_attention_heads", 1)
        elif item.default is MISSING:
            refuse(item.name, "a number")
    if problems:
        raise ConfigError(*problems)
    if config["model_type"] == "qwen3":
        values = {name: value for name, value in values.items() if name not in _MOE_FIELDS}
    elif values.get("mlp_only_layers") is not None:
        values["mlp_only_layers"] = tuple(values["mlp_only_layers"])
    return Qwen3Config(**values)


def read_hf_config(folder: str | Path) -> Qwen3Config:
    """The config of the Hugging Face folder `folder`; NotFoundError or DamagedError without one."""
    path = Path(folder) / "config.json"
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFoundError(
            Problem(
                code="train.no-model-config",
                what=f"the model's config.json cannot be read: {error.strerror or error}",
                where=str(path.absolute()),
                cause="--hf_assets_path names another folder, or is not given",
                fix="point --hf_assets_path at a folder written by save_pretrained, or choose a "
                "CONFIG that brings its own sizes",
            )
        ) from error
    except ValueError as error:
        parsed, cause = None, str(error)
    else:
        cause = f"it holds a {type(parsed).__name__}, not an object"
    if not isinstance(parsed, dict):
        raise DamagedError(
            Problem(
                code="train.bad-model-config",
                what="the model's config.json is not a JSON object",
                where=str(path),
                cause=cause,
                fix="copy the file again from where the weights came from",
            )
        )
    return from_hf_config(parsed, where=str(path))


def _problems(config: Qwen3Config) -> Iterator[Problem]:
    def problem(field: str, rule: str) -> Problem:
        return Problem(
            code="train.model-sizes",
            what=f"{field}={getattr(config, field)!r} makes no model",
            expected=rule,
            actual=repr(getattr(config, field)),
        )

    if config.model_type not in MODEL_TYPES:
        yield problem("model_type", " or ".join(MODEL_TYPES))
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    for name in (*sizes, "num_attention_heads", "num_key_value_heads", "head_dim"):
        if getattr(config, name) < 1:
            yield problem(name, "1 or more")
    if config.num_key_value_heads > 0 and config.num_attention_heads % config.num_key_value_heads:
        yield problem("num_key_value_heads", f"a divisor of {config.num_attention_heads} heads")
    if config.head_dim % 2:
        yield problem("head_dim", "an even number, since RoPE turns pairs")
    if config.model_type == "qwen3" and config.num_experts:
        yield problem("num_experts", "0 with model_type qwen3; experts need qwen3_moe")
    if config.num_experts and not 1 <= config.num_experts_per_tok <= config.num_experts:
        yield problem("num_experts_per_tok", f"1 to {config.num_experts}")
    if config.num_experts and config.moe_intermediate_size < 1:
        yield problem("moe_intermediate_size", "1 or more")
