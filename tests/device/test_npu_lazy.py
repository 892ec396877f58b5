"""Lazy mode: a missing wait gives wrong data every time, and a right one gives right data.

The jobs run in rank processes in which asynchronous work waits until something asks for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.ranks import RankPool
from torchtitan_ckpt import device

pytestmark = pytest.mark.simulator_only

N = 1000
GARBAGE = 0xA5


def _to_host_without_and_with_a_wait() -> tuple[bool, bool]:
    device.current().select(0)
    x = torch.arange(N, dtype=torch.int32, device="npu")
    host = device.current().host_empty((N,), torch.int32)
    host.copy_(x, non_blocking=True)
    garbage = bool((host.view(torch.uint8) == GARBAGE).all())
    torch.npu.synchronize()
    return garbage, torch.equal(host, torch.arange(N, dtype=torch.int32))


def test_a_copy_to_the_host_has_not_happened_before_the_wait(lazy_ranks: RankPool):
    assert lazy_ranks.run(_to_host_without_and_with_a_wait, 1) == [(True, True)]


def _snapshot(ordered: bool) -> bool:
    """Whether a snapshot on a side stream survives that the original is overwritten."""
    found = device.current()
    found.select(0)
    x = torch.full((N,), 7.0, device="npu")
    found.synchronize()
    host = found.host_empty((N,), torch.float32)
    side = found.stream()
    side.wait_stream(found.current_stream())
    with found.use(side):
        host.copy_(x, non_blocking=True)
    if ordered:
        found.current_stream().wait_stream(side)
    x.zero_()
    found.current_stream().synchronize()
    side.synchronize()
    return bool((host == 7.0).all())


def test_a_snapshot_needs_the_order_of_streams(lazy_ranks: RankPool):
    assert lazy_ranks.run(_snapshot, 1, True) == [True]
    assert lazy_ranks.run(_snapshot, 1, False) == [False]


def _to_the_device_and_back() -> tuple[bool, bool]:
    """A host tensor is copied in, and out again before anything has run: streams keep the order."""
    found = device.current()
    found.select(0)
    host = found.host_empty((N,), torch.float32).fill_(7.0)
    x = torch.empty(N, device="npu")
    for _ in range(2):
        x.copy_(host, non_blocking=True)
        x.add_(1.0)
        host.copy_(x, non_blocking=True)
    found.synchronize()
    right = bool((host == 9.0).all())
    host.copy_(x, non_blocking=True)  # nothing is left that has to read the host's old bytes
    garbage = bool((host.view(torch.uint8) == GARBAGE).all())
    found.synchronize()
    return right, garbage


def test_a_copy_out_keeps_what_an_earlier_copy_in_has_yet_to_read(lazy_ranks: RankPool):
    assert lazy_ranks.run(_to_the_device_and_back, 1) == [(True, True)]


def _event() -> tuple[bool, bool, bool]:
    found = device.current()
    found.select(0)
    x = torch.full((N,), 3.0, device="npu")
    host = found.host_empty((N,), torch.float32)
    host.copy_(x, non_blocking=True)
    event = found.current_stream().record_event()
    before = bool((host == 3.0).any())
    first_answer = event.query()
    event.synchronize()
    return before, first_answer, bool((host == 3.0).all())


def test_an_event_is_waited_for(lazy_ranks: RankPool):
    assert lazy_ranks.run(_event, 1) == [(False, False, True)]


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _waits_inside_a_mode() -> tuple[list[str], bool]:
    found = device.current()
    found.select(0)
    x = torch.ones(N, device="npu").add_(1)
    with _Watch() as mode:
        found.synchronize()
    return mode.seen, x.tolist() == [2.0] * N


def test_what_the_device_does_is_hidden_from_the_modes_of_whoever_waits(lazy_ranks: RankPool):
    assert lazy_ranks.run(_waits_inside_a_mode, 1) == [([], True)]


def _polled() -> int:
    found = device.current()
    found.select(0)
    torch.ones(N, device="npu").add_(1)
    event = found.current_stream().record_event()
    for count in range(1, 20):
        if event.query():
            return count
    return 0


def test_somebody_who_keeps_asking_gets_an_answer(lazy_ranks: RankPool):
    assert 1 < lazy_ranks.run(_polled, 1)[0] < 10


def _gathered() -> tuple[bool, bool]:
    import torch.distributed as dist

    rank = dist.get_rank()
    device.current().select(rank)
    mine = torch.full((5,), float(rank), device="npu")
    out = torch.full((10,), -1.0, device="npu")
    work = dist.all_gather_into_tensor(out, mine, async_op=True)
    host = device.current().host_empty((10,), torch.float32)
    work.wait()  # orders the streams; the host has not waited yet
    host.copy_(out, non_blocking=True)
    early = bool((host.view(torch.uint8) == GARBAGE).all())
    torch.npu.synchronize()
    return early, host.tolist() == [0.0] * 5 + [1.0] * 5


def test_a_collective_runs_when_it_is_waited_for(lazy_ranks: RankPool):
    assert lazy_ranks.run(_gathered, 2) == [(True, True)] * 2


def _peer_waits_for_a_rank_that_does_not() -> float:
    """Rank 0 waits for a collective that rank 1 has only submitted; hardware would complete it."""
    import time

    import torch.distributed as dist

    rank = dist.get_rank()
    device.current().select(rank)
    x = torch.full((3,), float(rank + 1), device="npu")
    dist.all_reduce(x)
    begin = time.monotonic()
    if rank == 0:
        torch.npu.synchronize()
        assert x.tolist() == [3.0] * 3
    dist.barrier(dist.new_group(backend="gloo"))
    return time.monotonic() - begin


def test_a_collective_completes_though_one_rank_never_waits(lazy_ranks: RankPool):
    assert max(lazy_ranks.run(_peer_waits_for_a_rank_that_does_not, 2, timeout=60)) < 20
