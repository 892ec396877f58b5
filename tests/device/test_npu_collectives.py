"""Collectives between devices, on any accelerator; what only the simulator can show is marked."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from conformance.ranks import RankPool, RanksFailed
from torchtitan_ckpt import device

pytestmark = [
    pytest.mark.needs_device,
    pytest.mark.skipif(
        not device.why_not(device.DeviceKind.CUDA) and device.current().shared,
        reason="ranks that share a device talk over gloo, which is not what this is about",
    ),
]


def _here() -> tuple[int, int, torch.device]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return rank, world, device.current().select(rank)


def _all_collectives(dtype: torch.dtype) -> None:
    rank, world, where = _here()

    def row(r: int, width: int) -> torch.Tensor:
        """What rank r holds: exact in every type, different at each place."""
        return (torch.arange(width) + 16 * r).to(dtype)

    mine = row(rank, 5)
    x = mine.to(where)
    dist.all_reduce(x)
    assert torch.equal(x.cpu(), sum(row(r, 5) for r in range(world)).to(dtype)), "all-reduce"
    x = mine.to(where)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    assert torch.equal(x.cpu(), row(world - 1, 5)), "all-reduce max"
    x = mine.to(where)
    dist.broadcast(x, src=world - 1)
    assert torch.equal(x.cpu(), row(world - 1, 5)), "broadcast"
    out = torch.empty(5 * world, dtype=dtype, device=where)
    dist.all_gather_into_tensor(out, mine.to(where))
    assert torch.equal(out.cpu(), torch.cat([row(r, 5) for r in range(world)])), "all-gather"
    x = mine.to(where)
    dist.reduce(x, dst=1)
    if rank == 1:
        assert torch.equal(x.cpu(), sum(row(r, 5) for r in range(world)).to(dtype)), "reduce"
    part = torch.empty(5, dtype=dtype, device=where)
    dist.scatter(part, [row(r, 5).to(where) for r in range(world)] if rank == 1 else None, src=1)
    assert torch.equal(part.cpu(), mine), "scatter"
    whole = row(rank, 3 * world).to(where)
    part = torch.empty(3, dtype=dtype, device=where)
    dist.reduce_scatter_tensor(part, whole)
    want = sum(row(r, 3 * world)[3 * rank : 3 * rank + 3] for r in range(world))
    assert torch.equal(part.cpu(), want.to(dtype)), "reduce-scatter"
    out = torch.empty(3 * world, dtype=dtype, device=where)
    dist.all_to_all_single(out, whole)
    want = torch.cat([row(r, 3 * world)[3 * rank : 3 * rank + 3] for r in range(world)])
    assert torch.equal(out.cpu(), want), "all-to-all"
    dist.barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_collectives(ranks: RankPool, dtype: torch.dtype):
    ranks.run(_all_collectives, max(2, ranks.size), dtype)


def _uneven() -> None:
    rank, world, where = _here()
    # Rank r sends r + c + 1 numbers to rank c.
    sends = [rank + c + 1 for c in range(world)]
    x = torch.arange(sum(sends), dtype=torch.float32, device=where) + 1000 * rank
    out = torch.empty(sum(sends), device=where)  # symmetric: as many come as go
    dist.all_to_all_single(out, x, output_split_sizes=sends, input_split_sizes=sends)
    want = []
    for r in range(world):
        start = sum(r + c + 1 for c in range(rank))
        want += [1000.0 * r + start + i for i in range(r + rank + 1)]
    assert out.tolist() == want


def test_all_to_all_with_uneven_parts(ranks: RankPool):
    ranks.run(_uneven, max(2, ranks.size))


def _send_and_receive(count: int) -> None:
    rank, world, where = _here()
    x = torch.arange(count, dtype=torch.float32, device=where) + rank
    got = torch.empty(count, device=where)
    after, before = (rank + 1) % world, (rank - 1) % world
    second, got_second = x + 0.5, torch.empty(count, device=where)
    ops = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, got, before)]
    # A second one between the same two: it must not mix with the first.
    ops += [dist.P2POp(dist.isend, second, after), dist.P2POp(dist.irecv, got_second, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    want = torch.arange(count, dtype=torch.float32) + before
    assert torch.equal(got.cpu(), want)
    assert torch.equal(got_second.cpu(), want + 0.5)
    # One after the other, the way a pipeline does.
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(got, 0)
        assert torch.equal(got.cpu(), torch.arange(count, dtype=torch.float32))


# The second is larger than what a backend may keep in buffers of its own.
@pytest.mark.parametrize("count", [7, 1_500_001])
def test_send_and_receive(ranks: RankPool, count: int):
    ranks.run(_send_and_receive, max(2, min(3, ranks.size)), count)


def _objects_and_groups() -> None:
    rank, world, where = _here()
    got: list[object] = [None] * world
    dist.all_gather_object(got, {"rank": rank})
    assert got == [{"rank": r} for r in range(world)]
    pairs = [dist.new_group([r, r + 1]) for r in range(0, world - 1, 2)]
    x = torch.full((2,), float(rank), device=where)
    dist.all_reduce(x, group=pairs[rank // 2])
    assert x.tolist() == [float(rank // 2 * 4 + 1)] * 2


def test_objects_travel_over_gloo_and_groups_have_their_own_channels(ranks: RankPool):
    ranks.run(_objects_and_groups, 4)


# ------------------------------------------------------------------ what goes wrong


def _mismatch() -> None:
    rank, _, where = _here()
    dist.all_reduce(torch.ones(2, device=where))
    if rank == 0:
        dist.all_reduce(torch.ones(8, device=where))
    else:
        out = torch.empty(8, device=where)
        dist.all_gather_into_tensor(out, torch.ones(4, device=where))
    device.current().synchronize()


@pytest.mark.simulator_only
def test_ranks_that_disagree_are_told(ranks: RankPool):
    with pytest.raises(RanksFailed) as caught:
        ranks.run(_mismatch, 2, timeout=30)
    text = str(caught.value)
    assert "runs HcclAllReduce (32 bytes), but rank 1 runs HcclAllGather (16 bytes)" in text or (
        "runs HcclAllGather (16 bytes), but rank 0 runs HcclAllReduce (32 bytes)" in text
    )


def _failing_collective() -> str:
    from conformance.ascend_sim import probe

    where = _here()[2]
    x = torch.ones(2, device=where)
    dist.all_reduce(x)
    device.current().synchronize()
    with probe.fault("HcclAllReduce", 1, 9):
        try:
            dist.all_reduce(x)
            device.current().synchronize()
        except RuntimeError as error:
            problem = device.explain_runtime_error(error)
            return problem.what if problem else f"not explained: {error}"
    return "no error"


@pytest.mark.simulator_only
def test_a_collective_can_be_made_to_fail(ranks: RankPool):
    for text in ranks.run(_failing_collective, 2):
        assert "HCCL" in text.upper() or "Hccl" in text, text
