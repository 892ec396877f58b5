"""SIGKILL at random moments of a job's life: load, train, save, export, purge; then a restart.

Every life loads what the last one left and saves each step. A moment is drawn as a message of the
job and a part of a step's time after it, so that it falls anywhere, however fast the machine is.
"""

import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.faults import jobs, judge
from tests.faults.conftest import STEPS

LENGTH = 4  # steps in a life that nobody ends


def options(rng, newest):
    """What one life does differently from the next."""
    chosen = {
        "async_mode": rng.choice(["disabled", "async", "async_with_pinned_mem"]),
        "keep_latest_k": rng.choice([2, 2, 0, 3]),
        "checksums": rng.random() < 0.3,
        "sync_files": rng.random() < 0.7,
    }
    if rng.random() < 0.4:
        chosen |= {"last": True, "last_save_in_hf": rng.random() < 0.6}
    elif newest > 2 and rng.random() < 0.3:
        chosen |= {"load_step": newest - 1, "keep_latest_k": 0}  # back, and save steps again
    return chosen


def phase(folder):
    """What the job was doing, told by what lies there."""
    names = [path.name.partition(".")[0] for path in Path(folder, "checkpoint").glob("[ur]*.*")]
    return "+".join(sorted(set(names))) or "between"


def end_somewhere(child, rng, pace):
    """Kill a child at a random moment; returns what it had said."""
    moment = rng.choice(["start", "loaded", "saved", "saved", "saved"])
    number = rng.randrange(LENGTH) if moment == "saved" else 0
    seen = 0

    def reached(message):
        nonlocal seen
        seen += message[0] == moment
        return seen > number

    child.listen(120, reached)
    child.listen(rng.random() * pace[moment == "start"])
    child.kill()
    child.listen(30)
    assert child.over, "SIGKILL did not end it"
    return child.said


def measure(lab, folder):
    """(seconds of a step, seconds from the start to the end of the load) of a quiet life."""
    child = lab.start(jobs.live, folder, LENGTH)
    times = []
    while child.listen(60, lambda _: True):
        times.append(time.monotonic())
    child.wait()
    return (times[-2] - times[1]) / LENGTH, max(times[1] - times[0], 0.02)


def career(lab, truth, root, seed, kills):
    """So many lives on one folder after the other; returns where they ended."""
    rng = random.Random(seed)
    pace = measure(lab, str(root / "quiet"))
    folder, known, where = root / "0", 0, Counter()
    for number in range(kills):
        if known > STEPS - 3 * LENGTH:
            shutil.rmtree(folder)
            folder, known = root / str(number), 0
        newest = known
        chosen = options(rng, newest)
        back = chosen.get("load_step")
        present = {n for n, _ in judge.visible(folder / "checkpoint")}
        if back is not None and back not in present:
            del chosen["load_step"]
        top = max(present, default=0)
        child = lab.start(jobs.live, str(folder), top + LENGTH, **chosen)
        said = end_somewhere(child, rng, pace)
        assert not child.failed, f"kill {number}, {chosen}: {child.failed}\n{child.output()}"
        where[phase(folder)] += 1
        known = max([known, *(m[1] for m in said if m[0] == "saved" and m[2] == "full")])
        loaded = [m for m in said if m[0] == "loaded"]
        for _, step, state in loaded:
            assert step == 0 or state == truth[step][0], f"kill {number}: step {step} came back"
        after = lab.run(judge.restart, str(folder), truth)
        story = f"kill {number}, {chosen}, said {said}: {after}"
        assert not after["wrong"], story
        assert not after["wrong after"], story
        assert not after["left"], story
        assert after["resumed"] == max(after["full"], default=0), story
        assert after["resumed"] >= known, story
        assert after["same"], story
        assert after["next"], story
        known = after["resumed"] + 1
    return where


def test_thirty_kills(lab, truth, tmp_path, seed):
    """Twenty-four here; the others are in test_kills_ranks."""
    where = career(lab, truth[False], tmp_path, seed, 24)
    assert len(where) > 1, f"no save was ever hit: {where}"


@pytest.mark.slow
def test_three_hundred_kills(lab, truth, tmp_path, seed):
    where = career(lab, truth[False], tmp_path, seed + 1, 300)
    print(f"300 kills fell into: {dict(where)}")
    assert len(where) > 2
