"""Show what a key corresponds to, and through which operations.

torchtitan-ckpt map layers.3.moe.routed_experts.inner_experts.w1_EFD --family qwen3_moe
torchtitan-ckpt map model.layers.3.mlp.experts.7.up_proj.weight --config ./checkpoint/Qwen3-30B-A3B
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Args:
    """Options of `torchtitan-ckpt map`."""

    keys: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="KEY [KEY ...]")]
    """Native or Hugging Face keys."""
    family: str | None = None
    """The model family; by default the one that the config's model_type names."""
    config: str | None = None
    """A config.json, the folder that holds one, or a published model (DeepSeek-V3.2)."""
    generation: str | None = None
    """Native names: titan (torchtitan 0.3.0) or npu (torchtitan-npu); by default both."""
    experts: str = "standard"
    """Expert format of the native side: standard or gmm."""
    json: bool = False
    """Print JSON."""


def run(args: Args) -> int:
    """Explain every key; a key that no rule covers is an error with the nearest template."""
    from torchtitan_ckpt.cli.model import read_model
    from torchtitan_ckpt.errors import ConfigError, MappingError, Problem
    from torchtitan_ckpt.mapping.explain import explain

    if not args.keys:
        raise ConfigError(
            Problem(
                code="map.no-key",
                what="no key was named",
                fix="torchtitan-ckpt map lm_head.weight --family qwen3",
            )
        )
    family, config = read_model(args.config, args.family)
    chosen = family.generations if args.generation is None else (args.generation,)
    tables = {
        name: family.mapping(config, name, experts=args.experts if name == "npu" else "standard")
        for name in chosen
    }
    rows = []
    problems: list[Problem] = []
    for key in args.keys:
        found = []
        missing: tuple[Problem, ...] = ()
        for name, table in tables.items():
            try:
                found += [(name, reading) for reading in explain(table, key)]
            except MappingError as error:
                missing = missing or error.problems
        problems += [] if found else missing
        rows += found
    if problems:
        raise MappingError(*problems)
    if args.json:
        print(json.dumps([{"generation": n, **asdict(r)} for n, r in rows], indent=1))
        return 0
    for name, reading in rows:
        print(f"{family.name}/{name}: {reading}")
    return 0
