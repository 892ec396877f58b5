"""Model configs of every kind, as the dict that Hugging Face's config.json holds.

Accepted: that dict, a file or folder with it, an object with its attribute names (a reference job's
config), and torchtitan 0.3.0's model configs, whose sizes are read off their layers. No tables and
no weights here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_ckpt.errors import ConfigError, Problem
from torchtitan_ckpt.formats.strangers import read_json

INDEX = "model.safetensors.index.json"


def read(config: Any, assets: str | None) -> dict[str, Any]:
    """The config as a dict. Raises ConfigError when none of the accepted forms fits."""
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (str, Path)):
        path = Path(config)
        return _load(path / "config.json" if path.is_dir() else path)
    if hasattr(config, "hidden_size") and hasattr(config, "num_hidden_layers"):
        return _attributes(config)
    if hasattr(config, "dim") and hasattr(config, "layers"):
        return from_titan(config)
    if assets is not None and (Path(assets) / "config.json").is_file():
        return _load(Path(assets) / "config.json")
    raise ConfigError(
        Problem(
            code="mapping.no-config",
            what=f"no model config can be read from a {type(config).__name__}",
            where=str(assets or ""),
            expected="a Hugging Face config (dict, path or object) or a torchtitan model config",
            fix="pass one, or put the model's config.json into hf_assets_path",
        )
    )


def weight_map(assets: str | None) -> dict[str, str] | None:
    """The index of `hf_assets_path`: which file holds which key; None where there is none."""
    if assets is None or not (Path(assets) / INDEX).is_file():
        return None
    found = _load(Path(assets) / INDEX).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ConfigError(
            Problem(
                code="mapping.bad-index",
                what="the index has no weight_map of keys to file names",
                where=str(Path(assets) / INDEX),
                fix="download the index again",
            )
        )
    return found


def _load(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            Problem(
                code="mapping.unreadable-config",
                what="cannot read a JSON file of hf_assets_path",
                where=str(path),
                cause=str(error),
                fix="check the path, or download the file again",
            )
        ) from error
    return found


def _attributes(config: Any) -> dict[str, Any]:
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    names = [name for name in dir(config) if not name.startswith("_")]
    pairs = ((name, getattr(config, name)) for name in names)
    out = {name: value for name, value in pairs if not callable(value)}
    if "load_balance_coeff" in out:
        out["expert_bias"] = out["load_balance_coeff"] is not None
    return out


_TITAN = {
    "Llama3Model": "llama",
    "Qwen3Model": "qwen3",
    "DeepSeekV3Model": "deepseek_v3",
    "GptOssModel": "gpt_oss",
}


def from_titan(config: Any) -> dict[str, Any]:
    """Sizes of a torchtitan 0.3.0 model config under Hugging Face's names."""
    model = type(config).__qualname__.split(".")[0]
    if model not in _TITAN:
        raise ConfigError(
            Problem(
                code="mapping.titan-model",
                what=f"no family for torchtitan's {model}",
                expected=", ".join(_TITAN),
                fix="pass the Hugging Face config of the model instead",
            )
        )
    attention = config.layers[0].attention
    heads = attention.n_heads
    out: dict[str, Any] = {
        "model_type": _TITAN[model],
        "hidden_size": config.dim,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": heads,
        "tie_word_embeddings": bool(config.enable_weight_tying),
    }
    if model == "DeepSeekV3Model":
        out |= _latent(attention, config)
    else:
        out["num_key_value_heads"] = attention.n_kv_heads or heads
        out["head_dim"] = attention.head_dim or config.dim // heads
    dense = [getattr(layer, "feed_forward", None) for layer in config.layers]
    moe = [getattr(layer, "moe", None) for layer in config.layers]
    if any(dense):
        out["intermediate_size"] = next(f for f in dense if f).w1.out_features
    if any(moe):
        out |= _experts(model, next(m for m in moe if m), [i for i, f in enumerate(dense) if f])
    return out


def _latent(attention: Any, config: Any) -> dict[str, Any]:
    return {
        "q_lora_rank": attention.q_lora_rank or None,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "num_nextn_predict_layers": len(getattr(config, "mtp_layers", None) or ()),
    }


def _experts(model: str, moe: Any, dense: list[int]) -> dict[str, Any]:
    inner = moe.routed_experts.inner_experts
    out: dict[str, Any] = {"expert_bias": moe.load_balance_coeff is not None}
    if model == "GptOssModel":
        out["intermediate_size"] = inner.hidden_dim
        return {**out, "num_local_experts": moe.num_experts}
    out["moe_intermediate_size"] = inner.hidden_dim
    if model == "DeepSeekV3Model":
        shared = moe.shared_experts
        width = shared.w1.out_features if shared is not None else 0
        return {
            **out,
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": width // inner.hidden_dim,
            "first_k_dense_replace": len(dense),
        }
    return {
        **out,
        "model_type": "qwen3_moe",
        "num_experts": moe.num_experts,
        "mlp_only_layers": dense,
    }
