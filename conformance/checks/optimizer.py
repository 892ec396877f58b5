"""Chapter `optimizer`: every state that optimizers have saves, and comes back as it was.

On one rank: a job trains, saves and goes on; another of the same kind loads. Both must hold what a
third job holds that no manager ever touched, and go on in the same way, bit for bit. What differs
between the clauses is the optimizer, and what is done to the jobs on the way.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from conformance.checks.optimizer_scenes import KEY, moment_after_load, refusal, resume
from conformance.jobs import STATES
from conformance.lab import Lab, NotApplicable
from conformance.managed import Try
from conformance.manager_lab import STEPS, states
from conformance.verdict import Finding

# The hyperparameter that torch added last: steps of before lack it.
NEW = "decoupled_weight_decay"


def none(lab: Lab) -> Iterator[Finding]:
    """None in the state, as SwapOptimizer's `max_exp_avg_sq` without amsgrad."""
    yield from _back(lab, "none", "a state that holds None does not come back as it was")


def older_file(lab: Lab) -> Iterator[Finding]:
    """A hyperparameter that the file does not know keeps its value; a moment is not so forgiven."""
    folder = lab.managers.saved_steps()
    if not _rewrite(f"{folder}/checkpoint/step-10", lambda flat: _without(flat, f".{NEW}")):
        raise NotApplicable(f"the manager's steps are not DCP folders with {NEW} in them")
    moment, halved = f"optimizer.state.{KEY}.exp_avg", lab.managers.saved_steps()
    _rewrite(f"{halved}/checkpoint/step-10", lambda flat: _without(flat, moment))
    old, lacking = lab.managers.try_loads(Try(folder), Try(halved))
    words = f"a step of before {NEW} was a hyperparameter does not load"
    advice = "keep the value that a hyperparameter has where the file has none, and say so"
    yield from states(old, dict.fromkeys(STATES, STEPS["step-10"]), what=words, remedy=advice)
    if KEY not in lacking.words:
        yield Finding(
            what="a step that lacks one moment is not refused by its name",
            keys=(moment,),
            expected="a refusal that names the parameter",
            actual=str(lacking),
            remedy="compare the state's keys with the file's before anything is loaded",
        )


def tied(lab: Lab) -> Iterator[Finding]:
    """A tied pair stays one tensor with one state, whichever of its names comes first."""
    yield from _back(lab, "tied", "a tied pair does not come back as one tensor with its state")


def groups(lab: Lab) -> Iterator[Finding]:
    """Each group keeps its hyperparameters, those of a scheduler or a user and an empty one's."""
    yield from _back(lab, "groups", "hyperparameters of a group are not those that were saved")


def none_over_moments(lab: Lab) -> Iterator[Finding]:
    """A None in the file is no value: it never replaces a healthy moment in silence."""
    key, folder = f"optimizer.state.{KEY}.exp_avg", lab.managers.saved_steps()
    step = f"{folder}/checkpoint/step-10"
    if not _rewrite(step, lambda flat: {**flat, key: None} if key in flat else {}):
        raise NotApplicable("the manager's steps are not DCP folders with the optimizer's names")
    (words,) = lab.managers.run(moment_after_load, 1, folder)
    if words:
        yield Finding(
            what="a load put None over a healthy moment",
            keys=(key,),
            expected="the moment that was there, or a refusal",
            actual=words,
            cause="DCP pickles a None that is in a state dict, and hands it back over a tensor",
            remedy="leave None out of what is saved, and take a pickled one for absent",
        )


def gradients(lab: Lab) -> Iterator[Finding]:
    """Gradients that are set while a job saves or loads change nothing."""
    yield from _back(lab, "gradients", "with gradients set, the state does not come back")


def stateless(lab: Lab) -> Iterator[Finding]:
    """SGD without momentum has no state: none is saved, none is made up."""
    yield from _back(lab, "stateless", "an optimizer without state does not come back as it was")


def dtypes(lab: Lab) -> Iterator[Finding]:
    """Each value keeps its type and dtype, whatever the parameter's is."""
    yield from _back(lab, "dtypes", "a state comes back in another type or with other values")


def by_name(lab: Lab) -> Iterator[Finding]:
    """State belongs to a parameter by its name, in whatever order the groups list them."""
    yield from _back(lab, "by-name", "state is paired with parameters by their position")


def no_gradient(lab: Lab) -> Iterator[Finding]:
    """A parameter that has never had a gradient has no state, before and after."""
    yield from _back(lab, "no-gradient", "a parameter without state does not come back so")


def frozen(lab: Lab) -> Iterator[Finding]:
    """A parameter that was frozen after some steps keeps its moments.

    One that left its group for that is in no state dict of torch's: the truth, or a refusal.
    """
    yield from _back(lab, "frozen", "the state of a parameter that is frozen now is lost")
    words = "the state of a parameter that left its group is"
    yield from _back_or_refused(lab, "left", f"{words} lost", f"{words} refused without a name")


def swapped(lab: Lab) -> Iterator[Finding]:
    """Moments in host memory, which the optimizer tells of (`CheckpointableState`).

    The truth is torch's AdamW, whose moments are never moved; and, for a group that has counted
    steps and waits for its first gradient, the same optimizer without the moves.
    """
    yield from _back(lab, "swapped", "moments that were swapped out do not come back")
    yield from _back(lab, "waiting", "a group that waits for a gradient does not come back")


def emptied(lab: Lab) -> Iterator[Finding]:
    """Emptied storage that nobody explains: the truth, or a refusal that names the parameter."""
    words = "an optimizer state with emptied storage"
    yield from _back_or_refused(
        lab,
        "emptied",
        f"{words} was saved as if it held values",
        f"{words} is refused without a name",
    )


def _without(flat: dict[str, Any], end: str) -> dict[str, Any]:
    """`flat` without the keys that end so; nothing where there are none."""
    kept = {key: value for key, value in flat.items() if not key.endswith(end)}
    return kept if len(kept) < len(flat) else {}


def _back(lab: Lab, scene: str, what: str) -> Iterator[Finding]:
    yield from lab.managers.findings(resume, 1, lab.managers.folder(), scene, what)


def _back_or_refused(lab: Lab, scene: str, what: str, unnamed: str) -> Iterator[Finding]:
    outcome = lab.managers.run(refusal, 1, lab.managers.folder(), scene)[0]
    if outcome is None:
        yield from _back(lab, scene, what)
    elif ".weight" not in outcome:
        yield Finding(
            what=unnamed,
            keys=(KEY,),
            expected="a refusal that names the parameter",
            actual=outcome,
            remedy="look at each state, its storage and its group before anything is written",
        )


def _rewrite(step: str, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Let torch read a step, and write it again edited; whether there was anything to edit."""
    if not Path(step, ".metadata").is_file():
        return False
    entries = FileSystemReader(step).read_metadata().state_dict_metadata
    flat: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in entries.items()
    }
    whole = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process is meant
        load(flat, checkpoint_id=step, planner=DefaultLoadPlanner(**whole), no_dist=True)
        edited = edit(flat)
        if edited:
            shutil.rmtree(step)
            planner = DefaultSavePlanner(**whole)
            save(edited, checkpoint_id=step, planner=planner, no_dist=True)
    return bool(edited)
