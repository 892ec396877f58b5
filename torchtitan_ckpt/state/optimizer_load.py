"""Loading optimizer state: everything is prepared and checked first, then taken over as a whole.

Rules, wherever file and running optimizer differ:

- The file wins: for every hyperparameter and every state value, in its own dtype and type.
- The file has a tensor where the optimizer holds None or nothing: the tensor is taken.
- The file records None (`@layout`, `@none`): None is taken, but for state that the optimizer
  certainly needs. A pickled None, as torchtitan 0.3.0 writes, is no record of anything: in a state
  as in a group it counts as absent, and is said, unless None is what the key holds anyway.
- `step` may lie with the state or with the group, in the file as here: `steps` says which.
- The file lacks a key: a parameter with no state at all had none when saved (it never got a
  gradient), so it has none afterwards; it is listed. A parameter with some state, but without a key
  that the optimizer certainly needs or holds now, is an error that names it - unless the group, as
  loaded, switches that key's feature off (`amsgrad`, `momentum`, `centered`). What is needed is
  known of torch's optimizers, of subclasses that step as those do, and of a speaker that says so.
- `amsgrad` follows the file too. To change it on resume, name it in `keep`: switched on, the maxima
  start from zero, as in a fresh state; switched off, they are dropped. Both are said.
- A parameter that the file does not know is an error; parameters of the file that no optimizer of
  this process holds are for the caller to judge, over all ranks.

Hooks registered with `register_load_state_dict_post_hook` run after the take-over, and torch's own
`__setstate__` runs, so optimizers that keep second copies can refresh them. Pre-hooks do not run:
there is no `state_dict` of torch's shape to hand them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_ckpt.errors import MismatchError, Problem, list_keys
from torchtitan_ckpt.state.change import Change
from torchtitan_ckpt.state.hyperparameters import (
    NULL_BY_DEFAULT,
    excused_flag,
    is_parameter_shaped,
    required_state,
    resolve,
    unknown_problems,
    values_of,
)
from torchtitan_ckpt.state.leaves import Unread
from torchtitan_ckpt.state.optimizer import NONE
from torchtitan_ckpt.state.optimizer_plan import Plan, malformed, missing, state_tree, unread
from torchtitan_ckpt.state.owned import Owned
from torchtitan_ckpt.state.slots import Fleet, Optimizers, Slot, fleet_of
from torchtitan_ckpt.state.steps import STEP, Steps
from torchtitan_ckpt.state.swapped import emptied_problem, required_of
from torchtitan_ckpt.state.takeover import remember, take_over
from torchtitan_ckpt.state.tensors import local_of


def load_optimizer_state_dict(
    optimizers: Optimizers,
    model_parts: nn.Module | Iterable[nn.Module],
    state: Mapping[str, Any],
    *,
    keep: Sequence[str] = (),
) -> list[str]:
    """Take over `state`, as `optimizer_template` had it read. Returns notes for the log.

    The tensors of `state` become the optimizers' own; do not write to them afterwards. `keep` names
    hyperparameters whose running values stay. Raises `MismatchError` with everything that does not
    fit; whatever fails, all optimizers are as they were before.
    """
    return prepare_optimizer_load(optimizers, model_parts, state, keep=keep)()


def prepare_optimizer_load(
    optimizers: Optimizers,
    model_parts: nn.Module | Iterable[nn.Module],
    state: Mapping[str, Any],
    *,
    keep: Sequence[str] = (),
) -> Change:
    """Everything of `load_optimizer_state_dict` that can fail on what was read; changes nothing.

    What it returns does the rest.
    """
    fleet = fleet_of(optimizers, model_parts)
    for speaker in fleet.speakers:
        speaker.checkpoint_wait()
    plan = Plan()
    owned = Owned(state, fleet)
    owners = {slot: owned.owner_of(slot, plan.problems) for slot in fleet.slots}
    known = [slot for slot in fleet.slots if owners[slot] is not None]
    unknown = [slot.names.canonical for slot in fleet.slots if owners[slot] is None]
    if unknown:
        plan.problems.append(
            Problem(
                code="optimizer.missing",
                what=f"the checkpoint has no optimizer state or group for {list_keys(unknown)}",
                cause="parameters that were frozen or did not exist when it was saved"
                if known
                else "a model-only checkpoint, or one of another model",
                fix="leave the optimizer out of the load, or freeze them as in the saving run",
            )
        )
    groups = [group for optimizer in fleet.optimizers for group in optimizer.param_groups]
    plan.problems += unknown_problems(keep, groups)
    local = fleet.local_leaves()
    _plan_groups(known, owners, owned, state, keep, plan)
    for slot in known:
        _plan_state(slot, owned.state(owners[slot]), state, local, keep, plan)
    _plan_labels(fleet, owned, state, keep, plan)
    if plan.problems:
        raise MismatchError(*plan.problems)

    def apply() -> list[str]:
        take_over(fleet, plan.taken)
        return plan.said()

    return Change(apply, lambda: remember(fleet))


def _plan_groups(
    slots: Sequence[Slot],
    owners: Mapping[Slot, str | None],
    owned: Owned,
    state: Mapping[str, Any],
    keep: Sequence[str],
    plan: Plan,
) -> None:
    members: dict[tuple[int, int], list[Slot]] = {}
    for slot in slots:
        members.setdefault((id(slot.optimizer), slot.group_index), []).append(slot)
    for where, group in members.items():
        saved, states = {}, {}
        for slot in group:
            name, owner = slot.names.canonical, owners[slot]
            saved[name] = _group_values(owned.group(owner), state, plan)
            held = {suffix: state[key] for suffix, key in owned.state(owner).items()}
            states[name] = {suffix: value for suffix, value in held.items() if value is not None}
        plan.steps[where] = Steps.of(group, states, saved)
        label = f"{type(group[0].optimizer).__name__} group {where[1]}"
        plan.notes += [f"{label}: {note}" for note in plan.steps[where].give_group(saved)]
        values, problems, notes = resolve(label, values_of(group[0].group), saved, keep)
        plan.taken.groups[where] = values
        plan.problems += problems
        plan.notes += notes


def _group_values(keys: Mapping[str, str], state: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for suffix, key in keys.items():
        value = state[key]
        if isinstance(value, Unread):
            plan.problems.append(unread(key))
        elif suffix == NONE:
            if not isinstance(value, list) or not all(isinstance(k, str) for k in value):
                plan.problems.append(malformed(key))
                continue
            values.update(dict.fromkeys(value))
        elif value is not None:
            values[suffix] = value
        elif suffix not in NULL_BY_DEFAULT:
            plan.pickled_none.append(key)
    return values


def _plan_state(
    slot: Slot,
    keys: Mapping[str, str],
    state: Mapping[str, Any],
    local: Mapping[int, frozenset[str]],
    keep: Sequence[str],
    plan: Plan,
) -> None:
    name = slot.names.canonical
    group = plan.taken.groups.get((id(slot.optimizer), slot.group_index), slot.group)
    live = slot.state()
    if slot.speaker is None:
        emptied = [emptied_problem(name, key, value) for key, value in live.items()]
        plan.problems += [problem for problem in emptied if problem is not None]
    names = local.get(id(slot.optimizer), frozenset()) if slot.speaker is None else None
    tree = state_tree(slot.parameter, keys, state, live, names, plan)
    if tree is None:
        return
    if not tree:
        plan.without_state.append(slot)
        return
    if slot.speaker is not None:  # it tells no None, and is told none
        tree = {key: value for key, value in tree.items() if value is not None}
    plan.steps_of(slot).give_state(name, tree, live)
    _check(slot, group, live, tree, keep, plan)
    if slot.speaker is not None:
        plan.taken.spoken.setdefault(id(slot.speaker), {})[slot.parameter] = tree
        return
    step = tree.get(STEP)
    if isinstance(step, Tensor) and (group.get("fused") or group.get("capturable")):
        tree[STEP] = step.to(local_of(slot.parameter).device)
    plan.taken.states.setdefault(id(slot.optimizer), {})[slot.parameter] = tree


def _check(
    slot: Slot,
    group: Mapping[str, Any],
    live: Mapping[str, Any],
    tree: dict[str, Any],
    keep: Sequence[str],
    plan: Plan,
) -> None:
    """Completeness and shapes of one parameter's state, and what `keep` changes in it."""
    name = slot.names.canonical
    if "amsgrad" in keep:
        if not group.get("amsgrad") and tree.pop("max_exp_avg_sq", None) is not None:
            plan.notes.append("amsgrad switched off: max_exp_avg_sq dropped")
        elif (
            group.get("amsgrad")
            and isinstance(tree.get("exp_avg_sq"), Tensor)
            and tree.get("max_exp_avg_sq") is None
        ):
            tree["max_exp_avg_sq"] = torch.zeros_like(tree["exp_avg_sq"])
            plan.notes.append("amsgrad switched on: max_exp_avg_sq starts from zero")
    held = {key for key, value in live.items() if value is not None}
    for key in sorted((held - tree.keys()), key=str):
        if excused_flag(key, group):
            plan.notes.append(f"{key} dropped: the checkpoint's group does not use it")
    needed = {key for key in held if not excused_flag(key, group)} - tree.keys()
    needed |= {key for key in _required(slot, group) if tree.get(key) is None}
    if plan.steps_of(slot).only_in_group:
        needed.discard(STEP)
    lost = sorted(map(str, needed))
    if lost:
        plan.problems.append(missing(f"state.{name}.", lost))
    shape = local_of(slot.parameter).shape if slot.speaker is not None else slot.parameter.shape
    for key, value in tree.items():
        if not isinstance(value, Tensor):
            continue
        own = live.get(key)
        wanted = own.shape if isinstance(own, Tensor) else None
        if wanted is None and is_parameter_shaped(slot.optimizer, key):
            wanted = shape
        if wanted is not None and value.shape != wanted:
            plan.problems.append(
                Problem(
                    code="optimizer.shape",
                    what=f"{name}: its optimizer state {key} has another shape",
                    where=f"state.{name}.{key}",
                    expected=str(tuple(wanted)),
                    actual=str(tuple(value.shape)),
                )
            )


def _required(slot: Slot, group: Mapping[str, Any]) -> frozenset[str]:
    if slot.speaker is not None:
        return required_of(slot.speaker, group)
    return required_state(slot.optimizer, group)


def _plan_labels(
    fleet: Fleet, owned: Owned, state: Mapping[str, Any], keep: Sequence[str], plan: Plan
) -> None:
    for label, optimizer, group in fleet.empty_groups():
        keys = owned.group(owned.label_of(label))
        index = int(label.rpartition(".")[2])
        if not keys:
            plan.notes.append(f"{label}: the checkpoint has no such group; its values stay")
            continue
        saved = {label: _group_values(keys, state, plan)}
        values, problems, notes = resolve(label, values_of(group), saved, keep)
        plan.taken.groups[(id(optimizer), index)] = values
        plan.problems += problems
        plan.notes += notes
    for label, optimizer, live in fleet.globals():
        tree = state_tree(None, owned.state(owned.label_of(label)), state, live, frozenset(), plan)
        if tree:
            plan.taken.states.setdefault(id(optimizer), {}).update(tree)
        elif live:
            plan.notes.append(f"{label}: the checkpoint has no such state; the present one stays")
