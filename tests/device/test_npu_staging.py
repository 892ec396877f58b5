"""Copies to the host for background saves: whose are pinned, and whose survive a missing wait.

The jobs run in lazy mode, where a copy that nobody waits for has not happened.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from conformance.ranks import RankPool
from torchtitan_ckpt import device
from torchtitan_ckpt.state.staging import Stager

N = 5000


# ------------------------------------------------------------------ pinned memory


@pytest.mark.skipif(device.why_not(device.DeviceKind.NPU) is not None, reason="about torch_npu")
def test_torchs_stager_drops_pinned_memory_on_an_npu_without_an_error():
    options = StagingOptions(
        use_pinned_memory=True,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    staged = DefaultStager(options).stage({"x": torch.ones(N, device="npu")})
    assert isinstance(staged, dict)
    assert not staged["x"].is_pinned(), "news: torch pins on NPUs now"
    assert torch.empty(N, pin_memory=True).is_pinned(), "though the allocator can"


@pytest.mark.parametrize("pin", [pytest.param(True, marks=pytest.mark.needs_device), False])
def test_our_stager_pins_when_asked(pin: bool):
    stager = Stager(pin=pin)
    where = device.current().at()
    staged = stager.snapshot({"x": torch.ones(N, device=where), "host": torch.ones(3)})
    assert staged["x"].is_pinned() is pin
    stager.close()


@pytest.mark.simulator_only
def test_pinned_buffers_are_used_again_and_given_back():
    from conformance.ascend_sim import probe

    stager = Stager(pin=True)
    big = torch.ones(3 << 20, device="npu")
    before = probe.pinned_bytes()
    first = stager.snapshot({"x": big})["x"]
    after_one = probe.pinned_bytes()
    assert after_one - before >= 12 << 20
    second = stager.snapshot({"x": big})["x"]
    assert second.data_ptr() == first.data_ptr()
    assert probe.pinned_bytes() == after_one


# ------------------------------------------------------------------ snapshots


def _snapshot(pin: bool, side: bool) -> list[str]:
    """What is wrong with a snapshot whose originals are overwritten after `wait`."""
    found = device.current()
    where = found.select(0)
    stager = Stager(pin=pin, device=found if side else None)
    wrong = []
    for turn in range(2):  # the second uses the buffers again
        live = torch.arange(N, dtype=torch.float32, device=where) + turn
        flat: dict[str, Any] = {
            "live": live,
            "strided": live.view(50, 100).t(),
            "half": live.to(torch.bfloat16),  # made for this dict: it dies with it
            "plain": {"step": turn},
        }
        staged = stager.snapshot(flat)
        del flat
        if not side:
            live.zero_()  # the copy is complete when the call returns
        # What the allocator may hand out again, filled with something else.
        filler = [torch.full((N,), -1.0, dtype=torch.bfloat16, device=where) for _ in range(8)]
        found.current_stream().synchronize()  # that runs; the stager's stream has not moved yet
        stager.wait()
        live.zero_()
        found.synchronize()
        del filler
        expected = torch.arange(N, dtype=torch.float32) + turn
        if not torch.equal(staged["live"], expected):
            wrong.append(f"live, turn {turn}")
        if not torch.equal(staged["strided"], expected.view(50, 100).t()):
            wrong.append(f"strided, turn {turn}")
        if not torch.equal(staged["half"], expected.to(torch.bfloat16)):
            wrong.append(f"half, turn {turn}")
        if staged["plain"] != {"step": turn}:
            wrong.append(f"plain, turn {turn}")
    stager.close()
    return wrong


@pytest.mark.parametrize("side", [False, True], ids=["same stream", "stream of its own"])
@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
def test_a_snapshot_is_what_was_when_it_was_taken(lazy_ranks: RankPool, pin: bool, side: bool):
    assert lazy_ranks.run(_snapshot, 1, pin, side) == [[]]


def _without_wait() -> bool:
    found = device.current()
    where = found.select(0)
    live = torch.ones(N, device=where)
    found.synchronize()
    stager = Stager(pin=True, device=found)
    staged = stager.snapshot({"x": live})
    early = bool((staged["x"] == 1).all())
    stager.close()
    return early or not bool((staged["x"] == 1).all())


@pytest.mark.simulator_only
def test_lazy_mode_would_see_a_missing_wait(lazy_ranks: RankPool):
    assert lazy_ranks.run(_without_wait, 1) == [False]
