"""Chapter `optimizer`: every state that optimizers have saves, and comes back as it was.

On one rank: a job trains, saves and goes on; another of the same kind loads, and must hold the same
and go on in the same way, bit for bit. What differs between the clauses is the optimizer, and what
is done to both jobs on the way.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import AdamW, Optimizer

from conformance.jobs import Job
from conformance.lab import Lab, NotApplicable
from conformance.managed import ManagerRaised, brief, opened, start
from conformance.optimizers import Mixed
from conformance.swap import MappedAdamW, SwapAdamW, speak
from conformance.verdict import Finding

KEY = "layers.11.attention.wo.weight"
_RATES: dict[str, Any] = {"lr": 2.0**-6, "betas": (0.5, 0.75), "eps": 2.0**-10}
Flat = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """An optimizer, and what happens around it.

    make      of the job that saves; `again` of the one that loads, if it is another
    training  done to the job that saves, before it trains
    saving    done to it before the call; `loading` to the other one before its call
    """

    make: Callable[[nn.Module], Optimizer]
    again: Callable[[nn.Module], Optimizer] | None = None
    training: Callable[[Job], Any] = lambda job: None
    saving: Callable[[Job], Any] = lambda job: None
    loading: Callable[[Job], Any] = lambda job: None


def none(lab: Lab) -> Iterator[Finding]:
    """None in the state, as SwapOptimizer's `max_exp_avg_sq` without amsgrad."""
    yield from _back(lab, "none", "a state that holds None does not come back as it was")


def none_over_moments(lab: Lab) -> Iterator[Finding]:
    """A None in the file is no value: it never replaces a healthy moment in silence."""
    key, folder = f"optimizer.state.{KEY}.exp_avg", lab.managers.saved_steps()
    step = f"{folder}/checkpoint/step-10"
    if not _rewrite(step, key, None):
        raise NotApplicable("the manager's steps are not DCP folders with the optimizer's names")
    (words,) = lab.managers.run(_moment_after_load, 1, folder)
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
    """A parameter that was frozen after some steps keeps its moments."""
    yield from _back(lab, "frozen", "the state of a parameter that is frozen now is lost")


def swapped(lab: Lab) -> Iterator[Finding]:
    """Moments in host memory, which the optimizer tells of (`CheckpointableState`)."""
    yield from _back(lab, "swapped", "moments that were swapped out do not come back")


def emptied(lab: Lab) -> Iterator[Finding]:
    """Emptied storage that nobody explains: the truth, or a refusal that names the parameter."""
    words = "an optimizer state with emptied storage was saved as if it held values"
    outcome = lab.managers.run(_save_emptied, 1, lab.managers.folder())[0]
    if outcome is None:
        yield from _back(lab, "emptied", words)
    elif ".weight" not in outcome:
        yield Finding(
            what="an optimizer state with emptied storage is refused without a name",
            keys=(KEY,),
            expected="a refusal that names the parameter",
            actual=outcome,
            remedy="look at the storage's size before anything is written",
        )


def _back(lab: Lab, scene: str, what: str) -> Iterator[Finding]:
    yield from lab.managers.findings(_resume, 1, lab.managers.folder(), scene, what)


# --- on the ranks -------------------------------------------------------------------------------


def _adamw(part: nn.Module) -> Optimizer:
    return AdamW(part.parameters(), foreach=False, **_RATES)


def _groups(part: nn.Module, *, turned: bool = False) -> Optimizer:
    """Two groups with other rates; `turned` lists both, and the parameters in them, backwards."""
    named = dict(part.named_parameters())
    halves = [
        [p for n, p in named.items() if ("11" in n or "1." in n) is odd] for odd in (False, True)
    ]
    groups: list[dict[str, Any]] = [
        {"params": list(half), "lr": 2.0 ** -(4 + n)} for n, half in enumerate(halves)
    ]
    if turned:
        groups = [{**group, "params": group["params"][::-1]} for group in reversed(groups)]
    return AdamW(groups, foreach=False, betas=(0.5, 0.75))


def _turned(part: nn.Module) -> Optimizer:
    return _groups(part, turned=True)


def _silent(part: nn.Module) -> Optimizer:
    return SwapAdamW(part.parameters(), **_RATES)


def _set_gradients(job: Job) -> None:
    for part in job.parts:
        for parameter in part.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)


def _without_gradient(job: Job) -> None:
    """For the first two steps, one parameter takes no part in the loss."""
    parameter = _parameter(job)

    def drop(*_: Any) -> None:
        if job.step < 2:
            parameter.grad = None

    job.optimizers[0].register_step_pre_hook(drop)


