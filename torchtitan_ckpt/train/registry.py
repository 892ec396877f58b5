"""The named jobs, and how a MODULE and a CONFIG find one.

A registry is any importable module; its jobs are functions without arguments that return a
`JobConfig`. `torchtitan_ckpt.train` is such a module and offers the jobs below.
"""

from __future__ import annotations

import importlib
import inspect

from torchtitan_ckpt.config import CheckpointConfig
from torchtitan_ckpt.errors import ConfigError, Problem, nearest
from torchtitan_ckpt.train.config import JobConfig, LRSchedulerConfig, TrainingConfig
from torchtitan_ckpt.train.models.config import Qwen3Config

DEFAULT_MODULE = "torchtitan_ckpt.train"
DEFAULT_CONFIG = "qwen3_debug"

# Sizes are pairwise different, so that a transposed or swapped tensor cannot fit; thirteen layers
# and twelve experts, so that text order (10 before 2) is not number order. `fixtures/qwen3` holds
# weights of exactly these models.
DENSE = Qwen3Config(
    vocab_size=208,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=13,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=20,
)
TIED = Qwen3Config(
    vocab_size=176,
    hidden_size=56,
    intermediate_size=88,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=12,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
)
MOE = Qwen3Config(
    model_type="qwen3_moe",
    vocab_size=184,
    hidden_size=44,
    intermediate_size=60,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=18,
    num_experts=12,
    num_experts_per_tok=3,
    moe_intermediate_size=28,
    mlp_only_layers=(1,),
)


def _job(model: Qwen3Config | None, checkpoint: CheckpointConfig | None = None) -> JobConfig:
    return JobConfig(
        model=model,
        # The decay ends at a fixed step, so that a longer run begins exactly like a shorter one.
        lr_scheduler=LRSchedulerConfig(total_steps=100),
        training=TrainingConfig(dropout=0.1),
        checkpoint=checkpoint or CheckpointConfig(),
    )


def qwen3_debug() -> JobConfig:
    """Dense, head and embedding apart."""
    return _job(DENSE)


def qwen3_tied_debug() -> JobConfig:
    """Dense, head and embedding one tensor."""
    return _job(TIED)


def qwen3_moe_debug() -> JobConfig:
    """Twelve experts in two of three layers."""
    return _job(MOE)


def qwen3_from_assets() -> JobConfig:
    """The Qwen3 model whose config.json lies in --hf_assets_path."""
    return _job(None)


def qwen3_load_only_debug() -> JobConfig:
    """A registry default with opinions: it loads from a fixed folder and never saves.

    Such a default stays until it is overridden: --checkpoint.enable alone clears neither.
    """
    return _job(
        DENSE, CheckpointConfig(load_only=True, initial_load_path="./checkpoint/qwen3_debug")
    )


def load(module: str, config: str) -> JobConfig:
    """The job that `config` names in `module`; ConfigError says what there is instead."""
    try:
        registry = importlib.import_module(module)
    except Exception as error:  # whatever a user's module does when it is imported
        raise ConfigError(
            Problem(
                code="train.no-module",
                what=f"the registry module {module!r} cannot be imported",
                where=f"MODULE={module}",
                cause=f"{type(error).__name__}: {error}",
                fix=f"name an importable Python module, e.g. MODULE={DEFAULT_MODULE}",
            )
        ) from error
    known = names(module)
    make = getattr(registry, config, None)
    if config not in known or make is None:
        guess = nearest(config, known)
        raise ConfigError(
            Problem(
                code="train.no-config",
                what=f"the registry {module} has no config {config!r}",
                where=f"CONFIG={config}",
                expected=f"one of {', '.join(known)}" if known else "a function of that name",
                actual=config,
                fix=f"CONFIG={guess or (known[0] if known else DEFAULT_CONFIG)}",
            )
        )
    job = make()
    if not isinstance(job, JobConfig):
        raise ConfigError(
            Problem(
                code="train.not-a-job",
                what=f"{module}.{config}() returned no job",
                expected="a torchtitan_ckpt.train.JobConfig",
                actual=type(job).__name__,
                fix="return JobConfig(...)",
            )
        )
    return job


def names(module: str) -> list[str]:
    """The configs of a registry module: its public functions that need no argument."""
    members = inspect.getmembers(importlib.import_module(module), inspect.isfunction)
    return [name for name, make in members if not name.startswith("_") and _needs_nothing(make)]


def _needs_nothing(make: object) -> bool:
    assert callable(make)
    empty = inspect.Parameter.empty
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(make).parameters.values()
    return all(p.default is not empty or p.kind in kinds for p in parameters)
