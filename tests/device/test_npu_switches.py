"""The simulator's switches for a person at work: `NPUSIM_TRACE` names calls, `NPUSIM_ABORT` stops.

Both are read once by a process, so each test starts one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.simulator_only

UNKNOWN = """
import torch
x = torch.ones(3, device="npu")
try:
    torch.sort(x)
except RuntimeError:
    print("refused")
print(int(x.sum()))
"""


def run(code: str, **switches: str) -> subprocess.CompletedProcess[str]:
    """A fresh process on the simulated device, with these switches and no others."""
    quiet = {"NPUSIM_TRACE": "0", "NPUSIM_ABORT": "0"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **quiet, **switches},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_without_abort_a_refusal_is_an_error_and_the_process_goes_on() -> None:
    done = run(UNKNOWN)
    assert done.stdout.split() == ["refused", "3"]
    assert done.returncode == 0


def test_abort_stops_at_the_first_call_that_is_not_simulated_and_names_it() -> None:
    done = run(UNKNOWN, NPUSIM_ABORT="1")
    assert done.returncode == -signal.SIGABRT
    assert done.stdout == ""
    assert "operator Sort is not simulated" in done.stderr


def test_abort_lets_what_is_simulated_pass() -> None:
    done = run("import torch; print(int(torch.ones(3, device='npu').sum()))", NPUSIM_ABORT="1")
    assert (done.returncode, done.stdout.split()) == (0, ["3"])


def test_trace_names_each_call_and_changes_nothing() -> None:
    code = "import torch; print(int(torch.ones(3, device='npu').sum()))"
    quiet, traced = run(code), run(code, NPUSIM_TRACE="1")
    assert quiet.stdout == traced.stdout
    assert "aclrtMalloc" not in quiet.stderr
    for call in ("aclrtMalloc", "aclnnInplaceOne", "aclnnReduceSum", "aclrtMemcpy"):
        assert call in traced.stderr, traced.stderr[-2000:]
