"""Param-group values: what a file may lack, and which of file and running optimizer wins.

The rule is one: the file wins, for every key, also over what the optimizer was built with; each
difference is said. Exceptions are asked for by name (`keep`). What torch has added to its groups
over the versions is listed below, so that an older file loads with what that older torch did.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from torchtitan_ckpt.errors import Problem, list_keys, nearest
from torchtitan_ckpt.state.leaves import equal, why_not_storable

LIVE = object()  # the running optimizer's own value stands in
ABSENT = object()

# Keys that a file of another torch may lack, and what they meant before they existed. Printed in
# the notes whenever one is used. A key outside of this table that a file lacks is an error.
EXCUSABLE: Mapping[str, Any] = MappingProxyType(
    {
        "amsgrad": False,  # Adam, AdamW: torch 1.0
        "nesterov": False,  # SGD, Muon
        "centered": False,  # RMSprop
        "maximize": False,  # all: torch 1.11 to 2.0
        "capturable": False,  # Adam family: torch 1.12 to 2.3
        "differentiable": False,  # all: torch 1.13
        "foreach": None,  # all: torch 1.12
        "fused": None,  # Adam, AdamW, SGD, Adagrad: torch 1.13 to 2.4
        "decoupled_weight_decay": LIVE,  # Adam (False) and AdamW (True): torch 2.7
        "initial_lr": LIVE,  # set by a scheduler; a file saved without one lacks it
    }
)

# None is what these hold by default, so a None here needs no record in the file.
NULL_BY_DEFAULT = frozenset({"foreach", "fused"})

# Differences that every run has; the others are said.
_EXPECTED_TO_DIFFER = frozenset({"lr", "initial_lr", "step"})
_KEEP = "--checkpoint.keep_hyperparameters"
_NOT_VALUES = frozenset({"params", "param_names"})

# What optimizers of torch keep for a parameter that was stepped: required keys, and keys required
# where a group's flag is set. Of a subclass that steps by itself nothing is known.
_REQUIRED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Adam": ("step", "exp_avg", "exp_avg_sq"),
        "AdamW": ("step", "exp_avg", "exp_avg_sq"),
        "NAdam": ("step", "mu_product", "exp_avg", "exp_avg_sq"),
        "RAdam": ("step", "exp_avg", "exp_avg_sq"),
        "Adamax": ("step", "exp_avg", "exp_inf"),
        "Adagrad": ("step", "sum"),
        "Adadelta": ("step", "square_avg", "acc_delta"),
        "RMSprop": ("step", "square_avg"),
        "Rprop": ("step", "prev", "step_size"),
        "ASGD": ("step", "eta", "mu", "ax"),
        "SGD": (),
        "Muon": ("momentum_buffer",),
    }
)
FLAGGED: Mapping[str, str] = MappingProxyType(
    {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}
)
_STEPPING = ("step", "_init_group")
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _NOT_VALUES}


def required_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> frozenset[str]:
    """Keys that a stepped parameter of this group certainly has; empty for unknown optimizers."""
    name = _torch_name(optimizer)
    if name is None:
        return frozenset()
    flagged = {
        key for key, flag in FLAGGED.items() if group.get(flag) and _knows_flag(optimizer, flag)
    }
    return frozenset(_REQUIRED[name]) | flagged


def is_parameter_shaped(optimizer: torch.optim.Optimizer, key: str) -> bool:
    """Whether `key` certainly has its parameter's shape."""
    name = _torch_name(optimizer)
    if name is None or key in _SCALARS:
        return False
    return key in _REQUIRED[name] or key in FLAGGED


def excused_flag(key: str, group: Mapping[str, Any]) -> bool:
    """Whether `key` is state of a feature that this group has switched off."""
    return key in FLAGGED and FLAGGED[key] in group and not group[FLAGGED[key]]


def _torch_name(optimizer: torch.optim.Optimizer) -> str | None:
    """torch's name of the optimizer, or of the one that steps in its place: its base."""
    cls = type(optimizer)
    for base in cls.__mro__:
        name = base.__name__
        if name in _REQUIRED and getattr(torch.optim, name, None) is base:
            return name if all(_raw(cls, m) is _raw(base, m) for m in _STEPPING) else None
    return None


