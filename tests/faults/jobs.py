"""What the killed and the disturbed processes do: train, save, load, and look at what is left.

Every step's state is known beforehand: `record` runs a job that nobody disturbs and gives a digest
of the whole state after each step, and of the model alone. These functions run in processes of the
lab; they return plain values.
"""

import functools
import hashlib
import importlib
import os
import re
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.faults import lab, shim
from tests.files.toy import Job, Toy, bits
from torchtitan_ckpt.errors import CheckpointError, InputError, SaveError
from torchtitan_ckpt.formats import dcp

EVERYTHING = ["optimizer", "lr_scheduler", "dataloader", "train_state"]
MARKERS = (".metadata", "model.safetensors.index.json", "model.safetensors")


def warm_up():
    """What would cost each child anew: torch imports its compiler with the first optimizer."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    importlib.import_module("fsspec.implementations.local")


class Small(Toy):
    """Toy with two layers: a fault at each call of a save is affordable, as each item has one."""

    def __init__(self):
        super().__init__(layers=2)


class Wide(Small):
    """Small with a tensor above 1 MiB, which torch's own zip writer streams into the file."""

    def __init__(self):
        super().__init__()
        self.register_buffer("wide", torch.arange(300_007, dtype=torch.float32))


class Adapter:
    """Hugging Face names for Toy: a prefix, and the tied copy left out."""

    hf_assets_path = None
    fqn_to_index_mapping = None

    def to_hf(self, state):
        return {f"model.{key}": value for key, value in state.items() if key != "head.weight"}

    def from_hf(self, state):
        native = {key.removeprefix("model."): value for key, value in state.items()}
        return {**native, "head.weight": native["embed.weight"]}


def job(folder, seed=0, wide=False, **options):
    """A toy job whose manager saves every step into `folder`/checkpoint."""
    torch.manual_seed(seed)
    defaults = {"interval": 1, "keep_latest_k": 2}
    model = Wide() if wide else Small()
    return Job(folder, seed, model=model, adapter=Adapter(), **{**defaults, **options})


def digest(job):
    """A hash of everything that a full step holds."""
    total = hashlib.sha256(model_digest(job.model.state_dict()).encode())
    for name, parameter in job.model.named_parameters():
        for key, value in sorted(job.optimizer.state.get(parameter, {}).items()):
            total.update(f"{name}.{key} {value.dtype}".encode() + bits(value))
    groups = [
        sorted((k, v) for k, v in group.items() if k != "params")
        for group in job.optimizer.param_groups
    ]
    scheduler = {k: v for k, v in job.scheduler.state_dict().items() if k != "lr_lambdas"}
    rest = (groups, sorted(scheduler.items()), job.loader.taken, job.progress.state_dict())
    total.update(repr(rest).encode())
    return total.hexdigest()


def model_digest(state):
    """A hash of the model alone, under native names; the tied copy does not count."""
    total = hashlib.sha256()
    for key, value in sorted(state.items()):
        if key != "head.weight":
            total.update(f"{key} {value.dtype} {tuple(value.shape)}".encode() + bits(value))
    return total.hexdigest()


def record(folder, until, wide=False):
    """(digest of the full state, digest of the model) by step, from a job that saves nothing."""
    with job(folder, wide=wide, enable=False) as quiet:
        truth = [(digest(quiet), model_digest(quiet.model.state_dict()))]
        for step in range(1, until + 1):
            quiet.train(step)
            truth.append((digest(quiet), model_digest(quiet.model.state_dict())))
    return truth


def live(folder, until, load_step=-1, last=False, **options):
    """Load and train on, saving every step, and say what is certain to be on disk."""
    with job(folder, seed=3, **options) as running:
        lab.say(("start", os.getpid()))
        loaded = running.manager.load(load_step)
        if not loaded:
            start_as_recorded(running)
        lab.say(("loaded", running.progress.step if loaded else 0, digest(running)))
        waits = options.get("async_mode", "disabled") != "disabled"
        while (step := running.progress.step + 1) <= until:
            ends = last and step == until
            running.train(step, last=until if last else None)
            # A save that is asked for while another runs waits for that other one first.
            done = step - 1 if waits and not ends else step
            lab.say(("saved", done, "export" if ends else "full"))
    lab.say(("closed", until))


def visible(folder):
    """Steps as torchtitan finds them: `step-<digits>` anywhere in a name, and a marker inside."""
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        match = re.search(r"step-(\d+)", name)
        if match and any(os.path.isfile(f"{folder}/{name}/{marker}") for marker in MARKERS):
            found.append((int(match[1]), name))
    return sorted(found)


