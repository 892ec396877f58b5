"""Which part of a tensor lies on which rank, told from its native name, its shape and the degrees.

A table says how tensor and expert parallelism split each parameter; FSDP2 then splits what is left
on dimension 0, or experts on dimension 1 when there are more ranks than experts. The boxes come
from torch's own arithmetic. This module describes what torch does to a model; it moves nothing,
and a test compares it with what `fully_shard` and `parallelize_module` really make.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from torchtitan_ckpt.errors import Problem
from torchtitan_ckpt.parallel import ParallelDegrees

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


class Split(Enum):
    """How a parameter is split before FSDP. Experts' dimension 0 is always the expert."""

    COLUMN = "column"  # tensor parallelism on dimension 0 (a Linear's outputs, a vocabulary)
    ROW = "row"  # on dimension 1 (a Linear's inputs)
    WHOLE = "whole"  # the same on every rank of the tensor parallel group
    EXPERTS_COLUMN = "experts-column"  # dimension 1 holds an expert's outputs
    EXPERTS_ROW = "experts-row"  # dimension 2 holds an expert's inputs
    EXPERTS_WHOLE = "experts-whole"  # experts that tensor parallelism does not split further
    BUFFER = "buffer"  # a plain tensor that every rank holds whole

    @property
    def is_expert(self) -> bool:
        return self in (Split.EXPERTS_COLUMN, Split.EXPERTS_ROW, Split.EXPERTS_WHOLE)


# Names of torchtitan 0.3.0 and, where they differ, of v0.2.2 and torchtitan-npu. No two patterns
# match one key. What matches none is whole: norms, routers, latent projections, indexers.
SPLITS: tuple[tuple[str, Split], ...] = (
    (r"(tok_embeddings|lm_head|output)\.weight", Split.COLUMN),
    (r".*\.attention\.(qkv_linear\.)?(wq|wk|wv|wqkv)\.(weight|bias)", Split.COLUMN),
    (r".*\.attention\.(pre_attention\.)?(wq_b|wkv_b)\.weight", Split.COLUMN),
    (r".*\.attention\.pre_attention\.wq\.weight", Split.COLUMN),
    (r".*\.attention\.sinks", Split.COLUMN),
    (r".*\.attention\.(post_attention\.)?wo\.weight", Split.ROW),
    (r".*\.(feed_forward|shared_experts)\.(w1|w3)\.weight", Split.COLUMN),
    (r".*\.(feed_forward|shared_experts)\.w2\.weight", Split.ROW),
    (r".*\.(routed_experts\.inner_|)experts\.(w1|w3|w13|mlp1_weight|mlp1_bias)(_[A-Z]+)?",
     Split.EXPERTS_COLUMN),
    (r".*\.(routed_experts\.inner_|)experts\.(w2|mlp2_weight)(_[A-Z]+)?", Split.EXPERTS_ROW),
    (r".*\.(routed_experts\.inner_|)experts\.mlp2_bias(_[A-Z]+)?", Split.EXPERTS_WHOLE),
    (r".*\.expert_bias(_E)?", Split.BUFFER),
    (r".*\.tid2eid", Split.BUFFER),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), split) for pattern, split in SPLITS)


@lru_cache(maxsize=65536)
def split_of(key: str) -> Split:
    """How the parameter `key` is split, by the table; `Split.WHOLE` where it says nothing."""
    for pattern, split in _COMPILED:
        if pattern.fullmatch(key):
            return split
    return Split.WHOLE


