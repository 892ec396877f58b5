"""The job computes the same gradients however it is split: the layouts are real, not only named.

AdamW hides a gradient that is a constant too large, so gradients themselves are compared, key by
key, with those of one process that sees the whole batch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from conformance.ranks import RankPool
from torchtitan_ckpt.parallel import ParallelDegrees, build_meshes
from torchtitan_ckpt.train import registry
from torchtitan_ckpt.train.build import build_parts, loss_over
from torchtitan_ckpt.train.config import JobConfig, TrainingConfig
from torchtitan_ckpt.train.pipeline import make_step
from torchtitan_ckpt.train.world import Place, World

SEQ = 16
BATCH = 4


def job_of(config: str, rows: int) -> JobConfig:
    job = registry.load("torchtitan_ckpt.train", config)
    return replace(job, training=TrainingConfig(seq_len=SEQ, local_batch_size=rows, seed=3))


def batch(vocab: int) -> torch.Tensor:
    return torch.randint(vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(9))


def gradients(config: str, degrees: ParallelDegrees | None) -> dict[str, torch.Tensor]:
    """Full gradients by FQN of one step; under a pipeline those of all stages."""
    meshes = None if degrees is None else build_meshes(degrees.resolve(dist.get_world_size()))
    rank, size = (0, 1) if degrees is None else (dist.get_rank(), dist.get_world_size())
    world = World(Place(rank, rank, size), torch.device("cpu"), meshes)
    rows = BATCH // world.dp_size
    job = job_of(config, rows)
    parts = build_parts(job, world)
    step = make_step(parts, world, job, loss_over(BATCH * SEQ))
    assert job.model is not None
    mine = batch(job.model.vocab_size)[world.dp_rank * rows : (world.dp_rank + 1) * rows]
    step(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())
    out: dict[str, torch.Tensor] = {}
    for part in parts:
        if job.model.tie_word_embeddings:
            assert part.lm_head.weight is part.tok_embeddings.weight
        for name, value in part.named_parameters():
            gradient = value.grad
            assert gradient is not None, name
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            out[name] = full.clone()
    if world.size("pp") > 1:
        stages: list[dict[str, torch.Tensor]] = [{} for _ in range(size)]
        dist.all_gather_object(stages, out)
        out = {name: value for stage in stages for name, value in stage.items()}
    return out


_alone: dict[str, dict[str, torch.Tensor]] = {}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("qwen3_debug", "fsdp2 x tp2"),
        ("qwen3_debug", "hsdp2x2"),
        ("qwen3_debug", "dp_replicate2"),
        ("qwen3_debug", "pp2 x fsdp2"),
        ("qwen3_tied_debug", "fsdp2 x tp4"),
        ("qwen3_tied_debug", "hsdp2x2"),
        ("qwen3_moe_debug", "fsdp4 x ep2"),
        ("qwen3_moe_debug", "fsdp2 x tp2 x ep4"),
        ("qwen3_moe_debug", "hsdp2x2 x ep2"),
        ("qwen3_moe_debug", "tp2 x pp2 x ep2"),
        pytest.param("qwen3_moe_debug", "fsdp2 x tp2 x pp2 x ep2", marks=pytest.mark.slow),
    ],
)
def test_gradients_do_not_depend_on_the_layout(pool: RankPool, config: str, words: str) -> None:
    if config not in _alone:
        _alone[config] = gradients(config, None)
    expected = _alone[config]
    degrees = ParallelDegrees.parse(words)
    found = pool.run(gradients, degrees.world_size, config, degrees, timeout=120)
    assert set(found[0]) == set(expected)
    for name, value in expected.items():
        scale = value.abs().max().item()
        for rank, mine in enumerate(found):
            worst = (mine[name] - value).abs().max().item()
            assert worst <= 2e-5 * scale + 1e-9, f"rank {rank}, {name}: {worst} of {scale}"
