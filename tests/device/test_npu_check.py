"""The contract on a device: tensors of conversions and files really lie there, reports say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance import Report, Subject, check
from tests.specimens import right
from tests.specimens.edited import Edited
from torchtitan_ckpt import device

ROOT = Path(__file__).parents[2]


class Watching(right.Right):
    """The right adapter; notes on which devices the tensors lie that it is given."""

    seen: set[str] = set()  # noqa: RUF012 - one note for all instances

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.seen |= _devices(state_dict)
        return super().to_hf(state_dict)

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        self.seen |= _devices(hf_state_dict)
        return super().from_hf(hf_state_dict)


class Stuck(right.Right):
    """Leaves one tensor on the CPU, where the others are not."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        out = super().to_hf(state_dict)
        key = next(key for key, value in out.items() if value.dim())
        if out[key].device.type not in ("meta", "cpu"):
            out[key] = torch.cat([out[key][:1], out[key][1:].cpu()])
        return out


class OnTheDevice(Edited):
    """The right manager, if what it saves lies on the device; else it raises."""

    def save(self, step: int, last_step: bool = False) -> Any:
        held = [v for part in self.job["model_parts"] for v in part.state_dict().values()]
        for _, parameter, optimizer in self.parameters():
            held += [v for v in optimizer.state[parameter].values() if v.dim()]
        if {v.device.type for v in held} != {device.current().kind.value}:
            raise RuntimeError("some of it lies elsewhere")
        return self.inner.save(step, last_step)


class Cold(Edited):
    """Loses a moment on its way to the device, and only there."""

    def loaded(self) -> None:
        for _, parameter, optimizer in self.parameters():
            if parameter.device.type != "cpu":
                optimizer.state[parameter]["exp_avg"].zero_()


def _devices(state: dict[str, Any]) -> set[str]:
    """Where tensors lie. Stacks that are numbered without memory are about names, and stay put."""
    tensors = [v for v in state.values() if isinstance(v, torch.Tensor) and 0 not in v.stride()]
    return {str(v.device) for v in tensors} - {"meta"}


def _checked(adapter: Any, *globs: str) -> Report:
    subject = Subject("watched", adapter=adapter, native=right.native())
    return check(subject, checks=globs, device=device.current().kind.value)


def test_tensors_of_the_checks_lie_on_the_device() -> None:
    Watching.seen.clear()
    report = _checked(Watching, "values.*", "purity.*", "files.re*")
    assert Watching.seen == {str(device.current().at(0))}
    assert report.ok, report.text()
    assert report.counts["pass"] >= 12
    assert report.device == device.current().label


COLD = pytest.param(Cold, "fail", marks=pytest.mark.needs_device)


@pytest.mark.parametrize(("manager", "verdict"), [(OnTheDevice, "pass"), COLD])
def test_the_jobs_of_managers_lie_on_the_device(manager: Any, verdict: str) -> None:
    subject = Subject("noted", manager=manager, degrees=["1"])
    report = check(subject, checks=["reshard.full"], device=device.current().kind.value)
    assert [cell.verdict for cell in report.cells] == [verdict], report.text()
    assert report.device == device.current().label


@pytest.mark.needs_device
def test_what_fails_only_on_a_device_is_found() -> None:
    report = _checked(Stuck, "purity.order")
    assert report.exit_code == 1
    assert "to_hf raised RuntimeError" in report.text()


@pytest.mark.simulator_only
def test_the_command_line_starts_again_on_the_simulated_device(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != device.ENV}
    words = [*("check", "qwen3", "--device", "npu-sim", "--check", "values.native-round-trip")]
    words += ["--check", "keys.total", f"--html={tmp_path / 'r.html'}"]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_ckpt", *words],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 cells (1 subject x 2 checks, npu-simulated): 2 pass" in done.stdout
    assert done.stdout.rstrip().endswith(device.SIMULATED)
    assert device.SIMULATED in (tmp_path / "r.html").read_text()


@pytest.mark.simulator_only
def test_pytest_starts_again_on_the_simulated_device(tmp_path: Path) -> None:
    words = ["--pyargs", "conformance", "--ckpt-subject", "qwen3", "--ckpt-check", "values.load"]
    words += ["--ckpt-device", "npu-sim", "-p", "no:cacheprovider", f"--junitxml={tmp_path / 'x'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert device.SIMULATED in (tmp_path / "x").read_text()
