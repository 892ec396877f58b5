"""What a job is doing when a fault strikes: saves of ten kinds, loads, folders that vanish.

These functions run in processes of the lab; they return plain values.
"""

import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

from tests.faults import lab, shim
from tests.faults.jobs import digest, job, start_as_recorded
from tests.faults.judge import strays, visible, wrong_steps
from torchtitan_ckpt.errors import CheckpointError, InputError, SaveError
from torchtitan_ckpt.formats import dcp

# What is done while calls are counted. `base` is what lies there before, `load` what is resumed.
SCENARIOS = {
    "first": {"base": 0, "armed_from": "start"},
    "start": {"base": 2, "armed_from": "start"},
    "next": {"base": 2},
    "wide": {"base": 2, "wide": True, "checksums": True},
    "again": {"base": 2, "load": 1, "keep_latest_k": 0},
    "again without exchange": {"base": 2, "load": 1, "keep_latest_k": 0, "exchange": False},
    "async": {"base": 2, "async_mode": "async"},
    "unsynced": {"base": 2, "sync_files": False},
    "model only": {"base": 2, "last": True},
    "hf": {"base": 2, "last": True, "last_save_in_hf": True},
}
_OURS = ("base", "load", "armed_from", "exchange", "last", "wide")


def options_of(name):
    """The options of the manager in a scenario."""
    return {key: value for key, value in SCENARIOS[name].items() if key not in _OURS}


def disturbed(folder, name, at=0, action=shim.Action.NOTHING, error="", failing=shim.KINDS):
    """Run a scenario with one fault in it. Returns what came of it and the calls it made."""
    scene = SCENARIOS[name]
    wide = scene.get("wide", False)
    output = f"{folder}/checkpoint"
    shim.no_exchange(not scene.get("exchange", True))
    early = scene.get("armed_from") == "start"
    target = scene.get("load", scene["base"]) + 1
    arguments = (output, at, action, error)
    running, raised = None, []
    if early:
        shim.arm(*arguments, failing=failing)
    with _caught(raised):
        running = job(folder, seed=0 if scene["base"] == 0 else 3, wide=wide, **options_of(name))
    if running is not None:
        if scene["base"]:
            with _caught(raised):
                running.manager.load(scene.get("load", -1))
        if not early:
            shim.arm(*arguments, failing=failing)
        if not raised:
            with _caught(raised):
                running.train(target, last=target if scene.get("last") else None)
                running.manager.maybe_wait_for_saving()
    return running, raised, target


@contextmanager
def _caught(raised):
    try:
        yield
    except Exception as error:
        raised.append(error)


def kill_at(folder, name, at, action):
    """A scenario that ends with SIGKILL at its n-th call; returns only when that is never made."""
    running, raised, _ = disturbed(folder, name, at, action)
    if running is not None:
        running.manager.close()
    shim.disarm()
    if raised:
        raise raised[0]
    return "not reached"


def count(folder, name):
    """The calls of an undisturbed scenario, in order."""
    running, raised, _ = disturbed(folder, name)
    if raised:
        raise raised[0]
    running.manager.close()
    shim.disarm()
    return shim.calls()


def fail_at(folder, name, truth, at, action, error, failing=shim.KINDS):
    """A scenario with a failing call; then, with all well again, the same job goes on."""
    scene = SCENARIOS[name]
    wide = scene.get("wide", False)
    running, raised, target = disturbed(folder, name, at, action, error, failing)
    if raised and running is not None and action is shim.Action.FAIL_FROM:
        # The job is given up while the disk is still full: nothing may be lost by that either.
        with _caught([]):
            running.manager.close()
    shim.disarm()
    struck = shim.struck()
    output = Path(folder) / "checkpoint"
    saved = [number for number, _ in visible(output)]
    result = {
        "struck": struck,
        "raised": [_words(error) for error in raised],
        # A load that cannot read says so in an error of its own.
        "raw": [
            repr(e)
            for e in raised
            if not isinstance(e, InputError if struck.startswith("open-read step-") else SaveError)
        ],
        "saved": target in saved,
        "lost": [n for n in range(1, scene["base"] + 1) if n not in saved and not _away(output, n)],
        # A step that keep_latest_k lets go may vanish while it is looked at.
        "wrong": wrong_steps(folder, truth, wide, at_least=target - 1),
        "continued": "",
    }
    if running is not None and running.progress.step == target and not running.manager._closed:
        # Training goes on with the same manager.
        problems = []
        with _caught(problems):
            running.train(target + 1)
            running.manager.close()
        result["continued"] = "; ".join(map(repr, problems))
        if not problems and target + 1 not in [n for n, _ in visible(output)]:
            result["continued"] = f"step {target + 1} was not saved"
        result["strays of the same job"] = strays(folder)
    elif running is not None:
        with _caught([]):
            running.manager.close()
    return result


def _away(output, step):
    """Whether a step was being replaced where names cannot be swapped: the next save returns it."""
    return any(output.glob(f"replaced.{step}.*"))


def _words(error):
    return f"{type(error).__name__}: {error}"


def vanish(folder, when, truth, **options):
    """Save step 1, lose the output folder around the saving of step 2, and save step 3."""
    output = Path(folder) / "checkpoint"
    raised, real = [], dcp.save

    def losing(state, path, **kwargs):
        if when == "before":
            shutil.rmtree(output)
        if when == "during":
            shutil.rmtree(path)
            Path(path).mkdir()
        real(state, path, **kwargs)
        if when == "after":
            shutil.rmtree(output)

    with job(folder, **options) as running:
        running.train(1)
        running.manager.maybe_wait_for_saving()
        if when == "between":
            shutil.rmtree(output)
        with _caught(raised):
            dcp.save = losing
            running.train(2)
            running.manager.maybe_wait_for_saving()
        dcp.save = real
        running.train(3)
    return {
        "raised": [_words(error) for error in raised],
        "raw": [repr(e) for e in raised if not isinstance(e, SaveError)],
        "steps": [number for number, _ in visible(output)],
        "wrong": wrong_steps(folder, truth),
        "left": strays(folder),
    }


def load_at(folder, truth, at, action, error):
    """Load the newest step while the n-th reading call meets a fault."""
    with job(folder, seed=3, load_only=True) as reader:
        before, raised = digest(reader), []
        shim.arm(f"{folder}/checkpoint", at, action, error, kinds=shim.READS)
        with _caught(raised):
            reader.manager.load()
        count = shim.disarm()
        step = reader.progress.step
        expected = truth[step][0] if step else before
        return {
            "raised": _words(raised[0]) if raised else "",
            "ours": bool(raised) and isinstance(raised[0], CheckpointError),
            "step": step,
            "same": digest(reader) == expected,
            "count": count,
        }


def save_slowly(folder, gate):
    """Save step 2, and stay inside the writing until the file `gate` is there."""
    real = dcp.save

    def slow(state, path, **kwargs):
        real(state, path, **kwargs)
        # As if half an hour had passed: a newer full step of another job must not matter.
        for each in (path, *Path(path).iterdir()):
            os.utime(each, (1, 1))
        lab.say("writing")
        while not os.path.exists(gate):
            time.sleep(0.01)

    with job(folder, seed=3, keep_latest_k=0) as running:
        running.manager.load()
        dcp.save = slow
        running.train(2)
    return strays(folder)


def train_and_close(folder, until):
    """Load, train and save each step, close; the steps that are there then."""
    with job(folder, seed=3, keep_latest_k=0) as running:
        if not running.manager.load():
            start_as_recorded(running)
        running.train(until)
    return [number for number, _ in visible(f"{folder}/checkpoint")]
