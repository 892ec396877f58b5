"""keep_latest_k: what is kept, what is removed, and that nothing stops the thread."""

import os
import subprocess

import pytest

from torchtitan_ckpt import folder, owner, retention


def make(tmp_path, *numbers, marker=".metadata"):
    for n in numbers:
        path = tmp_path / f"step-{n}"
        path.mkdir()
        (path / marker).touch()


def names(paths):
    return [p.name for p in paths]


def surplus(tmp_path, keep, full=lambda p: True, in_use=()):
    return names(retention.surplus(tmp_path, keep, in_use=in_use, is_full=full))


def test_zero_keeps_all(tmp_path):
    make(tmp_path, 1, 2, 3)
    assert surplus(tmp_path, 0) == []


def test_the_newest_are_kept_by_number_and_the_seed_always(tmp_path):
    make(tmp_path, 0, 8, 9, 10, 100)
    assert surplus(tmp_path, 2) == ["step-8", "step-9"]
    assert surplus(tmp_path, 4) == []
    assert surplus(tmp_path, 9) == []


def test_incomplete_steps_do_not_count_and_are_not_removed(tmp_path):
    make(tmp_path, 1, 2, 3)
    for n in (4, 5, 6):
        (tmp_path / f"step-{n}").mkdir()
    assert surplus(tmp_path, 2) == ["step-1"]


def test_names_that_only_resemble_steps_are_left_alone(tmp_path):
    make(tmp_path, 1, 2, 3)
    (tmp_path / "step-0001").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "step-x").mkdir()
    assert surplus(tmp_path, 2) == ["step-1"]


def test_the_newest_full_step_and_steps_in_use_are_never_removed(tmp_path):
    make(tmp_path, 1, 2, 3, 4, 5)
    full = {"step-1", "step-2"}
    assert surplus(tmp_path, 2, full=lambda p: p.name in full) == ["step-1", "step-3"]
    assert surplus(tmp_path, 2, in_use=(1, 2)) == ["step-3"]


def test_a_failed_removal_does_not_stop_the_others_and_is_finished_later(tmp_path, monkeypatch):
    make(tmp_path, 1, 2, 3)
    calls = []
    real = folder.shutil.rmtree

    def flaky(path, *args):
        calls.append(path)
        if len(calls) == 1:
            raise OSError("busy")
        real(path, *args)

    purger = retention.Purger(
        lambda: [p for p in tmp_path.iterdir() if p.name in ("step-1", "step-2")]
    )
    monkeypatch.setattr(folder.shutil, "rmtree", flaky)
    purger.request()
    purger.close()
    assert len(calls) == 2, "the second step was not tried after the first had failed"
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left[1:] == ["step-3"]
    assert left[0].startswith("removed.")
    retention.remove_leftovers(tmp_path, None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-3"]


def test_a_finder_that_raises_does_not_end_the_thread(tmp_path):
    def broken():
        raise RuntimeError("listing failed")

    purger = retention.Purger(broken)
    purger.request()
    purger.close()  # joins: a dead thread that never saw the request would hang or raise
    assert not purger._thread.is_alive()


def unfinished(tmp_path, *, host=None, pid=None, start=None, age=0.0):
    me = owner.myself()
    name = (
        f"unfinished.20.{host or folder.this_host()}.{pid or me.pid}.{start or me.start}.0123abcd"
    )
    path = tmp_path / name
    path.mkdir()
    (path / "data").touch()
    for each in (path, path / "data"):
        os.utime(each, (1000 - age, 1000 - age))
    return path


def full_step(tmp_path):
    make(tmp_path, 10)
    os.utime(tmp_path / "step-10", (1000, 1000))
    return tmp_path / "step-10"


def test_unfinished_saves_of_dead_processes_go_once_a_newer_full_step_is_there(tmp_path):
    stale = unfinished(tmp_path, pid=os.getppid(), start=1, age=1)
    (tmp_path / "unfinished.foreign").mkdir()
    retention.remove_leftovers(tmp_path, None)
    assert stale.exists()
    retention.remove_leftovers(tmp_path, full_step(tmp_path))
    assert not stale.exists()
    assert (tmp_path / "unfinished.foreign").exists()


def test_a_save_that_another_process_works_on_is_left_alone(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as other:
        path = unfinished(tmp_path, pid=other.pid, start=owner._start_of(other.pid), age=9999)
        retention.remove_leftovers(tmp_path, full_step(tmp_path))
        assert path.exists()
        other.kill()
    retention.remove_leftovers(tmp_path, tmp_path / "step-10")
    assert not path.exists()


def test_a_reused_pid_protects_nothing(tmp_path):
    """In a container the restarted job often has the very pid of the dead one."""
    path = unfinished(tmp_path, start=1, age=1)
    retention.remove_leftovers(tmp_path, full_step(tmp_path))
    assert not path.exists()


def test_a_failed_save_of_this_process_goes_after_the_next_one(tmp_path):
    path = unfinished(tmp_path, age=1)
    retention.remove_leftovers(tmp_path, full_step(tmp_path))
    assert not path.exists()


@pytest.mark.parametrize(("quiet", "stays"), [(10, True), (2 * owner.FRESH, False)])
def test_another_hosts_save_goes_when_nothing_has_moved_for_a_while(tmp_path, quiet, stays):
    path = unfinished(tmp_path, host="elsewhere", pid=1, start=1, age=quiet)
    retention.remove_leftovers(tmp_path, full_step(tmp_path))
    assert path.exists() is stays


def test_an_unfinished_save_newer_than_the_newest_full_step_stays(tmp_path):
    make(tmp_path, 10)
    os.utime(tmp_path / "step-10", (1, 1))
    fresh = folder.begin(tmp_path, 20)
    retention.remove_leftovers(tmp_path, tmp_path / "step-10")
    assert fresh.exists()


def test_a_save_of_this_process_that_goes_on_is_left_alone(tmp_path):
    """In another thread, by another manager, or under a signal handler that saves."""
    path = folder.begin(tmp_path, 20)
    os.utime(path, (1.0, 1.0))
    retention.remove_leftovers(tmp_path, full_step(tmp_path))
    assert path.exists()
    (path / ".metadata").touch()
    target = folder.publish(path, tmp_path, 20, sync=False)
    assert not folder.is_begun(path)
    failed = folder.begin(tmp_path, 30)
    folder.abandon(failed)
    assert not failed.exists()
    assert not folder.is_begun(failed)
    assert target.exists()
