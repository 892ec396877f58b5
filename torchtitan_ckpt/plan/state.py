"""What a job saves, as a list without data: tensors with their layouts, objects with their sizes.

The order of the list is that of the saved dict, because DCP's choice between replicas depends on
it. Whoever has real tensors can list those instead (`entries_of`). Nothing is planned here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_ckpt.errors import Problem, list_keys
from torchtitan_ckpt.manifest import ITEM_SIZE, TensorEntry
from torchtitan_ckpt.parallel import ParallelDegrees
from torchtitan_ckpt.placement import (
    Layout,
    Split,
    layout_of,
    layout_problems,
    split_of,
    stage_of_keys,
)
from torchtitan_ckpt.plan.items import object_item_bytes
from torchtitan_ckpt.state import rng

PLAIN = Layout(False, (), (), ())
# What torch.optim.AdamW keeps of each group beside the learning rate; the values only need the
# right size on disk.
ADAMW_GROUP: Mapping[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "foreach": False,
    "capturable": False,
    "differentiable": False,
    "fused": False,
    "decoupled_weight_decay": True,
    "initial_lr": 1e-3,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the saved dict. An object has `dtype=""` and its stored size in `nbytes`.

    `stage` is the pipeline stage that holds it, or None for all; `ranks` narrows that further.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    stage: int | None = None
    ranks: tuple[int, ...] | None = None
    nbytes: int = 0

    @property
    def is_tensor(self) -> bool:
        return bool(self.dtype)


def rank_stage(degrees: ParallelDegrees, stage: int) -> int:
    """The pipeline rank that runs a stage: chunks go round the ranks."""
    return stage % degrees.pp


def model_entries(
    native: Mapping[str, TensorEntry], degrees: ParallelDegrees, *, chunks: int = 1
) -> list[Entry]:
    """The model's tensors, from a native manifest."""
    stages = stage_of_keys(native, degrees.pp * chunks)
    return [
        Entry(
            key,
            tensor.shape,
            tensor.dtype,
            _layout(key, tensor, degrees),
            rank_stage(degrees, stages[key]),
        )
        for key, tensor in native.items()
    ]


def _layout(key: str, tensor: TensorEntry, degrees: ParallelDegrees) -> Layout:
    split = split_of(key)
    if not tensor.dtype.startswith(("float", "bfloat")):
        split = Split.BUFFER
    return layout_of(split, tensor.shape, degrees)


def adamw_entries(
    model: Iterable[Entry], group: Mapping[str, Any] | None = None
) -> Iterator[Entry]:
    """The state of an AdamW over the model's parameters: its moments are sharded as they are."""
    sizes = {name: object_item_bytes(v) for name, v in (group or ADAMW_GROUP).items()}
    for entry in model:
        if not entry.layout.axes and split_of(entry.key) is Split.BUFFER:
            continue
        base = f"optimizer.state.{entry.key}"
        yield Entry(f"{base}.step", (), "float32", PLAIN, entry.stage)
        for moment in ("exp_avg", "exp_avg_sq"):
            yield Entry(f"{base}.{moment}", entry.shape, entry.dtype, entry.layout, entry.stage)
        for name, size in sizes.items():
            key = f"optimizer.param_groups.{entry.key}.{name}"
            yield Entry(key, (), "", PLAIN, entry.stage, nbytes=size)


def trainer_entries(degrees: ParallelDegrees) -> Iterator[Entry]:
    """Scheduler, data loaders (one a data-parallel rank), the trainer's counters, generators."""
    yield Entry("lr_scheduler.last_epoch", (), "", PLAIN, nbytes=object_item_bytes(1))
    loaders: dict[int, list[int]] = {}
    for rank in range(degrees.world_size):
        at = degrees.coordinate(rank)
        share = at["dp_replicate"] * degrees.dp_shard + at["fsdp"] // degrees.cp
        loaders.setdefault(share, []).append(rank)
    size = object_item_bytes(bytes(64))
    for share, ranks in sorted(loaders.items()):
        key = f"dataloader.dp_rank_{share}"
        yield Entry(key, (), "", PLAIN, ranks=tuple(ranks), nbytes=size)
    yield Entry("dataloader.world_size", (), "", PLAIN, nbytes=object_item_bytes(len(loaders)))
    yield Entry("train_state.step", (), "int64", PLAIN)
    size = object_item_bytes(rng.RngState().state_dict()["state"])
    for rank in range(degrees.world_size):
        key = f"{rng.PREFIX}rank_{rank}.state"
        yield Entry(key, (), "", PLAIN, ranks=(rank,), nbytes=size)
    key = f"{rng.PREFIX}world_size"
    yield Entry(key, (), "", PLAIN, nbytes=object_item_bytes(degrees.world_size))


def full_entries(
    native: Mapping[str, TensorEntry],
    degrees: ParallelDegrees,
    *,
    chunks: int = 1,
    optimizer: bool = True,
    group: Mapping[str, Any] | None = None,
) -> list[Entry]:
    """Everything a full checkpoint holds, or with `optimizer=False` a model-only one.

    `group` holds the optimizer's hyperparameters; by default those that torchtitan's AdamW has.
    """
    model = model_entries(native, degrees, chunks=chunks)
    if not optimizer:
        return model
    return [*model, *adamw_entries(model, group), *trainer_entries(degrees)]


def layout_faults(
    native: Mapping[str, TensorEntry], degrees: ParallelDegrees, *, chunks: int = 1
) -> list[Problem]:
    """What these degrees do to this model that torch refuses, one problem a kind of fault."""
    return [*_stage_faults(native, degrees, chunks), *_split_faults(native, degrees)]


def _stage_faults(
    native: Mapping[str, TensorEntry], degrees: ParallelDegrees, chunks: int
) -> list[Problem]:
    stages = degrees.pp * chunks
    held = set(stage_of_keys(native, stages).values())
    if len(held) == stages:
        return []
    empty = [str(stage) for stage in range(stages) if stage not in held]
    return [
        Problem(
            code="parallel.empty-stage",
            what=f"pipeline stages without a layer: {', '.join(empty)}",
            expected=f"at most {len(held)} stages; the embedding and the head count as layers",
            actual=f"{degrees.pp} ranks x {chunks} a rank = {stages}",
            cause="torch makes no optimizer over a stage without parameters",
            fix="lower pipeline_parallel_degree, or the stages of a rank",
        )
    ]


def _split_faults(native: Mapping[str, TensorEntry], degrees: ParallelDegrees) -> list[Problem]:
    found: dict[tuple[str, str, str, str], list[str]] = {}
    first: dict[tuple[str, str, str, str], Problem] = {}
    seen: dict[tuple[Split, tuple[int, ...]], list[Problem]] = {}
    for key, tensor in native.items():
        split = split_of(key)
        kind = (split, tensor.shape)
        if kind not in seen:
            seen[kind] = layout_problems(key, split, tensor.shape, degrees)
        for problem in seen[kind]:
            mark = (problem.code, problem.what, problem.expected, problem.actual)
            found.setdefault(mark, []).append(key)
            first.setdefault(mark, problem)
    return [
        Problem(
            code=problem.code,
            what=f"{problem.what}: {list_keys(found[mark])}",
            where=problem.where,
            expected=problem.expected,
            actual=problem.actual,
            cause=problem.cause,
            fix=problem.fix,
        )
        for mark, problem in first.items()
    ]


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Payload bytes of a box."""
    size = ITEM_SIZE[dtype]
    for n in shape:
        size *= n
    return size
