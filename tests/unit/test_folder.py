"""Step folders: names, publishing in one move, removal, what a killed process leaves behind."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from torchtitan_ckpt import folder, owner
from torchtitan_ckpt.errors import SaveError

# torchtitan 0.3.0 takes the number of the first match anywhere in a name.
TORCHTITAN = re.compile(r"step-(\d+)")


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("step-0", 0),
        ("step-10000", 10000),
        ("step-010", None),
        ("step-1.tmp", None),
        ("mystep-5", None),
        ("step-5 ", None),
        ("step-", None),
        ("step--1", None),
        ("step-٣", None),
    ],
)
def test_only_exact_names_are_steps(name, number):
    assert folder.step_number(name) == number


def test_steps_are_listed_by_number_and_look_alikes_apart(tmp_path):
    for name in ("step-9", "step-10000", "step-010", "step-1.tmp", "mystep-5", "notes"):
        (tmp_path / name).mkdir()
    assert sorted(folder.list_steps(tmp_path)) == [9, 10000]
    assert folder.look_alikes(tmp_path) == ["mystep-5", "step-010", "step-1.tmp"]
    assert folder.list_steps(tmp_path / "absent") == {}


def finish(path, content):
    (path / "data").write_text(content)
    (path / ".metadata").write_text(content)


def test_an_unfinished_step_is_invisible_to_torchtitan(tmp_path):
    path = folder.begin(tmp_path, 20)
    assert not TORCHTITAN.search(path.name)
    assert folder.list_steps(tmp_path) == {}
    finish(path, "new")
    assert folder.publish(path, tmp_path, 20, sync=True) == tmp_path / "step-20"
    assert sorted(os.listdir(tmp_path)) == ["step-20"]
    assert sorted(os.listdir(tmp_path / "step-20")) == [".metadata", "data"]


def test_a_step_is_not_published_without_its_marker(tmp_path):
    path = folder.begin(tmp_path, 20)
    with pytest.raises(SaveError, match=r"save\.no-marker"):
        folder.publish(path, tmp_path, 20, sync=False)
    assert folder.list_steps(tmp_path) == {}


@pytest.mark.parametrize("exchange", [True, False])
def test_saving_a_step_again_replaces_it_whole(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(folder.ctypes, "CDLL", lambda *a, **k: object())
    for content in ("old", "new"):
        path = folder.begin(tmp_path, 5)
        finish(path, content)
        folder.publish(path, tmp_path, 5, sync=False)
    assert (tmp_path / "step-5" / "data").read_text() == "new"
    assert os.listdir(tmp_path) == ["step-5"]


def test_a_step_is_never_absent_while_it_is_replaced(tmp_path):
    """Watch the name from another process while it is replaced many times."""
    path = folder.begin(tmp_path, 5)
    finish(path, "x")
    folder.publish(path, tmp_path, 5, sync=False)
    watch = (
        "import os, sys\nprint('go', flush=True)\n"
        "while os.path.exists(sys.argv[2]):\n"
        "    if not os.path.exists(sys.argv[1]): print('gone', flush=True)\n"
    )
    go = tmp_path / "go"
    go.touch()
    args = [sys.executable, "-c", watch, str(tmp_path / "step-5" / ".metadata"), str(go)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "go\n"
        for n in range(200):
            path = folder.begin(tmp_path, 5)
            finish(path, str(n))
            folder.publish(path, tmp_path, 5, sync=False)
        go.unlink()
        assert process.stdout.read() == ""


def test_removal_takes_the_name_first(tmp_path, monkeypatch):
    path = tmp_path / "step-5"
    path.mkdir()
    finish(path, "x")
    monkeypatch.setattr(folder.shutil, "rmtree", lambda p: (_ for _ in ()).throw(OSError("busy")))
    with pytest.raises(OSError, match="busy"):
        folder.remove(path)
    assert folder.list_steps(tmp_path) == {}
    assert not any(TORCHTITAN.search(name) for name in os.listdir(tmp_path))
    unfinished, removed = folder.leftovers(tmp_path)
    assert not unfinished
    assert len(removed) == 1


def test_leftovers_are_ours_by_their_name_only(tmp_path):
    ours = folder.begin(tmp_path, 7)
    (ours / "data").touch()
    os.utime(ours, (1, 1))
    os.utime(ours / "data", (5, 5))
    (tmp_path / "unfinished.9.theirs").mkdir()
    (tmp_path / "unfinished.9.host.1.2.0123abcd").touch()
    (tmp_path / "removed.not-hex!").mkdir()
    unfinished, removed = folder.leftovers(tmp_path)
    me = owner.myself()
    assert [(u.path, u.step, u.pid, u.start) for u in unfinished] == [(ours, 7, me.pid, me.start)]
    assert unfinished[0].mtime == 5, "a save lives while its files grow"
    assert removed == []


def test_an_unfinished_folder_is_signed_from_its_first_moment(tmp_path):
    """A mark inside would come later than the folder, and a process may die in between."""
    folder.begin(tmp_path, 7)
    unfinished, _ = folder.leftovers(tmp_path)
    assert len(unfinished) == 1
    assert os.listdir(unfinished[0].path) == []


@pytest.mark.parametrize("host", ["step-12.cluster", "step_3", "", "a" * 90])
def test_no_host_name_makes_an_unfinished_folder_a_step(tmp_path, monkeypatch, host):
    monkeypatch.setattr(owner.socket, "gethostname", lambda: host)
    path = folder.begin(tmp_path, 7)
    assert not TORCHTITAN.search(path.name)
    assert folder.is_ours(path)
    assert len(folder.leftovers(tmp_path)[0]) == 1


def no_exchange(monkeypatch):
    monkeypatch.setattr(folder.ctypes, "CDLL", lambda *a, **k: object())


def replaceable(tmp_path):
    for content in ("old", "new"):
        path = folder.begin(tmp_path, 5)
        finish(path, content)
        if content == "old":
            folder.publish(path, tmp_path, 5, sync=False)
    return path


def test_a_replacement_that_fails_half_way_leaves_the_old_step(tmp_path, monkeypatch):
    no_exchange(monkeypatch)
    path = replaceable(tmp_path)
    real, seen = os.rename, []

    def rename(a, b):
        if a == path and not b.exists():
            seen.append(sorted(p.name[:8] for p in tmp_path.iterdir()))
            raise OSError(5, "Input/output error")
        real(a, b)

    monkeypatch.setattr(folder.os, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        folder.publish(path, tmp_path, 5, sync=False)
    assert seen == [["replaced", "unfinish"]], "it was not half-way"
    assert (tmp_path / "step-5" / "data").read_text() == "old"


def test_an_exchange_that_fails_is_not_tried_in_two_steps(tmp_path, monkeypatch):
    path = replaceable(tmp_path)

    class Library:
        @staticmethod
        def renameat2(*_):
            return -1

    monkeypatch.setattr(folder.ctypes, "CDLL", lambda *a, **k: Library)
    monkeypatch.setattr(folder.ctypes, "get_errno", lambda: 5)
    with pytest.raises(OSError, match="Input/output"):
        folder.publish(path, tmp_path, 5, sync=False)
    assert (tmp_path / "step-5" / "data").read_text() == "old"


@pytest.mark.parametrize("exchange", [True, False])
def test_a_name_that_another_job_takes_or_frees_meanwhile(tmp_path, monkeypatch, exchange):
    """The second of two jobs gets its step in place, whichever of them was faster."""
    if not exchange:
        no_exchange(monkeypatch)
    path = replaceable(tmp_path)
    real = folder._exchange

    def freed(new, target, step):
        if (target / "data").read_text() == "old":
            folder.remove(target)
        return real(new, target, step)

    monkeypatch.setattr(folder, "_exchange", freed)
    folder.publish(path, tmp_path, 5, sync=False)
    assert (tmp_path / "step-5" / "data").read_text() == "new"
    assert os.listdir(tmp_path) == ["step-5"]


def test_an_empty_step_a_file_or_a_link_in_the_way_is_replaced(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-2").touch()
    (tmp_path / "step-3").symlink_to("nowhere")
    for step in (1, 2, 3):
        path = folder.begin(tmp_path, step)
        finish(path, "new")
        folder.publish(path, tmp_path, step, sync=False)
        assert (tmp_path / f"step-{step}" / "data").read_text() == "new"
    assert len(os.listdir(tmp_path)) == 3


def test_a_step_that_a_dead_process_was_replacing_comes_back(tmp_path):
    replaceable(tmp_path)
    os.rename(tmp_path / "step-5", tmp_path / "replaced.5.0123abcd")
    assert folder.leftovers(tmp_path)[1] == [], "the only copy is no leftover"
    assert folder.recover(tmp_path) == [tmp_path / "step-5"]
    assert (tmp_path / "step-5" / "data").read_text() == "old"
    (tmp_path / "replaced.5.89abcdef").mkdir()
    assert folder.recover(tmp_path) == []
    assert folder.leftovers(tmp_path)[1] == [tmp_path / "replaced.5.89abcdef"]


def test_a_step_whose_old_files_cannot_be_removed_is_saved_all_the_same(tmp_path, monkeypatch):
    path = replaceable(tmp_path)

    def busy(_):
        raise OSError(16, "busy")

    monkeypatch.setattr(folder.shutil, "rmtree", busy)
    folder.publish(path, tmp_path, 5, sync=False)
    assert (tmp_path / "step-5" / "data").read_text() == "new"


def test_removal_of_what_another_removes_is_no_error(tmp_path, monkeypatch):
    folder.remove(tmp_path / "absent")
    path = tmp_path / "step-5"
    path.mkdir()
    finish(path, "x")
    real, calls = folder.shutil.rmtree, []

    def disturbed(tree):
        calls.append(tree)
        if len(calls) == 1:
            (tree / "data").unlink()
            raise FileNotFoundError(2, "No such file")
        real(tree)

    monkeypatch.setattr(folder.shutil, "rmtree", disturbed)
    folder.remove(path)
    assert os.listdir(tmp_path) == []


def test_a_step_that_is_a_link_loses_the_link_only(tmp_path):
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    finish(elsewhere, "x")
    (tmp_path / "step-5").symlink_to(elsewhere)
    folder.remove(tmp_path / "step-5")
    assert os.listdir(tmp_path) == ["disk"]
    assert (elsewhere / "data").read_text() == "x"


def test_owner_tells_the_living_from_the_dead(tmp_path):
    assert owner.read(tmp_path) is None
    owner.write(tmp_path)
    mine = owner.read(tmp_path)
    assert owner.is_me(mine)
    assert owner.is_alive(mine)
    code = "import sys, pathlib, torchtitan_ckpt.owner as o; o.write(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    dead = owner.read(tmp_path)
    assert not owner.is_me(dead)
    assert not owner.is_alive(dead)
    owner.release(tmp_path)
    assert owner.read(tmp_path) == dead, "another process's record is not ours to remove"


def test_a_reused_pid_is_not_the_owner(tmp_path):
    owner.write(tmp_path)
    record = json.loads((tmp_path / owner.NAME).read_text())
    record["start"] -= 1
    (tmp_path / owner.NAME).write_text(json.dumps(record))
    assert not owner.is_alive(owner.read(tmp_path))


def test_an_owner_on_another_host_lives_by_its_heartbeat():
    now = time.time()
    assert owner.is_alive(owner.Owner("elsewhere", 1, 0, now))
    assert not owner.is_alive(owner.Owner("elsewhere", 1, 0, now - 2 * owner.FRESH))


@pytest.mark.parametrize("record", [{"heartbeat": 1.0}, None], ids=["stale", "taken-away"])
def test_a_heartbeat_keeps_a_silent_owner_alive_until_it_is_closed(tmp_path, record):
    if record is not None:
        (tmp_path / owner.NAME).write_text(json.dumps(asdict(owner.myself()) | record))
    heart = owner.Heartbeat(tmp_path, every=0.005)
    deadline = time.monotonic() + 20
    while (found := owner.read(tmp_path)) is None or found.heartbeat == 1.0:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert owner.is_me(found)
    heart.close()
    owner.release(tmp_path)
    time.sleep(0.03)
    assert os.listdir(tmp_path) == [], "a closed heart beats no more"


def test_a_heartbeat_leaves_another_owner_alone_and_survives_a_lost_folder(tmp_path):
    text = json.dumps(asdict(owner.myself()) | {"host": "elsewhere"})
    (tmp_path / owner.NAME).write_text(text)
    hearts = [owner.Heartbeat(path, every=0.005) for path in (tmp_path, tmp_path / "absent")]
    time.sleep(0.05)
    assert all(heart._thread.is_alive() for heart in hearts)
    for heart in hearts:
        heart.close()
    assert (tmp_path / owner.NAME).read_text() == text
    assert os.listdir(tmp_path) == [owner.NAME]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}'])
def test_a_damaged_owner_record_blocks_nobody(tmp_path, text):
    (tmp_path / owner.NAME).write_text(text)
    assert owner.read(tmp_path) is None


def test_a_damaged_record_goes_with_the_job(tmp_path):
    (tmp_path / owner.NAME).write_text("{")
    owner.release(tmp_path)
    assert os.listdir(tmp_path) == []
    owner.release(tmp_path / "absent")


def test_signing_leaves_no_other_file(tmp_path):
    owner.write(tmp_path)
    owner.write(tmp_path)
    assert os.listdir(tmp_path) == [owner.NAME]
