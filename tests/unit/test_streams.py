"""A program whose stdout or stderr is closed, full, narrow or read by nobody does its work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_ckpt import progress

PRINT = "import sys; from torchtitan_ckpt import streams; streams.settle(); "


def python(code: str, *redirections: str) -> subprocess.CompletedProcess[str]:
    """Run code in a shell, its streams redirected as one would by hand."""
    command = " ".join(['exec "$0" -c "$1"', *redirections])
    return subprocess.run(
        ["sh", "-c", command, sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_a_narrow_stream_gets_escapes() -> None:
    done = python(PRINT + "print('a\\u2026b\\udcff'); print('\\xfc', file=sys.stderr)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\\u2026b\\udcff\n", "\\xfc\n")


def test_a_closed_stream_is_opened_to_nowhere(tmp_path: Path) -> None:
    """Or the first file of a checkpoint would get its number, and all that C++ prints."""
    file = tmp_path / "first"
    code = f"print('x'); f = open({str(file)!r}, 'w'); print('y', flush=True); "
    code += "import os; os.write(1, b'z'); f.write(str(f.fileno())); sys.stderr.write('w')"
    done = python(PRINT + code, "<&-", ">&-", "2>&-")
    assert done.returncode == 0
    assert int(file.read_text()) > 2


def test_what_nobody_reads_is_discarded() -> None:
    code = "\ntry: print('x', flush=True)\nexcept OSError: streams.discard(sys.stdout)\nprint('y')"
    done = python(PRINT + code, ">/dev/full")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [False, True])
def test_no_bar_is_drawn_where_there_is_no_stderr(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed: bool
) -> None:
    stream = None
    if closed:
        stream = (tmp_path / "log").open("w")
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.bar("saving", 3) as bar, progress.waiting("for it"):
        assert bar is None


def test_a_program_that_was_interrupted_waits_for_no_thread() -> None:
    """What a thread computes in torch is of no use any more, and ending under it is a crash."""
    code = """
import sys, threading, time
from torchtitan_ckpt import cli
cli.main = lambda: 130
threading.Thread(target=time.sleep, args=(60,)).start()
sys.exit(cli.program())
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert done.returncode == 130
