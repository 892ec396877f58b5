"""Two collectives with a gradient, for experts that are spread over ranks. Any backend will do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(x: Tensor, group: Any) -> Tensor:
    """The rows of all ranks, in rank order. Every rank brings the same number of rows."""
    if not x.is_floating_point():
        return _gather(x, group)
    out: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def sum_ranks(x: Tensor, group: Any) -> Tensor:
    """The sum over the ranks, on every rank."""
    out: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def _gather(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    out = x.contiguous().clone()
    dist.all_reduce(out, group=group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        total = _all_reduce(gradients[0], ctx.group)
        rows = total.shape[0] // dist.get_world_size(ctx.group)
        return total.narrow(0, dist.get_rank(ctx.group) * rows, rows), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        # Every rank's loss reads the sum, so a part's gradient is the sum of all ranks' gradients.
        return _all_reduce(gradients[0], ctx.group), None