@dataclass(frozen=True, slots=True)
class AxisShard:
    """One mesh axis that shards `dim`. `split_factor` above 1 is torch's `_StridedShard`."""

    dim: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies on mesh axes: for each axis its shard, or None where it is replicated.

    No axes at all means a plain tensor, the same on every rank.
    """

    sparse: bool
    axes: tuple[str, ...]
    shards: tuple[AxisShard | None, ...]
    mesh_shape: tuple[int, ...]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """As torch spells it."""
        return _placements(self.shards)

    def box(
        self, shape: tuple[int, ...], coordinate: Mapping[str, int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, sizes) of the part at a coordinate, as the DTensor there describes itself.

        `coordinate` is `ParallelDegrees.coordinate` of a rank.
        """
        if not self.axes:
            return (0,) * len(shape), shape
        strided = self.strided()
        if strided is not None and self.rounds_alike(shape, coordinate[self.axes[strided]]):
            # torch lists every row of a strided shard to find the first one.
            return self.kept(shape, coordinate)
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

        where = [coordinate[axis] for axis in self.axes]
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, self.mesh_shape, where, self.placements
        )
        return tuple(offsets), tuple(sizes)

    def kept(
        self, shape: tuple[int, ...], coordinate: Mapping[str, int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What FSDP really keeps: it chunks the local tensor that tensor parallelism left.

        An empty part begins at the end of the whole tensor, as torch has it.
        """
        offsets, sizes = [0] * len(shape), list(shape)
        for axis, shard, ranks in reversed(
            list(zip(self.axes, self.shards, self.mesh_shape, strict=True))
        ):
            if shard is None:
                continue
            start, count = _chunk(sizes[shard.dim], ranks, coordinate[axis])
            offsets[shard.dim] += start
            sizes[shard.dim] = count
        for dim, count in enumerate(sizes):
            if count == 0:
                offsets[dim] = shape[dim]
        return tuple(offsets), tuple(sizes)

    def strided(self) -> int | None:
        """The place of the axis with a strided shard, or None."""
        for place, shard in enumerate(self.shards):
            if shard is not None and shard.split_factor > 1:
                return place
        return None

    def rounds_alike(self, shape: tuple[int, ...], rank: int) -> bool:
        """Whether FSDP over tensor parallelism keeps the rows that its DTensor describes.

        `rank` is the place on the strided axis. FSDP takes a chunk of each tensor parallel part;
        the DTensor says that these chunks together are cut evenly again.
        """
        place = self.strided()
        shard = None if place is None else self.shards[place]
        if place is None or shard is None:
            return True
        return _rounds_alike(shape[shard.dim], shard.split_factor, self.mesh_shape[place], rank)


def _chunk(size: int, parts: int, number: int) -> tuple[int, int]:
    """(start, length) of one of `parts` chunks, as `torch.chunk` cuts and pads with nothing."""
    each = -(-size // parts)
    start = min(each * number, size)
    return start, min(each, size - start)


@lru_cache(maxsize=65536)
def _rounds_alike(rows: int, inner: int, outer: int, rank: int) -> bool:
    taken = [_chunk(_chunk(rows, inner, part)[1], outer, rank)[1] for part in range(inner)]
    total = sum(taken)
    return taken == [_chunk(total, inner, part)[1] for part in range(inner)]


@lru_cache(maxsize=4096)
def _placements(shards: tuple[AxisShard | None, ...]) -> tuple[Placement, ...]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    out: list[Placement] = []
    for shard in shards:
        if shard is None:
            out.append(Replicate())
        elif shard.split_factor > 1:
            out.append(_StridedShard(shard.dim, split_factor=shard.split_factor))
        else:
            out.append(Shard(shard.dim))
    return tuple(out)


def uses_fsdp(degrees: ParallelDegrees) -> bool:
    """Whether `fully_shard` is applied: over one rank too, where experts have their own mesh."""
    return degrees.fsdp > 1 or degrees.dp_replicate > 1 or degrees.ep > 1


def layout_of(split: Split, shape: tuple[int, ...], degrees: ParallelDegrees) -> Layout:
    """The layout of one tensor under `degrees` (resolved)."""
    if split is Split.BUFFER:
        return Layout(False, (), (), ())
    sparse = split.is_expert and degrees.ep > 1
    inner: list[tuple[str, AxisShard | None]] = []
    if sparse:
        inner.append(("ep", AxisShard(0)))
        if degrees.etp > 1:
            inner.append(("etp", _tensor_shard(split)))
    elif degrees.tp > 1:
        inner.append(("tp", _tensor_shard(split)))
    outer: list[tuple[str, AxisShard | None]] = []
    if uses_fsdp(degrees):
        if degrees.dp_replicate > 1:
            outer.append(("dp_replicate", None))
        dim = fsdp_dim(split, shape, degrees)
        sizes = degrees.sizes
        factor = 1
        for axis, shard in inner:
            if shard is not None and shard.dim == dim:
                factor *= sizes[axis]
        outer.append(("efsdp" if sparse else "fsdp", AxisShard(dim, factor)))
    pairs = outer + inner
    axes = tuple(axis for axis, _ in pairs)
    return Layout(
        sparse,
        axes,
        tuple(shard for _, shard in pairs),
        tuple(degrees.sizes[axis] for axis in axes),
    )


def fsdp_dim(split: Split, shape: tuple[int, ...], degrees: ParallelDegrees) -> int:
    """The dimension that FSDP shards: 1 for experts that are fewer than their ranks, else 0."""
    if not split.is_expert or len(shape) < 2:
        return 0
    ranks = degrees.efsdp * degrees.ep if degrees.ep > 1 else degrees.fsdp
    return 1 if ranks > shape[0] else 0


def _tensor_shard(split: Split) -> AxisShard | None:
    dims = {
        Split.COLUMN: 0,
        Split.ROW: 1,
        Split.EXPERTS_COLUMN: 1,
        Split.EXPERTS_ROW: 2,
    }
    return AxisShard(dims[split]) if split in dims else None


def layout_problems(
    key: str, split: Split, shape: tuple[int, ...], degrees: ParallelDegrees
) -> list[Problem]:
    """What torch refuses, or gets wrong without a word, for this tensor under these degrees."""
    layout = layout_of(split, shape, degrees)
    problems = []
    if layout.sparse and shape[0] % degrees.ep:
        problems.append(
            Problem(
                code="parallel.experts-uneven",
                what=f"{shape[0]} experts cannot be spread evenly over {degrees.ep} ranks",
                where=key,
                expected="expert_parallel_degree to divide the number of experts",
                actual=str(degrees.ep),
            )
        )
    sizes = degrees.sizes
    for axis, shard in zip(layout.axes, layout.shards, strict=True):
        if shard is None or axis not in ("fsdp", "efsdp") or shard.dim == 0:
            continue
        rows = shape[shard.dim] // max(shard.split_factor, 1)
        if rows % sizes[axis]:
            problems.append(
                Problem(
                    code="parallel.uneven-dim",
                    what=f"FSDP shards dimension {shard.dim} only evenly",
                    where=f"{key} {list(shape)}",
                    expected=f"{sizes[axis]} to divide {rows}",
                    actual=f"{rows} over {sizes[axis]} ranks",
                    cause=f"experts ({shape[0]}) are fewer than the ranks that FSDP and expert "
                    "parallelism spread them over, so torchtitan shards their rows",
                    fix="lower data_parallel_shard_degree, or raise expert_parallel_degree",
                )
            )
    if uses_fsdp(degrees):
        for axis, shard in zip(layout.axes, layout.shards, strict=True):
            if shard is None or axis not in ("tp", "etp"):
                continue
            rows = shape[shard.dim]
            if rows and not _chunk(rows, sizes[axis], sizes[axis] - 1)[1]:
                problems.append(
                    Problem(
                        code="parallel.empty-part",
                        what="tensor parallelism leaves a rank with nothing, and FSDP cannot "
                        "reduce an empty gradient",
                        where=f"{key} {list(shape)}",
                        expected=f"dimension {shard.dim} to reach every one of {sizes[axis]} ranks",
                        actual=str(rows),
                        fix="lower tensor_parallel_degree, or pad the dimension",
                    )
                )
    if problems:
        return problems
    place = layout.strided()
    wrong = [
        rank
        for rank in range(0 if place is None else layout.mesh_shape[place])
        if not layout.rounds_alike(shape, rank)
    ]
    if place is not None and wrong:
        coordinate = dict.fromkeys(layout.axes, 0) | {layout.axes[place]: wrong[0]}
        claimed, real = layout.box(shape, coordinate), layout.kept(shape, coordinate)
        return [
            Problem(
                code="parallel.strided-uneven",
                what="FSDP over tensor parallelism leaves other rows than the DTensor says",
                where=f"{key} {list(shape)} at {layout.axes[place]} {wrong[0]}",
                expected=f"offsets {list(real[0])}, sizes {list(real[1])}, as FSDP keeps them",
                actual=f"offsets {list(claimed[0])}, sizes {list(claimed[1])}",
                cause="these degrees do not divide the rows, torch shards them in another order, "
                "and a checkpoint would hold rows in wrong places",
                fix="pad the dimension, or choose degrees that divide it",
            )
        ]
    return []


_LAYER = re.compile(r"layers\.(\d+)\.")


def stage_of_keys(keys: Iterable[str], stages: int) -> dict[str, int]:
    """The pipeline stage of every key: embedding first, head last, layers in between.

    As torchtitan's default does, embedding and head weigh as much as a layer each, and the first
    stages take what is left over.
    """
    keys = list(keys)
    if stages == 1:
        return dict.fromkeys(keys, 0)
    layers = sorted({int(m[1]) for key in keys if (m := _LAYER.match(key))})
    total = len(layers) + 2
    share, more = divmod(total, stages)
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + share + (stage < more))
    slot = {layer: place + 1 for place, layer in enumerate(layers)}
    out = {}
    for key in keys:
        if match := _LAYER.match(key):
            at = slot[int(match[1])]
        elif key.startswith("tok_embeddings."):
            at = 0
        else:
            at = total - 1
        out[key] = next(s for s in range(stages) if bounds[s] <= at < bounds[s + 1])
    return out
