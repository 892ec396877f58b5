"""Tests that want an accelerator: an NPU, real or simulated, or a CUDA device.

`scripts/test_npu_sim.sh` runs all of them on the simulated Ascend device; `scripts/on_device.sh`
runs those that say nothing about the simulator on real hardware. Where the CPU is asked for by
name, they are rehearsed on it, so that a fault of Python, torch or a missing package is found
before a device is at hand. Anywhere else they are skipped with the reason, which is never counted
as passed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.ranks import RankPool
from torchtitan_ckpt import device
from torchtitan_ckpt.errors import CheckpointError

HERE = Path(__file__).parent


def _missing() -> str:
    try:
        found = device.current()
    except CheckpointError as error:
        return error.problems[0].what
    if found.kind is device.DeviceKind.CPU and not os.environ.get(device.ENV):
        return "no accelerator here; scripts/test_npu_sim.sh runs this on a simulated one"
    return ""


def _none_for(item: pytest.Item) -> str:
    """Why there is no device for this test, though there is one for the others."""
    found = device.current()
    if item.get_closest_marker("simulator_only") and not found.simulated:
        return "about the simulator, and this device is not simulated"
    if item.get_closest_marker("needs_device") and found.kind is device.DeviceKind.CPU:
        return "about an accelerator, and this is a rehearsal on the CPU"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    if not mine:
        return
    missing = _missing()
    for item in mine:
        if reason := missing or _none_for(item):
            item.add_marker(pytest.mark.skip(reason=reason))
        # The one mark by which the script asks for this chapter.
        item.add_marker(pytest.mark.needs_npu_sim)


def pytest_report_header() -> str:
    missing = _missing()
    return f"device: {missing or device.current().describe()}"


class Ranks(RankPool):
    """A pool that skips what wants more ranks than there are devices.

    With `lazy` asynchronous work runs only when something waits for it; real hardware has no such
    mode.
    """

    def __init__(self, most: int, *, lazy: bool = False) -> None:
        found = device.current()
        size = most if found.shared else min(most, found.count)
        super().__init__(size, backend=found.backend, start_method="spawn")
        self.lazy = lazy

    def run(self, fn: Callable[..., Any], n: int, *args: Any, **options: Any) -> list[Any]:
        if n > self.size:
            pytest.skip(f"wants {n} devices, and here are {self.size}")
        # Ranks read it when they start, which may be at any call: the pool replaces some.
        with pytest.MonkeyPatch.context() as patch:
            if self.lazy:
                patch.setenv("NPUSIM_LAZY", "1")
            return super().run(fn, n, *args, **options)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to four ranks, each with a device of its own or, where asked for, sharing one."""
    with Ranks(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def lazy_ranks() -> Iterator[RankPool]:
    """Two ranks in lazy mode; on real hardware these are ordinary ranks."""
    with Ranks(2, lazy=True) as pool:
        yield pool
