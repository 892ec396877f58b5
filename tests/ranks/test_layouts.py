"""What `placement` says of each tensor is what torch's own sharding makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from conformance.degrees import CASES, Case
from conformance.jobs import Job, small_table, truth
from conformance.ranks import RankPool
from conformance.reference import Leaf
from torchtitan_ckpt.parallel import ParallelDegrees
from torchtitan_ckpt.placement import layout_of, layout_problems, split_of


def observe(case: Case, table: dict[str, Leaf]) -> dict[str, Any]:
    """Of every parameter: mesh axes, placements, the box DCP would write, the local shape."""
    job = Job.start(table, case.degrees, chunks=case.chunks)
    out = {}
    for key, value in job.state("model").items():
        if isinstance(value, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(
                value.shape, value.device_mesh, value.placements
            )
            axes = tuple(value.device_mesh.mesh_dim_names or ())
            local = tuple(value.to_local().shape)
            out[key] = (axes, tuple(map(str, value.placements)), tuple(offsets), sizes, local)
        else:
            out[key] = ((), (), (0,) * value.ndim, tuple(value.shape), tuple(value.shape))
    return out


def predict(case: Case, table: dict[str, Leaf], rank: int) -> dict[str, Any]:
    out = {}
    for key, leaf in table.items():
        layout = layout_of(split_of(key), leaf.shape, case.degrees)
        offsets, sizes = layout.box(leaf.shape, case.degrees.coordinate(rank))
        names = tuple(map(str, layout.placements))
        out[key] = (layout.axes, names, offsets, sizes, sizes)
        assert not layout_problems(key, split_of(key), leaf.shape, case.degrees)
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_predicted_layout_is_torchs(pool: RankPool, case: Case) -> None:
    table = small_table()
    for rank, seen in enumerate(pool.run(observe, case.ranks, case, table)):
        expected = predict(case, table, rank)
        assert seen.keys() <= expected.keys()
        for key, value in seen.items():
            assert value == expected[key], (rank, key)


def train_and_gather(case: Case, table: dict[str, Leaf]) -> list[str]:
    job = Job.start(table, case.degrees, chunks=case.chunks)
    job.train(2)
    expected = truth(table, 2)
    state = job.state("model", "optimizer")
    bad = job.differences(expected, state)
    for key, value in state.items():
        # An independent way to the whole tensor: torch's own gathering.
        if isinstance(value, DTensor) and not value.full_tensor().equal(expected[key]):
            bad.append(f"{key}: gathered")
    return bad


GATHERED = ("fsdp2 x tp2", "fsdp8 x ep2", "fsdp2 x tp2 x ep2 x etp2")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in GATHERED], ids=lambda c: c.name)
def test_a_split_job_trains_as_an_unsplit_one(pool: RankPool, case: Case) -> None:
    assert pool.run(train_and_gather, case.ranks, case, small_table()) == [[]] * case.ranks


def strided(table: dict[str, Leaf]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the shape FSDP keeps, the shape DTensor claims) of one tensor on this rank."""
    job = Job.start(table, ParallelDegrees(dp_shard=4, tp=2))
    (value,) = [v for v in job.state("model").values() if isinstance(v, DTensor)]
    claimed, _ = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return tuple(value.to_local().shape), claimed


def test_rows_that_torchs_strided_shard_misplaces_are_refused_by_name(pool: RankPool) -> None:
    """17 rows over tensor parallelism 2, then FSDP 4: torch keeps other rows than it says."""
    key, leaf = "layers.0.attention.wq.weight", Leaf((17, 4))
    seen = pool.run(strided, 8, {key: leaf})
    assert any(kept != claimed for kept, claimed in seen)
    (problem,) = layout_problems(key, split_of(key), leaf.shape, ParallelDegrees(dp_shard=4, tp=2))
    assert problem.code == "parallel.strided-uneven"
    assert key in problem.where
