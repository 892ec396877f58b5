"""Optimizers in jobs that stop and resume: what ranks run for the chapter `optimizer`.

A part of `conformance/checks/optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from conformance.jobs import Job
from conformance.managed import ManagerRaised, brief, opened, start, tiny_table
from conformance.optimizers import Mixed
from conformance.reference import Leaf, Table
from conformance.swap import MappedAdamW, SwapAdamW, speak
from conformance.verdict import Finding

HEAD, TABLE = "lm_head.weight", "tok_embeddings.weight"
KEY = "layers.11.attention.wo.weight"
_RATES: dict[str, Any] = {"lr": 2.0**-6, "betas": (0.5, 0.75), "eps": 2.0**-10}
Flat = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """An optimizer, and what happens around it.

    make      of the job that saves; `again` of the one that loads, if it is another
    plain     of a job with the same updates whose moments stay where they are, if `make` moves them
    table     the tensors of the model; `turned` builds the one that loads in another order
    training  done to the job that saves, before it trains
    saving    done to it before the call; `loading` to the other one before its call
    """

    make: Callable[[nn.Module], Optimizer]
    again: Callable[[nn.Module], Optimizer] | None = None
    plain: Callable[[nn.Module], Optimizer] | None = None
    table: Callable[[], Table] = tiny_table
    turned: bool = False
    training: Callable[[Job], Any] = lambda job: None
    saving: Callable[[Job], Any] = lambda job: None
    loading: Callable[[Job], Any] = lambda job: None


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


def _groups_and_nobody(part: nn.Module) -> Optimizer:
    """Groups with hyperparameters of their own, one of them without parameters."""
    odd: dict[str, Any] = {"label": "flat", "warmup": 3, "enabled": True}
    flat = [p for p in part.parameters() if p.ndim == 1]
    wide = [p for p in part.parameters() if p.ndim > 1]
    nobody: dict[str, Any] = {
        "params": [],
        "label": "nobody",
        "weight_decay": 0.125,
        "betas": (0.25, 0.5),
    }
    return AdamW([{"params": wide}, {"params": flat, **odd}, nobody], foreach=False, **_RATES)


def _tied() -> dict[str, Leaf]:
    table = tiny_table()
    return table | {HEAD: replace(table[HEAD], tied=TABLE)}


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


def _apart(part: nn.Module) -> list[dict[str, Any]]:
    """One parameter in a group of its own, which waits for its first gradient."""
    named = dict(part.named_parameters())
    waiting = named.pop(KEY)
    return [{"params": list(named.values())}, {"params": [waiting]}]


def _freeze(job: Job) -> None:
    _parameter(job).requires_grad_(False)


def _leave(job: Job) -> None:
    """Frozen in another way: its state stays with an optimizer that has it in no group."""
    for group in job.optimizers[0].param_groups:
        group["params"] = [p for p in group["params"] if p is not _parameter(job)]


def _parameter(job: Job) -> nn.Parameter:
    return job.parts[0].get_parameter(KEY)


SCENES: Mapping[str, Scene] = {
    "none": Scene(make=lambda part: MappedAdamW(part.parameters(), **_RATES)),
    "gradients": Scene(make=_adamw, saving=_set_gradients, loading=_set_gradients),
    "stateless": Scene(make=lambda part: torch.optim.SGD(part.parameters(), 0.25, foreach=False)),
    "dtypes": Scene(make=lambda part: Mixed(part.parameters())),
    "by-name": Scene(make=_groups, again=_turned),
    "no-gradient": Scene(make=_adamw, training=_without_gradient),
    "groups": Scene(make=_groups_and_nobody),
    "tied": Scene(make=_adamw, table=_tied, turned=True),
    "frozen": Scene(make=_adamw, saving=_freeze, loading=_freeze),
    "swapped": Scene(make=lambda part: speak(SwapAdamW(part.parameters(), **_RATES)), plain=_adamw),
    "waiting": Scene(
        make=lambda part: speak(SwapAdamW(_apart(part), **_RATES)),
        plain=lambda part: MappedAdamW(_apart(part), **_RATES),
        training=_without_gradient,
    ),
    "left": Scene(make=_adamw, saving=_leave, loading=_leave),
    "emptied": Scene(make=_silent, plain=_adamw),
}


def _job(make: Callable[[nn.Module], Optimizer], table: Table, *, turned: bool = False) -> Job:
    job = start(table=table)
    if turned:
        for part in job.parts:
            part._modules = dict(reversed(part._modules.items()))
    job.optimizers = [make(part) for part in job.parts]
    job.schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step) for o in job.optimizers
    ]
    return job


def resume(manager: Any, folder: str, name: str, what: str) -> list[Finding]:
    """A job that saves and one that loads, against one that no manager ever touched."""
    scene = SCENES[name]
    never, first = (_trained(scene, make) for make in (scene.plain or scene.make, scene.make))
    with opened(manager, first, folder, interval=1) as found:
        found.save(2)
    second = _job(scene.again or scene.make, scene.table(), turned=scene.turned)
    scene.loading(second)
    with opened(manager, second, folder, load_only=True) as found:
        found.load()
    for where, job in (("in the job that saved", first), ("after the load", second)):
        wrong = _differences(_true(scene, never, first), _told(job), what, where)
        if wrong:
            return wrong
    for job in (never, first, second):
        job.train()
    return _differences(_true(scene, never, first), _told(second), what, "after one step more")


def _trained(scene: Scene, make: Callable[[nn.Module], Optimizer]) -> Job:
    """A job as it is when it saves."""
    job = _job(make, scene.table())
    scene.training(job)
    job.train(2)
    scene.saving(job)
    return job


def _true(scene: Scene, never: Job, first: Job) -> dict[str, Any]:
    """What a job should hold: all as `never`, which counts steps elsewhere where it is plain."""
    true = _told(never)
    if scene.plain is None:
        return true
    parts = {k: v for k, v in true.items() if not k.startswith("param_groups.")}
    return _told(first) | {k: v for k, v in parts.items() if not k.endswith(".step")}


def _told(job: Job) -> dict[str, Any]:
    """Model, state and hyperparameters by name, as copies; what is None or empty is left out.

    Of the names of a tied parameter the first in the alphabet has its state; the others are told.
    """
    out: dict[str, Any] = {}
    for part, optimizer in zip(job.parts, job.optimizers, strict=True):
        names: dict[int, str] = {}
        for name, parameter in sorted(part.named_parameters(remove_duplicate=False), key=_first):
            if names.setdefault(id(parameter), name) != name:
                out[f"tied.{name}"] = names[id(parameter)]
        if isinstance(optimizer, SwapAdamW):
            optimizer.finish()
        for number, group in enumerate(optimizer.param_groups):
            told = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            if not group["params"]:
                out |= {f"param_groups.{number}.{key}": value for key, value in told.items()}
            for name in (names[id(parameter)] for parameter in group["params"]):
                out |= {f"param_groups.{name}.{key}": value for key, value in told.items()}
        for name in names.values():  # also of what has left its group
            out[name] = parameter = part.get_parameter(name)
            held: Mapping[Any, Any] = optimizer.state
            if isinstance(optimizer, SwapAdamW):
                held = optimizer.host
            out |= {f"state.{name}.{key}": v for key, v in held.get(parameter, {}).items()}
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in out.items()
        if value is not None
    }


def _first(named: tuple[str, Any]) -> str:
    return named[0]


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
            remedy="keep state by the parameter's name, each value as it is, and make up none",
            oracle="the same job, and no manager",
        )
    ]


def _same(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return bool(type(one) is type(two) and one == two)
    # Where a number of the state lies is not stored: a load may put it beside its parameter.
    alike = one.dtype == two.dtype and one.shape == two.shape
    return alike and torch.equal(one.cpu(), two.cpu())


def refusal(manager: Any, folder: str, name: str) -> str | None:
    """The words with which a save is refused; None if it is not."""
    job = _trained(SCENES[name], SCENES[name].make)
    try:
        with opened(manager, job, folder, interval=1) as found:
            found.save(2)
    except ManagerRaised as error:
        return error.words
    return None


def moment_after_load(manager: Any, folder: str) -> str:
    """What stands where the moment stood; nothing where it still stands or nothing was loaded."""
    job = start(1)
    try:
        with opened(manager, job, folder, load_only=True) as found:
            found.load()
    except ManagerRaised:
        return ""
    moment = job.optimizers[0].state.get(_parameter(job), {}).get("exp_avg")
    return "" if isinstance(moment, Tensor) else brief(moment)
