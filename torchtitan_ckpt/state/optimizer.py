"""Optimizer state as one flat dict under parameter names, for saving and for planning a load.

Names on disk are torchtitan 0.3.0's: `state.<fqn>.<key>` and `param_groups.<fqn>.<key>`, the latter
once a parameter. What those names cannot say is kept beside them under keys that begin with `@`,
which no parameter or state can be called and other readers do not ask for:

- `state.<fqn>.@layout`: structure that flat names lose (None, int keys, lists, tuples) and tensors
  that are not sharded as their parameter is. Absent for every ordinary optimizer.
- `param_groups.<fqn>.@none`: hyperparameters that are None (but `foreach` and `fused`, which are
  None where absent).
- `param_groups.@empty.<class>.<k>.<group>.<key>`: groups without parameters have no name; they go
  by the optimizer's class, its number among those of the class, and their own number.
- `state.@global.<class>.<k>.<key>`: state that belongs to no parameter.

None never lies in the dict. An empty state dict of a parameter equals no state. State of a
parameter that is in no group of its optimizer has no place in the file, and is refused. Reading
changes nothing in the optimizer: no entry is created, no step is taken. Loading is in
`optimizer_load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_ckpt.errors import MismatchError, Problem, SaveError, list_keys
from torchtitan_ckpt.manifest import Manifest, TensorEntry
from torchtitan_ckpt.state.forms import Form, allocate, to_stored
from torchtitan_ckpt.state.hyperparameters import (
    NULL_BY_DEFAULT,
    required_state,
    unstorable_problems,
    values_of,
)
from torchtitan_ckpt.state.leaves import UNREAD, default_node, flatten, why_not_storable
from torchtitan_ckpt.state.names import Names, as_parts, parameter_names
from torchtitan_ckpt.state.owned import Owned
from torchtitan_ckpt.state.slots import Fleet, Optimizers, Slot, fleet_of
from torchtitan_ckpt.state.swapped import emptied_problem
from torchtitan_ckpt.state.tensors import local_of

LAYOUT = "@layout"
NONE = "@none"


def optimizer_state_dict(
    optimizers: Optimizers, model_parts: nn.Module | Iterable[nn.Module]
) -> dict[str, Any]:
    """The state of all optimizers as one flat dict; the tensors are live, not copies.

    Raises `SaveError` with every parameter whose state cannot be saved truthfully: emptied storage
    without `CheckpointableState`, values that no file holds, one name for two parameters, state of
    a parameter that was taken out of its group.
    """
    parts = as_parts(model_parts)
    fleet = fleet_of(optimizers, parts)
    for speaker in fleet.speakers:
        speaker.checkpoint_wait()
    flat: dict[str, Any] = {}
    problems: list[Problem] = []
    local = fleet.local_leaves()
    in_state: dict[tuple[int, int], set[str]] = {}
    for slot in fleet.slots:
        name = slot.names.canonical
        state = slot.state()
        problems += _lost_moments(slot, state)
        spoken = slot.speaker is not None
        names = local.get(id(slot.optimizer), frozenset())
        if spoken:  # what a speaker tells with the state (`step`) is not written with the group too
            in_state.setdefault((id(slot.optimizer), slot.group_index), set()).update(state)
        problems += _put_state(flat, name, slot.parameter, state, None if spoken else names)
    for slot in fleet.slots:
        told = in_state.get((id(slot.optimizer), slot.group_index), set())
        values = {key: v for key, v in values_of(slot.group).items() if key not in told}
        problems += _put_group(flat, slot.names.canonical, values)
    for owner, _, group in fleet.empty_groups():
        problems += _put_group(flat, owner, values_of(group))
    for owner, _, state in fleet.globals():
        problems += _put_state(flat, owner, None, state, frozenset())
    problems += _left_behind(fleet, parts)
    if problems:
        raise SaveError(*problems)
    return flat


def optimizer_template(
    optimizers: Optimizers,
    model_parts: nn.Module | Iterable[nn.Module],
    manifest: Manifest,
    prefix: str = "optimizer.",
) -> dict[str, Any]:
    """What to read of a checkpoint for these optimizers, stepped or fresh.

    Keys are without `prefix`. A stored tensor gets an uninitialised target of its dtype, laid out
    as the parameter is sharded now; a stored object gets `UNREAD`. The targets are never the
    optimizer's own tensors, so a read that fails half-way changes nothing, and no step is taken to
    make them. Names of other processes' parameters are left out.
    """
    fleet = fleet_of(optimizers, model_parts)
    stored = sorted(k.removeprefix(prefix) for k in manifest.keys if k.startswith(prefix))
    by_owner = Owned(stored, fleet)
    problems: list[Problem] = []
    template: dict[str, Any] = {}
    for slot in fleet.slots:
        owner = by_owner.owner_of(slot, problems)
        live = slot.state() if slot.speaker is None else {}
        for section, keys in by_owner.keys(owner):
            for suffix, key in keys.items():
                entry = manifest.tensors.get(prefix + key)
                if entry is None:
                    template[key] = UNREAD
                elif section == "state":
                    device = _device(slot, suffix, live.get(suffix))
                    template[key] = _target(slot.parameter, entry, device)
                else:
                    template[key] = _target(None, entry, _group_device(slot.group, suffix))
    for owner in by_owner.without_parameter(fleet):
        for _, keys in by_owner.keys(owner):
            for key in keys.values():
                entry = manifest.tensors.get(prefix + key)
                cpu = torch.device("cpu")
                template[key] = UNREAD if entry is None else _target(None, entry, cpu)
    if problems:
        raise MismatchError(*problems)
    return template


def _put_state(
    flat: dict[str, Any],
    owner: str,
    parameter: Tensor | None,
    state: Mapping[Any, Any],
    local: frozenset[str] | None,
) -> list[Problem]:
    """Put one owner's state into `flat`. `local` names its plain shards; None means all of them."""
    problems: list[Problem] = []
    leaves, node = flatten(state, reserved=(LAYOUT,))
    forms: dict[str, Form] = {}
    for name, value in leaves.items():
        emptied = emptied_problem(owner, name, value)
        if emptied is not None:
            problems.append(emptied)
        elif (why := why_not_storable(value)) is not None:
            problems.append(
                Problem(
                    code="optimizer.unstorable",
                    what=f"{owner}: its optimizer state {name} cannot be saved",
                    where=f"state.{owner}.{name}",
                    cause=why,
                )
            )
        elif isinstance(value, Tensor):
            value, form = to_stored(parameter, value, local is None or name in local)
            if form is not None and not (local is None and form == "local"):
                forms[name] = form
        flat[f"state.{owner}.{name}"] = value
    odd = node != default_node(leaves) and bool(state)
    if odd or forms:
        flat[f"state.{owner}.{LAYOUT}"] = {"node": node if odd else None, "forms": forms}
    return problems