def _raw(cls: type, method: str) -> Any:
    """A method without its decorators: torch puts a hook around `step` of every class it meets."""
    return inspect.unwrap(getattr(cls, method, None) or _raw)


def _knows_flag(optimizer: torch.optim.Optimizer, flag: str) -> bool:
    return flag in optimizer.defaults


def unstorable_problems(owner: str, values: Mapping[str, Any]) -> list[Problem]:
    """Refusals for hyperparameters that no file can hold."""
    return [
        Problem(
            code="optimizer.unstorable",
            what=f"{owner}: its group's {key} cannot be saved",
            where=f"param_groups.{owner}.{key}",
            cause=why,
            fix="keep such a value on the optimizer, not in its param groups",
        )
        for key, value in values.items()
        if (why := why_not_storable(value)) is not None
    ]


def unknown_problems(keep: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """A name to keep that no group has is a slip, or it would be lost without a word."""
    known = dict.fromkeys(key for group in groups for key in values_of(group))
    return [
        Problem(
            code="optimizer.keep-unknown",
            what=f"no param group has a hyperparameter {name!r} to keep",
            where=f"{_KEEP} {name}",
            expected=f"names among {', '.join(known)}",
            fix=f"did you mean {guess!r}?" if (guess := nearest(name, known)) else "remove it",
        )
        for name in keep
        if groups and name not in known
    ]


def resolve(
    where: str,
    live: Mapping[str, Any],
    saved: Mapping[str, Mapping[str, Any]],
    keep: Sequence[str],
) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """The values that a group gets: (values, problems, notes).

    `live` is the running group's, `saved` each parameter's own (None where a None was recorded).
    Parameters of one group that were saved with different values cannot share it and are refused.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    notes: list[str] = []
    keys = dict.fromkeys([*live, *(key for own in saved.values() for key in own)])
    for key in keys:
        if key in keep and key in live:
            values[key] = live[key]
            continue
        per_parameter = {name: s.get(key, ABSENT) for name, s in saved.items()}
        first_name, first = next(iter(per_parameter.items()))
        odd = [n for n, v in per_parameter.items() if not _same(v, first)]
        if odd:
            problems.append(_conflict(where, key, first_name, first, odd[0], per_parameter))
        elif first is ABSENT:
            _fill(where, key, live[key], values, problems, notes)
        else:
            values[key] = first
            if key in live and key not in _EXPECTED_TO_DIFFER and not equal(live[key], first):
                notes.append(f"{where}: {key} is {first!r} as saved; built with {live[key]!r}")
    return values, problems, notes


def _same(a: Any, b: Any) -> bool:
    return a is b or (a is not ABSENT and b is not ABSENT and equal(a, b))


def _fill(
    where: str,
    key: str,
    live: Any,
    values: dict[str, Any],
    problems: list[Problem],
    notes: list[str],
) -> None:
    if live is None or key in NULL_BY_DEFAULT:
        values[key] = None
        if live is not None:
            notes.append(f"{where}: {key} is None as saved; built with {live!r}")
    elif key in EXCUSABLE:
        default = EXCUSABLE[key]
        values[key] = live if default is LIVE else default
        notes.append(f"{where}: the checkpoint has no {key}; filled with {values[key]!r}")
    else:
        problems.append(
            Problem(
                code="optimizer.missing-hyperparameter",
                what=f"the checkpoint has no {key} for {where}",
                cause="another kind or version of the optimizer saved it",
                fix=f"keep this run's value with {_KEEP} {key}, "
                f"or leave the optimizer out of the load; excused are {', '.join(EXCUSABLE)}",
            )
        )


def _conflict(
    where: str, key: str, a: str, first: Any, b: str, values: Mapping[str, Any]
) -> Problem:
    def text(value: Any) -> str:
        return "absent" if value is ABSENT else repr(value)

    return Problem(
        code="optimizer.group-conflict",
        what=f"{where}: its parameters were saved with different {key}",
        where=list_keys(values),
        actual=f"{a}: {text(first)}; {b}: {text(values[b])}",
        cause="the groups were cut differently when this was saved",
        fix=f"cut the groups as they were, or keep this run's value with {_KEEP} {key}",
    )
