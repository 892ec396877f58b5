"""What a folder holds after a fault, and what a job finds that starts on it again.

These functions run in processes of the lab that have not touched the folder; they return plain
values.
"""

import functools
import hashlib
import os
import re
from pathlib import Path

from safetensors.torch import load_file

from tests.faults.jobs import digest, job, model_digest, start_as_recorded
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.formats import dcp

EVERYTHING = ["optimizer", "lr_scheduler", "dataloader", "train_state"]
MARKERS = (".metadata", "model.safetensors.index.json", "model.safetensors")


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