def _put_group(flat: dict[str, Any], owner: str, values: Mapping[str, Any]) -> list[Problem]:
    problems = unstorable_problems(owner, values)
    for key, value in values.items():
        if value is not None:
            flat[f"param_groups.{owner}.{key}"] = value
    nulls = [key for key, v in values.items() if v is None and key not in NULL_BY_DEFAULT]
    if nulls:
        flat[f"param_groups.{owner}.{NONE}"] = nulls
    return problems


def _lost_moments(slot: Slot, state: Mapping[str, Any]) -> list[Problem]:
    """A moment that is None in a stepped Adam was moved away; saving would record its loss."""
    if slot.speaker is not None or not state:
        return []
    lost = [key for key in required_state(slot.optimizer, slot.group) if state.get(key, 0) is None]
    return [
        Problem(
            code="optimizer.none-moment",
            what=f"{slot.names.canonical}: its optimizer state {key} is None",
            where=f"state.{slot.names.canonical}.{key}",
            cause=f"{type(slot.optimizer).__name__} cannot step without it; "
            "it was moved elsewhere, or an earlier load put a None over it",
            fix="let the optimizer implement torchtitan_ckpt.state.swapped.CheckpointableState",
        )
        for key in lost
    ]


def _left_behind(fleet: Fleet, parts: Sequence[nn.Module]) -> list[Problem]:
    """State that would be left out of the file in silence; torch's own `state_dict` fails too."""
    left: dict[str, list[str]] = {}
    known = parameter_names(parts)
    for optimizer, parameter in fleet.outside_groups():
        name = known.get(id(parameter), Names(f"a parameter {tuple(parameter.shape)} of no model"))
        left.setdefault(type(optimizer).__name__, []).append(name.canonical)
    return [
        Problem(
            code="optimizer.no-group",
            what=f"{kind} holds state of parameters that are in none of its groups: "
            f"{list_keys(names)}",
            cause="they were taken out of their groups, or replaced in the model",
            fix="leave them in a group, with requires_grad False to freeze them, "
            "or delete their entries of optimizer.state",
        )
        for kind, names in left.items()
    ]


def _target(parameter: Tensor | None, entry: TensorEntry, device: torch.device) -> Tensor:
    return allocate(parameter, entry.shape, getattr(torch, entry.dtype), device)


def _device(slot: Slot, suffix: str, live: Any) -> torch.device:
    """Where a state tensor goes: where it is now; the host for swappers and for `step`."""
    if slot.speaker is not None:
        return torch.device("cpu")
    if isinstance(live, Tensor):
        return local_of(live).device
    if suffix == "step" and not (slot.group.get("fused") or slot.group.get("capturable")):
        return torch.device("cpu")
    return local_of(slot.parameter).device


def _group_device(group: Mapping[str, Any], suffix: str) -> torch.device:
    live = group.get(suffix)
    return live.device if isinstance(live, Tensor) else torch.device("cpu")
