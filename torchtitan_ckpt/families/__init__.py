"""The model families: one table a file, found by name or by a config.

`get("qwen3")`, `names()`, `of_config(config)`. A family gives `mapping(config, generation)` and the
manifests (`torchtitan_ckpt.mapping.keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torchtitan_ckpt.errors import MappingError, Problem, nearest
from torchtitan_ckpt.mapping.family import Family

_MODULES = (
    "llama3",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "gpt_oss",
)


def names() -> tuple[str, ...]:
    """The names of all families."""
    return _MODULES


def get(name: str) -> Family:
    """A family by name. Raises MappingError with the nearest name."""
    if name not in _MODULES:
        near = nearest(name, _MODULES)
        raise MappingError(
            Problem(
                code="mapping.unknown-family",
                what=f"no model family {name!r}",
                expected=", ".join(_MODULES),
                actual=f"nearest: {near}" if near else "",
                fix="correct the name, or pass an adapter of your own",
            )
        )
    family = import_module(f"{__name__}.{name}").FAMILY
    assert isinstance(family, Family)
    return family


def of_config(config: Mapping[str, Any]) -> Family:
    """The family that a Hugging Face config belongs to, by its `model_type`."""
    kind = config.get("model_type")
    for name in _MODULES:
        if kind in get(name).model_types:
            return get(name)
    known = [kind for name in _MODULES for kind in get(name).model_types]
    raise MappingError(
        Problem(
            code="mapping.unknown-family",
            what=f"no family for a config with model_type {kind!r}",
            expected=", ".join(known),
            fix="name the family, or pass an adapter of your own",
        )
    )
