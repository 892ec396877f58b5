"""The settings of a reference training job, as the guide's flags name them.

Plain dataclasses without torch. Functions of a registry module make them by name, `cli_args`
overrides their fields from a command line, and `rules` finds settings that no job can have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from torchtitan_ckpt.config import CheckpointConfig
from torchtitan_ckpt.train.models.config import Qwen3Config


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long, on what, from which seed."""

    steps: int = 10
    """Train until this step."""

    seq_len: int = 32
    """Tokens of a sample."""

    local_batch_size: int = 2
    """Samples of one data-parallel rank in a step."""

    seed: int = 0
    """Seed of the first weights, of the data and of dropout."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters and of the optimizer's moments."""

    dropout: float = 0.0
    """Share of the embedding's output that is dropped; above 0, a resume depends on the RNG."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    """Linear warmup, then linear decay."""

    warmup_steps: int = 2
    """Steps until the full learning rate."""

    total_steps: int | None = None
    """Step at which the decay ends; without it, training.steps."""

    min_lr_factor: float = 0.1
    """Share of the learning rate that the decay ends at."""


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """How the job is split. Degrees multiply to the number of ranks, but for the experts' degree,
    which borrows ranks of the others."""

    data_parallel_replicate_degree: int = 1
    """Replicas of the (sharded) model: HSDP together with sharding, plain replicas without."""

    data_parallel_shard_degree: int = -1
    """Ranks that FSDP2 shards the parameters over; -1 takes the ranks that are left."""

    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    context_parallel_degree: int = 1

    expert_parallel_degree: int = 1
    """Ranks that the experts are spread over, out of those that shard and split tensors."""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """One training job. Made by the functions of a registry module, changed by the command line."""

    dump_folder: str = "./outputs"
    """Everything the job writes lies here; checkpoints in its subfolder checkpoint.folder."""

    hf_assets_path: str | None = None
    """Folder of the model's Hugging Face files (config.json, weights)."""

    debug: bool = False
    """Show a traceback with an error."""

    device: Literal["npu", "cuda", "cpu"] | None = None
    """Device to train on; without it, the best one that works."""

    model: Annotated[Qwen3Config | None, tyro.conf.Suppress] = None
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
