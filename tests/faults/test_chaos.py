"""The package ckpt-chaos as an outside judge, and plain DCP under the same judge for comparison.

It kills a script at each file event that Python sees, cuts files in half, starts it again, and says
whether the resume used the newest complete checkpoint and ended where an undisturbed run ends.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def judge(arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "ckpt_chaos", *arguments],
        capture_output=True,
        text=True,
        timeout=1500,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        **options,
    )


def verdicts(text):
    """The last line of its table: `PASS: 12  HARD_FAIL: 3`."""
    names = "PASS|HARD_FAIL|SILENT_DIVERGENCE|LOST_WORK|CONTROL_FAIL"
    lines = [line for line in text.splitlines() if re.match(rf"({names}): \d", line)]
    return {name: int(n) for name, n in re.findall(r"([A-Z_]+): (\d+)", lines[-1])}


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("ckpt_chaos", reason="wants the extra 'faults' (pip install ckpt-chaos)")


def of_ours(work, points, modes="before,torn"):
    """The verdicts on the job of this project, killed at so many points at most."""
    done = judge(
        [
            *("run", "--work", str(work), "--max-points", str(points), "--jobs", "2"),
            *("--modes", modes),
            *("--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/final.txt"),
            # By name: the pickled random number generators are longer in one run than in another.
            *("--checkpoint-glob", "{out}/checkpoint/step-*", "--ckpt-ignore-size"),
            *("--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"),
            *("--", sys.executable, "-m", "tests.faults.chaos_job", "{out}"),
        ]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(path.read_text()) for path in work.glob("pt_*/result.json")]
    newest = {each["outcome"]["newest_complete_step"] for each in results}
    assert max(newest) > 0, "it took no step for complete, and so cannot see that work is lost"
    return verdicts(done.stdout)


def test_an_outside_judge_at_two_points(tmp_path):
    """A file of the folder cut in half, and one of a step; the third is a run that nobody kills."""
    assert of_ours(tmp_path, 2, modes="torn") == {"PASS": 3}


@pytest.mark.slow
def test_an_outside_judge(tmp_path, capsys):
    plain = judge(["bench", "dcp_ddp", "--work", str(tmp_path / "plain"), "--jobs", "2"])
    table = {
        "torchtitan-ckpt": of_ours(tmp_path / "ours", 40),
        "plain DCP": verdicts(plain.stdout),
    }
    with capsys.disabled():
        for name, counts in table.items():
            print(f"\nckpt-chaos, {name}: " + ", ".join(f"{n} {k}" for k, n in counts.items()))
    assert set(table["torchtitan-ckpt"]) == {"PASS"}
    assert table["torchtitan-ckpt"]["PASS"] > 30
    assert table["plain DCP"].get("HARD_FAIL", 0) > 0, "the judge no longer sees what it is for"
