"""Lines where there is no terminal: never silent for long, and nothing for short work."""

import types

import pytest

from torchtitan_ckpt import progress
from torchtitan_ckpt.progress import Lines


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(seconds=100.0)
    fake = types.SimpleNamespace(monotonic=lambda: now.seconds)
    monkeypatch.setattr(progress, "time", fake)
    return now


def test_short_work_says_nothing(clock, capsys):
    lines = Lines()
    lines.at("keys", "1 of 2")
    clock.seconds += 1.9
    lines.at("values", "2 of 2")
    lines.remind()
    lines.stop()
    assert capsys.readouterr().err == ""


def test_each_stage_is_said_and_a_long_one_again(clock, capsys):
    lines = Lines()
    lines.at("keys", "0 of 9")
    clock.seconds += 3
    lines.at("values", "4 of 9")
    clock.seconds += 2
    lines.at("values", "5 of 9")  # no news
    lines.at("files", "6 of 9")
    lines.at("jobs", "7 of 9")  # too soon after the last line
    clock.seconds += 14
    lines.remind()
    clock.seconds += 1
    lines.remind()
    clock.seconds += 15
    lines.remind()
    lines.stop()
    # The watching thread may come first; it says the same.
    assert capsys.readouterr().err.splitlines() == [
        "     3 s  values: 4 of 9",
        "     5 s  files: 6 of 9",
        "    20 s  jobs: 7 of 9",
        "    35 s  jobs: 7 of 9",
    ]
