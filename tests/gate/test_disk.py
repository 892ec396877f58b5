"""Watching a folder while a process writes into it."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

from conformance.disk import Deed, Kills, stalled, watched


def test_what_changes_a_folder_is_told_before_it_happens(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    told: list[tuple[str, str, bool, bool]] = []

    def act(deed: Deed) -> None:
        told.append((deed.event, deed.path.name, deed.empties, deed.path.exists()))
        if deed.event == "open":
            (inside / "note").write_text("what an act does is not told")

    with watched(str(inside), act):
        (inside / "a").write_text("1")
        (inside / "a").write_text("2")
        assert (inside / "a").read_text() == "2"
        with (inside / "a").open("r+b"):
            pass
        os.replace(inside / "a", inside / "b")
        (outside / "c").write_text("3")
        shutil.rmtree(inside)
    (outside / "d").write_text("4")
    assert told[:5] == [
        ("open", "a", True, False),
        ("open", "a", True, True),
        ("open", "a", False, True),
        ("os.rename", "a", False, True),
        ("shutil.rmtree", "in", False, True),
    ]


def test_kills_hold_the_folder_as_it_was_and_an_emptied_file_empty(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a").write_text("old")
    kills = Kills(str(folder), str(tmp_path / "k"))
    with watched(str(folder), kills):
        (folder / "a").write_text("new")
        (folder / "a").rename(folder / "b")
    (emptied, first), (renamed, second) = kills.moments
    assert (first, second) == ("open of a", "rename of a")
    assert Path(emptied, "a").read_text() == ""
    assert Path(renamed, "a").read_text() == "new"


def test_a_stalled_writer_waits_and_the_caller_does_not(tmp_path: Path) -> None:
    thread = threading.Thread(target=lambda: (tmp_path / "theirs").write_text("late"))
    with stalled(str(tmp_path)) as stall:
        assert not stall.begun(0)
        thread.start()
        assert stall.begun()
        (tmp_path / "ours").write_text("now")
        assert not (tmp_path / "theirs").exists()
    thread.join(5)
    assert (tmp_path / "theirs").read_text() == "late"
