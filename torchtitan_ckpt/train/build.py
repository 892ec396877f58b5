"""From a job's config to what it trains: model parts, loss, optimizer, scheduler.

The same on any set of ranks: a model is described on the meta device, split, and only then given
weights, each drawn from its name and the seed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_ckpt.train.config import JobConfig, LRSchedulerConfig, OptimizerConfig
from torchtitan_ckpt.train.models.qwen3 import Qwen3Model, init_weights
from torchtitan_ckpt.train.pipeline import LossFn, model_parts
from torchtitan_ckpt.train.world import World


def build_parts(job: JobConfig, world: World) -> list[Qwen3Model]:
    """This rank's model parts, split over `world`, on its device, with their first weights."""
    assert job.model is not None
    with torch.device("meta"):
        parts = model_parts(world, job.model, job.training.dropout)
    for part in parts:
        _cast(part, getattr(torch, job.training.dtype))
        part.tie()
        if world.meshes is not None:
            from torchtitan_ckpt.train.parallelize import split

            split(part, world.meshes)
        part.to_empty(device=world.device)
        part.tie()
        init_weights(part, job.model, job.training.seed)
    return parts


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: the experts' bias stays float32."""
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(value.to(dtype)))


def loss_over(tokens: int) -> LossFn:
    """Cross entropy as a share of `tokens`, the tokens of a step on all ranks together.

    The shares of all ranks and microbatches add up to the mean, and so do their gradients.
    """

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        flat = logits.float().reshape(-1, logits.shape[-1])
        return F.cross_entropy(flat, labels.reshape(-1), reduction="sum") / tokens

    return loss


def make_optimizer(model: nn.Module, options: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW, one parameter at a time: fused kernels may add in another order."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        foreach=False,
        fused=False,
    )


def make_lr_scheduler(
    optimizer: torch.optim.Optimizer, options: LRSchedulerConfig, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warmup from 1/(warmup + 1), then linear decay to `min_lr_factor`."""
    end = options.total_steps or steps

    def factor(step: int) -> float:
        if step < options.warmup_steps:
            return (step + 1) / (options.warmup_steps + 1)
        left = max(0.0, (end - step) / max(1, end - options.warmup_steps))
        return options.min_lr_factor + (1 - options.min_lr_factor) * left

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