def wrong_steps(folder, truth, wide=False, at_least=0):
    """Visible steps, from `at_least` on, that do not hold exactly what that step's state was."""
    output = Path(folder) / "checkpoint"
    wrong = []
    for number, name in visible(output):
        if number < at_least:
            continue
        if name != f"step-{number}":
            wrong.append(f"{name} is taken for step {number}")
            continue
        why = _fault_of(output / name, number, truth[number], wide)
        if why:
            wrong.append(f"{name}: {why}")
    return wrong


def _once(judge):
    """Let `judge(path, ...)` look at the same bytes once a process: what it says hangs on them."""
    known = {}

    @functools.wraps(judge)
    def remembering(path, *args):
        key = (_contents(path), *args)
        if key not in known:
            known[key] = judge(path, *args)
        return known[key]

    return remembering


def _contents(path):
    """A hash of a step: the names and the bytes in it."""
    total = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        total.update(f"{file.relative_to(path)}\0".encode())
        total.update(hashlib.sha256(file.read_bytes()).digest() if file.is_file() else b"")
    return total.digest()


@_once
def _is_full(path):
    """Whether a step can be resumed: it holds the state of an optimizer."""
    keys = dcp.read_manifest(str(path)).keys if (path / ".metadata").is_file() else ()
    return any(key.startswith("optimizer.") for key in keys)


@_once
def _fault_of(path, number, expected, wide):
    """Why a step is not what it should be; an empty string when it is."""
    full, model = expected
    try:
        if not (path / ".metadata").is_file():
            index = path.glob("*.safetensors")
            state = {k.removeprefix("model."): v for f in index for k, v in load_file(f).items()}
            return "" if model_digest(state) == model else "the weights differ"
        is_full = _is_full(path)
        options = {"load_only": True, "exclude_from_loading": [] if is_full else EVERYTHING}
        with job(path.parent.parent, seed=5, wide=wide, **options) as probe:
            probe.manager.load(number)
            if is_full:
                return "" if digest(probe) == full else "the state differs"
            return "" if model_digest(probe.model.state_dict()) == model else "the model differs"
    except CheckpointError as error:
        return str(error)


def restart(folder, truth, wide=False, **options):
    """What a restarted job finds and does: load, train a step, save it, close.

    Returns what was visible and wrong before, the step resumed, whether its state is that step's,
    what the next save left behind, and what is wrong afterwards.
    """
    output = Path(folder) / "checkpoint"
    seen = visible(output)
    wrong = wrong_steps(folder, truth, wide)
    with job(folder, seed=7, wide=wide, **options) as resumed:
        # A step that a process died replacing is back by now, where names cannot be swapped.
        kept = visible(output)
        full = [n for n, name in kept if _is_full(output / name)]
        loaded = resumed.manager.load()
        step = resumed.progress.step if loaded else 0
        same = digest(resumed) == truth[step][0] if loaded else not kept
        if not loaded:
            start_as_recorded(resumed)
        resumed.train(step + 1)
    return {
        "visible": seen,
        "kept": kept,
        "full": full,
        "wrong": wrong,
        "resumed": step,
        "same": same,
        "left": strays(folder),
        "wrong after": wrong_steps(folder, truth, wide),
        "next": step + 1 in [number for number, _ in visible(output)],
    }


def start_as_recorded(fresh):
    """Give a job that found nothing the weights that the recorded one began with."""
    torch.manual_seed(0)
    fresh.model.load_state_dict(type(fresh.model)().state_dict())


def strays(folder):
    """Names in the output folder, and inside its steps, that belong to no finished step."""
    output = Path(folder) / "checkpoint"
    out = [n for n in sorted(os.listdir(output)) if not re.fullmatch(r"step-[1-9][0-9]*", n)]
    known = re.compile(
        r"\.metadata|\.checksums\.jsonl|__\d+_\d+\.distcp|model.*\.safetensors(\.index\.json)?"
    )
    for path in sorted(output.glob("step-*")):
        out += [f"{path.name}/{n}" for n in sorted(os.listdir(path)) if not known.fullmatch(n)]
    return out


# --- faults at the n-th call ------------------------------------------------------------------

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


def prepare(folder, steps, wide=False):
    """A folder in which a job has saved `steps` steps and closed."""
    with job(folder, wide=wide, keep_latest_k=0) as first:
        first.train(steps)


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
