"""Forward and backward of one step: in one go, or through torch's pipeline schedules.

Which layers a rank holds is decided here too: with enough layers every rank gets two stretches of
the model (interleaved), so that a job has several model parts on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchtitan_ckpt.train.config import JobConfig
from torchtitan_ckpt.train.models.config import Qwen3Config
from torchtitan_ckpt.train.models.qwen3 import Qwen3Model
from torchtitan_ckpt.train.world import World

LossFn = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor], Tensor]


def stretches(layers: int, ranks: int) -> list[range]:
    """The layers of each pipeline stage: two stages a rank where the layers suffice."""
    stages = ranks * (2 if ranks > 1 and layers >= 2 * ranks else 1)
    bounds = [round(stage * layers / stages) for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def own_stages(world: World, config: Qwen3Config) -> list[int]:
    """Numbers of the stages that this rank holds, in order."""
    ranks = world.size("pp")
    return list(range(world.coordinate("pp"), len(_all(world, config)), ranks))


def model_parts(world: World, config: Qwen3Config, dropout: float) -> list[Qwen3Model]:
    """This rank's parts of the model, on the current default device (the meta device, usually)."""
    stages = _all(world, config)
    return [
        Qwen3Model(
            config,
            layers=stages[index],
            first=index == 0,
            last=index == len(stages) - 1,
            dropout=dropout,
        )
        for index in own_stages(world, config)
    ]


def make_step(parts: Sequence[Qwen3Model], world: World, job: JobConfig, loss_fn: LossFn) -> Step:
    """A function (inputs, labels) -> this rank's share of the loss, with gradients accumulated."""
    if world.size("pp") == 1:
        (model,) = parts

        def whole(inputs: Tensor, labels: Tensor) -> Tensor:
            loss = loss_fn(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        return whole
    schedule = _schedule(parts, world, job, loss_fn)
    holds_first = parts[0].tok_embeddings is not None
    holds_last = parts[-1].lm_head is not None

    def piped(inputs: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        args = (inputs,) if holds_first else ()
        more = {"target": labels, "losses": losses} if holds_last else {}
        schedule.step(*args, **more, return_outputs=False)
        if not holds_last:
            return torch.zeros((), device=world.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    return piped


def _all(world: World, config: Qwen3Config) -> list[range]:
    return stretches(config.num_hidden_layers, world.size("pp"))


def _schedule(parts: Sequence[Qwen3Model], world: World, job: JobConfig, loss_fn: LossFn) -> Any:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B

    assert world.meshes is not None
    config = parts[0].config
    total = len(_all(world, config))
    stages = []
    for index, part in zip(own_stages(world, config), parts, strict=True):
        shape = (1, job.training.seq_len)  # one sample is one microbatch
        dtype = getattr(torch, job.training.dtype)
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        hidden, logits = (
            torch.empty((*shape, size), dtype=dtype, device="meta", requires_grad=True)
            for size in (config.hidden_size, config.vocab_size)
        )
        stages.append(
            PipelineStage(
                part,
                index,
                total,
                world.device,
                input_args=tokens if index == 0 else hidden,
                output_args=logits if index == total - 1 else hidden,
                group=world.meshes.dense.get_group("pp"),
            )
        )
    count = job.training.local_batch_size
    # The loss is divided by all tokens already, so the schedule must not divide gradients again.
    if len(stages) > 1:
        return ScheduleInterleaved1F1B(
            list(stages), n_microbatches=count, loss_fn=loss_fn, scale_grads=False
        )
    return ScheduleGPipe(stages[0], n_microbatches=count, loss_fn=loss_fn, scale_grads=False)
