"""The interpreter ends while a save runs in the background: the step is saved, or it is said.

In a process of its own each, since the lab's children leave without the interpreter's own end.
"""

import subprocess
import sys

import pytest

from tests.faults import judge

# argv: the folder, what the writer does, and how the job ends.
JOB = """
import sys, time
from concurrent.futures import thread
from tests.faults import jobs
from torchtitan_ckpt.formats import dcp

folder, writer, end = sys.argv[1:]
running = jobs.job(folder, async_mode="async")
running.train(1)
running.manager.maybe_wait_for_saving()
real = dcp.save

def late(*args, **kwargs):
    while not thread._shutdown:  # until the interpreter has begun to end
        time.sleep(0.01)
    if writer == "fails":
        raise OSError(28, "No space left on device")
    real(*args, **kwargs)

dcp.save = late
running.train(2)
assert not running.manager.pending.done()
if end == "raises":
    raise ValueError("the training broke")
if end == "exits":
    sys.exit(3)
"""


def end(folder, *how):
    command = [sys.executable, "-c", JOB, str(folder), *how]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param("falls off", 0, marks=pytest.mark.slow),
        pytest.param("exits", 3, marks=pytest.mark.slow),
        ("raises", 1),
    ],
)
def test_a_save_that_runs_when_the_interpreter_ends_is_finished(lab, truth, tmp_path, how, code):
    result = end(tmp_path, "saves", how)
    assert result.returncode == code, result.stderr
    after = lab.run(judge.restart, str(tmp_path), truth[False])
    assert after["resumed"] == 2, result.stderr
    assert after["same"]
    assert after["left"] == after["wrong"] == []


@pytest.mark.slow
def test_a_save_that_fails_when_nobody_waits_for_it_any_more_is_said(lab, truth, tmp_path):
    """Its sibling in the default run: tests/files/test_manager.py, a failure said at once."""
    result = end(tmp_path, "fails", "falls off")
    assert "step 2 could not be saved in the background" in result.stderr
    assert "No space left on device" in result.stderr
    after = lab.run(judge.restart, str(tmp_path), truth[False])
    assert after["resumed"] == 1
    assert after["same"]
    assert after["left"] == after["wrong"] == []
