"""w13 tensors that old torchtitan-npu code fused shard by shard: recognised when asked, repaired.

Right is [w1 rows, w3 rows] along the fused dimension. Code of 1 July 2026 fused each shard on its
own, so that a checkpoint of degree n holds [w1_0, w3_0, w1_1, w3_1, ...]. Nothing in the file marks
it: the degree must be given, and without a reference for the values nothing is concluded.
"""

from __future__ import annotations

from enum import Enum

import torch

from torchtitan_ckpt.errors import MappingError, Problem
from torchtitan_ckpt.mapping.apply import same_bytes
from torchtitan_ckpt.mapping.ops import Op, Regroup


class W13(Enum):
    """What a w13 tensor turned out to be, for one degree."""

    PLAIN = "w1 rows, then w3 rows"
    BY_SHARD = "w1 and w3 rows alternate, a block a shard"
    SAME = "both readings give these values: nothing to repair"
    NEITHER = "neither reading gives the reference's values"


def repair(degree: int, dim: int = 1) -> Op:
    """The op from a w13 fused in `degree` shards to the plain one. Its inverse undoes it.

    A shard's block holds its part of w1 and its part of w3: a grid of `degree` x 2 runs of rows,
    which is transposed into 2 x `degree`.
    """
    if degree < 1:
        raise MappingError(
            Problem(
                code="w13.degree",
                what=f"{degree} is no sharding degree",
                fix="give the number of shards of the fused dimension when it was saved",
            )
        )
    return Regroup(dim, degree, 2)


def repair_tensor(w13: torch.Tensor, degree: int, dim: int = 1) -> torch.Tensor:
    """A repaired copy. `w13` is the whole tensor, as read from all shards of the checkpoint."""
    return _apply(w13, degree, dim, back=False)


def shard_fused(w13: torch.Tensor, degree: int, dim: int = 1) -> torch.Tensor:
    """What old code would have written for a plain w13: the inverse of `repair_tensor`."""
    return _apply(w13, degree, dim, back=True)


def recognise(
    w13: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, degree: int, dim: int = 1
) -> W13:
    """Compare a w13 with w1 and w3 from a source known to be right (a hub file, a seed).

    Bitwise; the reference must hold the very values that w13 was made of.
    """
    plain = torch.cat([w1, w3], dim)
    mixed = shard_fused(plain, degree, dim)
    as_plain, as_mixed = same_bytes(w13, plain), same_bytes(w13, mixed)
    if as_plain and as_mixed:
        return W13.SAME
    if as_plain:
        return W13.PLAIN
    return W13.BY_SHARD if as_mixed else W13.NEITHER


def _apply(w13: torch.Tensor, degree: int, dim: int, *, back: bool) -> torch.Tensor:
    rows = w13.shape[dim]
    if degree < 1 or rows % (2 * degree):
        raise MappingError(
            Problem(
                code="w13.degree",
                what=f"{rows} fused rows do not come from {degree} shards",
                expected="rows divisible by twice the degree",
                fix="give the number of shards of the fused dimension when it was saved",
            )
        )
    grid = (2, degree) if back else (degree, 2)
    shape = (*w13.shape[:dim], *grid, rows // (2 * degree), *w13.shape[dim + 1 :])
    return w13.reshape(shape).transpose(dim, dim + 1).reshape(w13.shape).contiguous()
