"""`plan`: which rank writes and reads which bytes under given degrees, without the hardware.

    torchtitan-ckpt plan --family deepseek_v32 --config DeepSeek-V3.2 \\
        --data_parallel_shard_degree 32 --tensor_parallel_degree 4 --expert_parallel_degree 64 \\
        --to "fsdp64 x tp2 x ep64"
"""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Args:
    """A model, the degrees that save it, and perhaps the degrees that load it."""

    config: str
    """A published model (DeepSeek-V3.2), or a config.json, or the folder that holds one."""

    family: str | None = None
    """The model family; by default the one that the config's model_type names."""

    generation: str | None = None
    """Names of torchtitan 0.3.0 (titan) or of torchtitan-npu and v0.2.2 (npu)."""

    world_size: int | None = None
    """Number of ranks; by default the product of the degrees."""

    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = 1
    """-1 takes the ranks of --world_size that are left."""

    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    expert_tensor_parallel_degree: int = 1

    stages_per_rank: int = 1
    """Pipeline stages (model parts) of a rank."""

    to: str | None = None
    """Degrees that load the checkpoint: 'fsdp64 x tp2 x ep64', or options with their numbers."""

    to_stages_per_rank: int = 1
    """Pipeline stages of a rank of the loading job."""

    dtype: str = "float32"
    """Dtype of the parameters and moments; what a family pins keeps its own."""

    model_only: bool = False
    """Plan a model-only checkpoint: no optimizer, scheduler, data loader and counters."""

    method: Literal["auto", "dcp", "repeat"] = "auto"
    """DCP's own planners rank by rank (dcp), or their rules replayed over what repeats (repeat)."""

    every_rank: bool = False
    """One line for every rank."""

    html: str | None = None
    """Also write a page with pictures to this file."""

    json: bool = False
    """Print JSON."""


def run(args: Args) -> int:
    """0 when the plan has no fault, 1 when something would fail."""
    from torchtitan_ckpt.plan import plan_load, plan_save
    from torchtitan_ckpt.plan.text import as_html, as_json, load_text, save_text
    from torchtitan_ckpt.progress import waiting

    native = _native(args)
    degrees = _degrees(args)
    target = None if args.to is None else _target(args.to)
    with waiting("planning"):
        save = plan_save(
            native,
            degrees,
            chunks=args.stages_per_rank,
            optimizer=not args.model_only,
            method=args.method,
        )
        load = None
        if target is not None:
            load = plan_load(
                save, native, target, chunks=args.to_stages_per_rank, optimizer=not args.model_only
            )
    if args.html is not None:
        Path(args.html).write_text(as_html(save, load), encoding="utf-8")
    if args.json:
        print(json_module.dumps(as_json(save, load), indent=1))
    else:
        print(save_text(save, every_rank=args.every_rank))
        if load is not None:
            print("\n" + load_text(load, every_rank=args.every_rank))
    faults = [*save.problems, *(load.problems if load is not None else ())]
    return 1 if faults else 0


def _degrees(args: Args) -> Any:
    from torchtitan_ckpt.parallel import OPTIONS, ParallelDegrees

    given = ParallelDegrees.from_options({name: getattr(args, name) for name in OPTIONS})
    return given.resolve(args.world_size)


def _target(text: str) -> Any:
    from torchtitan_ckpt.parallel import ParallelDegrees

    return ParallelDegrees.parse(text).resolve()


def _native(args: Args) -> Any:
    from torchtitan_ckpt.cli.model import read_model
    from torchtitan_ckpt.errors import ConfigError, Problem
    from torchtitan_ckpt.manifest import ITEM_SIZE, is_floating
    from torchtitan_ckpt.mapping.keys import native_entries

    if args.dtype not in ITEM_SIZE or not is_floating(args.dtype):
        raise ConfigError(
            Problem(
                code="plan.dtype",
                what=f"{args.dtype!r} is no floating dtype",
                expected="such as float32 or bfloat16",
            )
        )
    family, config = read_model(args.config, args.family)
    generation = args.generation or family.generations[0]
    return native_entries(family.mapping(config, generation), dtype=args.dtype)
