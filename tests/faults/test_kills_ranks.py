"""The same on several ranks: all die at once, or one dies and the others meet its absence.

Each life loads, saves two steps and exports a third; where it ends is drawn as in `test_kills`.
"""

import random
import time

import pytest

from tests.faults import rank_jobs

# What a rank says as its load, its training, and its last two kinds of saves begin.
MOMENTS = ("start", "loaded", "saved", "saved", "exporting", "exporting")
LENGTH = 3  # steps in a life that nobody ends


def truth_of(lab, size, until):
    ranks = lab.ranks(rank_jobs.record, size, until)
    return [child.wait(60 + 2 * until) for child in ranks]


def restart(lab, size, folder, truth):
    store = lab._folder / f"restart-{time.monotonic_ns()}"
    children = [
        lab.start(rank_jobs.restart, str(store), rank, size, folder, truth[rank])
        for rank in range(size)
    ]
    return [child.wait() for child in children]


def career(lab, folder, size, seed, kills):
    rng = random.Random(seed)
    truth = truth_of(lab, size, (LENGTH + 1) * kills + 1)
    known = 0
    for number in range(kills):
        mode = rng.choice(["disabled", "async"])
        turn, place = divmod(number, len(MOMENTS))
        moment, alone = MOMENTS[place], (turn + place) % 2 == 1
        until = known + LENGTH
        ranks = lab.ranks(rank_jobs.live_or_say, size, folder, until, async_mode=mode)
        victim = ranks[rng.randrange(size)]
        victim.listen(120, lambda message, moment=moment: message[0] == moment)
        victim.listen(rng.random() * (0.05 if moment == "start" else 0.2))
        victim.kill()
        texts = []
        for child in ranks:
            if not alone:
                child.kill()
            elif child is not victim and not child.listen(3 * rank_jobs.PATIENCE):
                story = f"kill {number} at {moment}, {mode}, of {victim.said[-1:]}: a survivor hung"
                raise AssertionError(f"{story}\n{child.stuck()}")
            child.listen(30)
            assert child.over
            assert not child.failed, f"kill {number} at {moment}, {mode}: {child.failed}"
            texts += [child.value] if child.value else []
        for text in texts:
            assert text.startswith("["), f"kill {number} at {moment}: no code in {text}"
        known = max([known, *(m[1] for c in ranks for m in c.said if m[0] == "saved")])
        after = restart(lab, size, folder, truth)
        story = f"kill {number} at {moment}, {mode}, {'one' if alone else 'all'}: {after}"
        for one in after:
            assert not one["wrong"], story
            assert not one["left"], story
            assert one["same"], story
            assert one["next"], story
            assert one["resumed"] == max(one["full"], default=0) >= known, story
        known = after[0]["resumed"] + 1


def test_six_kills_on_two_ranks(lab, tmp_path, seed):
    career(lab, str(tmp_path / "job"), 2, seed, 6)


@pytest.mark.parametrize("what", ["gather", "broadcast"])
def test_a_rank_that_has_gone_is_told_in_words(lab, what):
    first, *_ = lab.ranks(rank_jobs.meet_an_absence, 2, what)
    text = first.wait(90)
    assert text.startswith("[ranks.lost] Another rank has gone")
    assert "logs of the other ranks" in text


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kills"), [(2, 72), (4, 90)])
def test_many_kills_on_ranks(lab, tmp_path, seed, size, kills):
    career(lab, str(tmp_path / "job"), size, seed + size, kills)


def test_a_job_that_hangs_is_ended_with_its_stack(lab):
    with pytest.raises(AssertionError, match=r"sleep hung for 0.5 s(.|\n)*lab.py.* in _live"):
        lab.run(time.sleep, 60, seconds=0.5)