def _freeze(job: Job) -> None:
    _parameter(job).requires_grad_(False)


def _parameter(job: Job) -> nn.Parameter:
    return job.parts[0].get_parameter(KEY)


SCENES: Mapping[str, Scene] = {
    "none": Scene(make=lambda part: MappedAdamW(part.parameters(), **_RATES)),
    "gradients": Scene(make=_adamw, saving=_set_gradients, loading=_set_gradients),
    "stateless": Scene(make=lambda part: torch.optim.SGD(part.parameters(), lr=0.25)),
    "dtypes": Scene(make=lambda part: Mixed(part.parameters())),
    "by-name": Scene(make=_groups, again=_turned),
    "no-gradient": Scene(make=_adamw, training=_without_gradient),
    "frozen": Scene(make=_adamw, saving=_freeze, loading=_freeze),
    "swapped": Scene(make=lambda part: speak(SwapAdamW(part.parameters(), **_RATES))),
    "emptied": Scene(make=_silent),
}


def _job(make: Callable[[nn.Module], Optimizer]) -> Job:
    job = start()
    job.optimizers = [make(part) for part in job.parts]
    job.schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step) for o in job.optimizers
    ]
    return job


def _resume(manager: Any, folder: str, name: str, what: str) -> list[Finding]:
    scene = SCENES[name]
    first = _job(scene.make)
    scene.training(first)
    first.train(2)
    scene.saving(first)
    with opened(manager, first, folder, interval=1) as found:
        found.save(2)
    saved = _told(first)
    second = _job(scene.again or scene.make)
    scene.loading(second)
    with opened(manager, second, folder, load_only=True) as found:
        found.load()
    wrong = _differences(saved, _told(second), what, "after the load")
    if not wrong:
        first.train()
        second.train()
        wrong = _differences(_told(first), _told(second), what, "after one step more")
    return wrong


def _told(job: Job) -> dict[str, Any]:
    """Model, state and hyperparameters by name, as copies; what is None or empty is left out."""
    out: dict[str, Any] = {}
    for part, optimizer in zip(job.parts, job.optimizers, strict=True):
        names = {id(p): name for name, p in part.named_parameters()}
        if isinstance(optimizer, SwapAdamW):
            optimizer.finish()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                out[name] = parameter
                state = optimizer.state.get(parameter, {})
                if isinstance(optimizer, SwapAdamW):
                    state = optimizer.host.get(parameter, {})
                out |= {f"state.{name}.{key}": value for key, value in state.items()}
                out |= {
                    f"param_groups.{name}.{key}": value
                    for key, value in group.items()
                    if key not in ("params", "param_names")
                }
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in out.items()
        if value is not None
    }


def _differences(expected: Flat, actual: Flat, what: str, where: str) -> list[Finding]:
    wrong = [
        key
        for key in (*expected, *(key for key in actual if key not in expected))
        if not _same(expected.get(key), actual.get(key))
    ]
    if not wrong:
        return []
    first = wrong[0]
    return [
        Finding(
            what=what,
            keys=tuple(wrong),
            coordinate=where,
            expected=brief(expected.get(first)),
            actual=brief(actual.get(first)),
            oracle="the job that saved",
        )
    ]


def _same(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return bool(type(one) is type(two) and one == two)
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)


def _save_emptied(manager: Any, folder: str) -> str | None:
    """The words of a refusal; None without one."""
    job = _job(_silent)
    job.train(2)
    try:
        with opened(manager, job, folder, interval=1) as found:
            found.save(2)
    except ManagerRaised as error:
        return error.words
    return None


def _rewrite(step: str, key: str, value: Any) -> bool:
    """Let torch read a step and write it again with another value; whether it has such a tensor."""
    if not Path(step, ".metadata").is_file():
        return False
    entries = FileSystemReader(step).read_metadata().state_dict_metadata
    if not isinstance(entries.get(key), TensorStorageMetadata):
        return False
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
        shutil.rmtree(step)
        planner = DefaultSavePlanner(**whole)
        save(flat | {key: value}, checkpoint_id=step, planner=planner, no_dist=True)
    return True


def _moment_after_load(manager: Any, folder: str) -> str:
    """What stands where the moment stood; nothing where it still stands or nothing was loaded."""
    job = start(1)
    try:
        with opened(manager, job, folder, load_only=True) as found:
            found.load()
    except ManagerRaised:
        return ""
    moment = job.optimizers[0].state.get(_parameter(job), {}).get("exp_avg")
    return "" if isinstance(moment, Tensor) else brief(moment)
