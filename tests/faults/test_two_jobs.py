"""Two jobs on one folder: a dead one blocks nobody, a living one's save is left alone."""

import os

from tests.faults import jobs, judge, scenarios
from torchtitan_ckpt import owner


def lines(child, text):
    return [line for line in child.output().splitlines() if text in line]


def test_the_record_of_a_killed_job_blocks_no_restart_and_alarms_nobody(lab, truth, tmp_path):
    folder = str(tmp_path)
    first = lab.start(jobs.live, folder, 10**6)
    first.listen(60, lambda message: message[:2] == ("saved", 2))
    first.kill()
    first.listen(30)
    record = owner.read(tmp_path / "checkpoint")
    assert record is not None
    assert record.pid == first.pid
    assert not owner.is_alive(record)
    second = lab.start(judge.restart, folder, truth[False])
    after = second.wait()
    assert not lines(second, "another job")
    assert after["resumed"] >= 2
    assert after["same"]
    assert after["left"] == []
    assert not (tmp_path / "checkpoint" / owner.NAME).exists()


def test_a_save_in_progress_survives_a_job_that_starts_and_saves(lab, truth, tmp_path):
    """The second job is told, writes newer full steps and cleans up; the first then finishes."""
    folder, gate = str(tmp_path / "job"), tmp_path / "gate"
    lab.run(jobs.prepare, folder, 1)
    first = lab.start(scenarios.save_slowly, folder, str(gate))
    assert first.listen(60, lambda message: message == "writing")
    unfinished = [n for n in os.listdir(f"{folder}/checkpoint") if n.startswith("unfinished.")]
    assert len(unfinished) == 1
    second = lab.start(scenarios.train_and_close, folder, 4)
    assert second.wait() == [1, 2, 3, 4]
    assert lines(second, f"process {first.pid}")
    assert unfinished[0] in os.listdir(f"{folder}/checkpoint"), "a living save was removed"
    gate.touch()
    assert first.wait() == []
    assert [n for n, _ in judge.visible(f"{folder}/checkpoint")] == [1, 2, 3, 4]
    assert lab.run(judge.wrong_steps, folder, truth[False]) == []


def test_two_jobs_that_save_the_same_steps_at_once_leave_whole_ones(lab, truth, tmp_path):
    """They replace each other's steps, as the second was told; never half of one."""
    folder = str(tmp_path)
    both = [lab.start(scenarios.train_and_close, folder, 12) for _ in range(2)]
    for child in both:
        child.wait()
    assert lab.run(judge.wrong_steps, folder, truth[False]) == []
    assert [n for n, _ in judge.visible(f"{folder}/checkpoint")] == list(range(1, 13))
    assert lab.run(judge.strays, folder) == []
