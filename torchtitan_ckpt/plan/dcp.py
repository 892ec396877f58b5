"""The same plan by DCP's own planners, on meta tensors under torch's fake process group.

Every rank is played in turn: a fake group of the job's size, device meshes, DTensors with meta
shards, `DefaultSavePlanner.create_local_plan`; then the coordinator's global plan over all of them,
and for a load DCP's read items. Exact and slow: for small jobs, and to check `write` with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from torchtitan_ckpt.errors import ConfigError, Problem, list_keys
from torchtitan_ckpt.parallel import Meshes, ParallelDegrees, build_meshes
from torchtitan_ckpt.plan.state import Entry
from torchtitan_ckpt.plan.write import Written, with_owners


@dataclass(frozen=True, slots=True)
class DcpPlan:
    """The final plans of all ranks, and the metadata that would be written."""

    plans: list[SavePlan]
    metadata: Metadata


@contextmanager
def fake_rank(rank: int, degrees: ParallelDegrees) -> Iterator[Meshes]:
    """Be one rank of a job that does not exist: a fake process group, and meshes over it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError(
            Problem(
                code="plan.in-job",
                what="planning with DCP's planners needs a process without a process group",
                fix="plan outside of a running job",
            )
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=degrees.world_size)
    try:
        yield build_meshes(degrees)
    finally:
        dist.destroy_process_group()


def meta_state(entries: Sequence[Entry], rank: int, meshes: Meshes) -> dict[str, Any]:
    """What `rank` would hand to DCP, without data."""
    degrees = meshes.degrees
    stage = degrees.coordinate(rank)["pp"]
    state: dict[str, Any] = {}
    for entry in entries:
        if entry.stage not in (None, stage) or (entry.ranks and rank not in entry.ranks):
            continue
        if not entry.is_tensor:
            state[entry.key] = entry.nbytes
            continue
        dtype = getattr(torch, entry.dtype)
        if not entry.layout.axes:
            state[entry.key] = torch.empty(entry.shape, dtype=dtype, device="meta")
            continue
        state[entry.key] = _meta_dtensor(entry, dtype, meshes, degrees.coordinate(rank))
    return state


def _meta_dtensor(
    entry: Entry, dtype: torch.dtype, meshes: Meshes, coordinate: dict[str, int]
) -> Tensor:
    mesh = meshes.sparse if entry.layout.sparse else meshes.dense
    assert mesh is not None
    whole = torch.empty(entry.shape, dtype=dtype, device="meta")
    spec = DTensorSpec(
        mesh[entry.layout.axes],
        entry.layout.placements,
        tensor_meta=TensorMeta(whole.shape, whole.stride(), dtype),
    )
    _, sizes = entry.layout.box(entry.shape, coordinate)
    local = torch.empty(sizes, dtype=dtype, device="meta")
    build: Any = DTensor
    made: Tensor = build(local, spec, requires_grad=False)
    return made


def plan_with_dcp(
    entries: Sequence[Entry], degrees: ParallelDegrees, *, lowest_rank: bool = False
) -> DcpPlan:
    """Plan the save of `entries` as DCP does; raises what DCP raises."""
    local = []
    for rank in range(degrees.world_size):
        with fake_rank(rank, degrees) as meshes:
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest_rank)
            planner.set_up_planner(meta_state(entries, rank, meshes), is_coordinator=rank == 0)
            local.append(planner.create_local_plan())
    final = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest_rank)
    plans, metadata = final.create_global_plan(local)
    return DcpPlan(plans, metadata)


def plan_reads_with_dcp(
    metadata: Metadata, entries: Sequence[Entry], degrees: ParallelDegrees
) -> list[LoadPlan]:
    """The read items of every rank, by DCP's load planner."""
    out = []
    for rank in range(degrees.world_size):
        with fake_rank(rank, degrees) as meshes:
            state = {
                key: value
                for key, value in meta_state(entries, rank, meshes).items()
                if key in metadata.state_dict_metadata
            }
            planner = DefaultLoadPlanner()
            planner.set_up_planner(state, metadata, is_coordinator=rank == 0)
            out.append(planner.create_local_plan())
    return out


def owners_from_dcp(shortcut: Written) -> Written:
    """The same save with every item given to the rank that DCP's planners give it to.

    Raises `ConfigError` where DCP's plan has other boxes than the shortcut: then one is wrong.
    """
    degrees = shortcut.degrees
    real = plan_with_dcp(shortcut.entries, degrees)
    given: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, plan in enumerate(real.plans):
        for item in plan.items:
            given[item.index.fqn, tuple(item.index.offset or ())] = rank
    owners = []
    lost = []
    for entry, kind in zip(shortcut.entries, shortcut.kinds, strict=True):
        row = []
        for offsets, _ in kind.boxes:
            owner = given.pop((entry.key, offsets if entry.is_tensor else ()), None)
            if owner is None:
                lost.append(entry.key)
            row.append(-1 if owner is None else owner)
        owners.append(row)
    if lost or given:
        raise ConfigError(
            Problem(
                code="plan.differs",
                what="DCP plans other boxes than expected: "
                f"{list_keys([*lost, *(key for key, _ in given)])}",
                cause="a torch whose sharding this version does not know",
                fix="report it, with the command line and torch's version",
            )
        )
    return with_owners(shortcut, owners)
