"""What `scripts/on_device.sh` says before a test runs; the tests themselves are a chapter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_ckpt import device

ROOT = Path(__file__).parents[2]


def on_device(root: Path, *words: str, python: str = sys.executable, **env: str) -> tuple[int, str]:
    """Exit code and output of the script of a checkout."""
    done = subprocess.run(
        ["bash", str(root / "scripts/on_device.sh"), *words],
        env={**os.environ, "PYTHON": python, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_help_is_the_comment_at_its_top() -> None:
    code, out = on_device(ROOT, "--help")
    assert code == 0
    assert "bash scripts/on_device.sh [--device npu|cuda|cpu]" in out
    assert out.rstrip().endswith("the others leave at once.")


def test_under_torchrun_one_rank_runs_the_tests_with_ranks_of_their_own(tmp_path: Path) -> None:
    python = tmp_path / "python"  # which has no tests to run
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && env | grep -E "RANK|WORLD|MASTER|ELASTIC" && exit 1\n'
        f'[ "$1" = -m ] && echo ran >> {tmp_path}/runs && exit 0\nexec {sys.executable} "$@"'
    )
    python.chmod(0o755)
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
        "bash",
    ]
    words = [str(ROOT / "scripts/on_device.sh"), "--device", "cpu", "--report", f"{tmp_path}/out"]
    done = subprocess.run(
        [sys.executable, *launch, *words],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs").read_text() == "ran\n"
    assert "exit code of pytest: 0" in (tmp_path / "out").read_text()


def test_a_python_that_is_too_old_or_not_there_is_named() -> None:
    code, out = on_device(ROOT, python="no-such-python")
    assert code == 2
    assert "NO DEVICE: no-such-python is no Python of 3.11 or newer" in out


def test_a_rehearsal_says_that_it_is_one_and_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/on_device.sh", tmp_path / "scripts")
    (tmp_path / "torchtitan_ckpt").symlink_to(ROOT / "torchtitan_ckpt")
    text = (ROOT / "pyproject.toml").read_text()
    wanted = text.replace('"numpy",', '"numpy", "no-such-package>=3",')
    (tmp_path / "pyproject.toml").write_text(wanted)
    python = tmp_path / "python"  # which has no tests to run
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && echo "$@" && exit 5\nexec {sys.executable} "$@"'
    )
    python.chmod(0o755)
    report = tmp_path / "report.txt"
    words = ["--device", "cpu", "--report", str(report), "-k", "one"]
    code, out = on_device(tmp_path, *words, python=str(python))
    assert code == 5
    lines = report.read_text().splitlines()
    assert lines[:2] == ["REHEARSAL ON THE CPU: nothing here is about a device", "cpu"]
    assert "MISSING, and some tests will fail for it: no-such-package>=3" in lines
    assert any(line.startswith("-m pytest tests/device") and "-k one" in line for line in lines)
    assert "no test ran: this says nothing about the device" in lines
    assert out.rstrip().endswith(f"the report is in {report}")


@pytest.mark.skipif(
    device.current().kind is not device.DeviceKind.CPU, reason="there is an accelerator"
)
def test_without_a_device_there_is_no_report(tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    code, out = on_device(ROOT, "--report", str(report), **{device.ENV: ""})
    assert code == 2
    assert out.startswith("NO DEVICE: torch finds no accelerator on this machine")
    assert not report.exists()
