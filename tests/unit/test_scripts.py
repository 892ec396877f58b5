"""The scripts that run the suite: budgets that hold, and a chapter that cannot run says why."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`scripts/run_tests.py` as a module."""
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPTS / "run_tests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_tests", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("chapter", "share", "fails"),
    [("unit", 1.4, False), ("unit", 1.6, True), ("npu-sim", 0.99, False), ("npu-sim", 1.01, True)],
)
def test_an_overrun_fails(
    runner: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    chapter: str,
    share: float,
    fails: bool,
) -> None:
    """The simulated device's eight minutes are a limit; the others may be overrun by half."""
    budgets = {each.name: each.budget for each in runner.CHAPTERS}
    budgets["npu-sim"] = runner.DEVICE_BUDGET
    assert budgets["npu-sim"] == 8 * 60
    clock = iter([0.0, share * budgets[chapter]])
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(runner.subprocess, "Popen", lambda *_, **__: Passing())
    monkeypatch.setattr(runner.sys, "argv", ["run_tests.py", "--only", chapter])
    assert runner.main() == fails
    assert ("OVERRUN" in capsys.readouterr().out) == fails


class Passing:
    """A process that pytest would have been."""

    stdout = ("1 passed in 0.01s\n",)

    def wait(self) -> int:
        return 0


def test_without_a_compiler_the_simulated_device_is_not_run_and_says_why() -> None:
    done = subprocess.run(
        ["bash", str(SCRIPTS / "test_npu_sim.sh")],
        env={**os.environ, "CXX": "/no/such"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0
    said = "not run: the device chapter on the simulated Ascend device: there is no g++"
    assert done.stdout.strip() == said
    assert "passed" not in done.stdout
