"""Bars of the manager and of the tools: on a terminal, for work that lasts, and nowhere else."""

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from torchtitan_ckpt import progress

BAR_JOB = """
import sys, time
from tests.files.toy import Job
from torchtitan_ckpt import progress
from torchtitan_ckpt.formats import dcp_items, dcp_load

progress.AFTER = float(sys.argv[2])
if sys.argv[3] == "slow":
    write, small = dcp_items.ItemWriter.write, dcp_load._Loader._small
    def slow_write(self, value, out):
        time.sleep(0.002)
        return write(self, value, out)
    def slow_read(self, file, jobs):
        time.sleep(0.3)
        return small(self, file, jobs)
    dcp_items.ItemWriter.write, dcp_load._Loader._small = slow_write, slow_read
with Job(sys.argv[1]) as job:
    job.train(2)
    print("-- saved", file=sys.stderr, flush=True)
    assert job.manager.load()
"""


VERBS = """
import contextlib, io, sys
from torchtitan_ckpt import progress
from torchtitan_ckpt.cli import main

progress.AFTER = 0.0
qwen3, out = sys.argv[1:]
for words in (
    ["verify", "--deep", qwen3],
    ["diff", qwen3, qwen3],
    ["convert", qwen3, out],
    ["inspect", qwen3],
    ["plan", "--family", "qwen3", "--config", "Qwen3-0.6B"],
):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0
    print("-- " + words[0], file=sys.stderr, flush=True)
"""


def on_a_terminal(code, *argv):
    """What a process shows on a terminal: everything that it writes to stdout and stderr."""
    main, side = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, argv)],
        stdout=side,
        stderr=side,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    ) as process:
        os.close(side)
        shown = b""
        try:
            while part := os.read(main, 65536):
                shown += part
        except OSError:  # the other end is closed
            pass
        os.close(main)
        assert process.wait() == 0, shown.decode()
    return shown.decode()


def test_saves_and_loads_that_last_show_a_bar_on_a_terminal(tmp_path):
    saved, _, loaded = on_a_terminal(BAR_JOB, tmp_path, 0.1, "slow").partition("-- saved")
    assert "saving step-2" in saved
    assert "loading step-2" in loaded
    assert "100%" in loaded or "/" in loaded


def test_short_saves_and_loads_show_nothing(tmp_path):
    shown = on_a_terminal(BAR_JOB, tmp_path, 60, "fast")
    assert "step-2" not in shown
    assert shown.strip() == "-- saved"


def test_there_is_no_bar_where_stderr_is_no_terminal(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", BAR_JOB, str(tmp_path), "0.1", "slow"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == "-- saved\n"
    assert run.stdout == ""


def test_a_bar_is_for_the_rank_that_is_wanted_only(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.bar("work", 10, wanted=False) as bar:
        assert bar is None
    with progress.bar("work", 10) as bar:
        assert bar is not None
        bar.advance(4)
        bar.told("more", 1, 2)


def test_a_bar_says_bytes_rate_and_remaining_time():
    bar = progress.Bar()
    bar.told("reading", 0, 10_000_000)
    time.sleep(0.01)
    bar.advance(2_000_000)
    time.sleep(0.01)
    bar.advance(3_000_000)
    console = Console(file=io.StringIO(), width=120)
    console.print(bar._drawn.get_renderable())
    drawn = console.file.getvalue()
    assert "reading" in drawn
    assert "5.0/10.0 MB" in drawn
    assert re.search(r"[0-9.]+ [kMG]B/s +[0-9]+:[0-9]{2}:[0-9]{2}", drawn), drawn


def test_the_tools_draw_the_same_bars(tmp_path):
    qwen3 = Path(__file__).parents[2] / "fixtures" / "qwen3" / "moe"
    shown = on_a_terminal(VERBS, qwen3, tmp_path / "out")
    verify, _, rest = shown.partition("-- verify")
    diff, _, rest = rest.partition("-- diff")
    convert, _, rest = rest.partition("-- convert")
    inspect, _, plan = rest.partition("-- inspect")
    assert "reading" in verify
    assert "comparing" in diff
    assert "converting" in convert
    assert "reading the metadata" in inspect
    assert "planning" in plan
