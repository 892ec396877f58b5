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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_ckpt.errors import MismatchError, Problem, list_keys
from torchtitan_ckpt.state.forms import from_stored
from torchtitan_ckpt.state.hyperparameters import (
    NULL_BY_DEFAULT,
    excused_flag,
    is_parameter_shaped,
    required_state,
    resolve,
    unknown_problems,
    values_of,
)
from torchtitan_ckpt.state.leaves import Unread, default_node, leaf_names, rebuild
from torchtitan_ckpt.state.optimizer import LAYOUT, NONE, Owned
from torchtitan_ckpt.state.slots import Fleet, Optimizers, Slot, fleet_of
from torchtitan_ckpt.state.steps import STEP, Steps
from torchtitan_ckpt.state.swapped import emptied_problem, required_of
from torchtitan_ckpt.state.takeover import Taken, take_over
from torchtitan_ckpt.state.tensors import local_of


@dataclass(slots=True)
class _Plan:
    """What will be taken over, and what is wrong or worth saying."""

    taken: Taken = field(default_factory=Taken)
    steps: dict[tuple[int, int], Steps] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    without_state: list[Slot] = field(default_factory=list)
    pickled_none: list[str] = field(default_factory=list)


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
) -> Callable[[], list[str]]:
    """Everything of `load_optimizer_state_dict` that can fail on what was read; changes nothing.

    What it returns does the rest.
    """
    fleet = fleet_of(optimizers, model_parts)
    for speaker in fleet.speakers:
        speaker.checkpoint_wait()
    plan = _Plan()
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
        return _said(plan)

    return apply


def _said(plan: _Plan) -> list[str]:
    notes = list(dict.fromkeys(plan.notes))
    # Of an optimizer without any state, such as plain SGD, there is nothing to say.
    stateful = plan.taken.states.keys() | plan.taken.spoken.keys()
    bare = [
        slot.names.canonical
        for slot in plan.without_state
        if {id(slot.optimizer), id(slot.speaker)} & stateful
    ]
    if bare:
        notes.append(f"no state in the checkpoint, as when it was saved: {list_keys(bare)}")
    if plan.pickled_none:
        notes.append(f"a pickled None counts as absent: {list_keys(plan.pickled_none)}")
    return notes


def _plan_groups(
    slots: Sequence[Slot],
    owners: Mapping[Slot, str | None],
    owned: Owned,
    state: Mapping[str, Any],
    keep: Sequence[str],
    plan: _Plan,
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


def _group_values(keys: Mapping[str, str], state: Mapping[str, Any], plan: _Plan) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for suffix, key in keys.items():
        value = state[key]
        if isinstance(value, Unread):
            plan.problems.append(_unread(key))
        elif suffix == NONE:
            if not isinstance(value, list) or not all(isinstance(k, str) for k in value):
                plan.problems.append(_malformed(key))
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
    plan: _Plan,
) -> None:
    name = slot.names.canonical
    group = plan.taken.groups.get((id(slot.optimizer), slot.group_index), slot.group)
    live = slot.state()
    if slot.speaker is None:
        emptied = [emptied_problem(name, key, value) for key, value in live.items()]
        plan.problems += [problem for problem in emptied if problem is not None]
    names = local.get(id(slot.optimizer), frozenset()) if slot.speaker is None else None
    tree = _tree(slot.parameter, keys, state, live, names, plan)
    if tree is None:
        return
    if not tree:
        plan.without_state.append(slot)
        return
    if slot.speaker is not None:  # it tells no None, and is told none
        tree = {key: value for key, value in tree.items() if value is not None}
    plan.steps[id(slot.optimizer), slot.group_index].give_state(name, tree, live)
    _check(slot, group, live, tree, keep, plan)
    if slot.speaker is not None:
        plan.taken.spoken.setdefault(id(slot.speaker), {})[slot.parameter] = tree
        return
    step = tree.get(STEP)
    if isinstance(step, Tensor) and (group.get("fused") or group.get("capturable")):
        tree[STEP] = step.to(local_of(slot.parameter).device)
    plan.taken.states.setdefault(id(slot.optimizer), {})[slot.parameter] = tree


def _tree(
    parameter: Tensor | None,
    keys: Mapping[str, str],
    state: Mapping[str, Any],
    live: Mapping[Any, Any],
    local: frozenset[str] | None,
    plan: _Plan,
) -> dict[Any, Any] | None:
    """The nested state of one owner from its flat values, or None after a problem.

    `local` names the plain shards among `live`; None asks for plain shards throughout.
    """
    before = len(plan.problems)
    flat = {suffix: state[key] for suffix, key in keys.items()}
    plan.problems += [_unread(keys[s]) for s, v in flat.items() if isinstance(v, Unread)]
    layout = flat.pop(LAYOUT, None)
    layout = layout if isinstance(layout, dict) else {}
    forms = layout.get("forms") or {}
    nulls = [suffix for suffix, value in flat.items() if value is None]
    plan.pickled_none += [keys[suffix] for suffix in nulls]
    flat = {suffix: value for suffix, value in flat.items() if value is not None}
    node = layout.get("node") or default_node(flat)
    try:
        lost = [leaf for leaf in leaf_names(node) if leaf not in flat]
    except (LookupError, TypeError, ValueError):
        plan.problems.append(_malformed(keys[LAYOUT]))
        return None
    if lost:
        plan.problems.append(_missing(next(iter(keys.values())).rpartition(".")[0], lost))
    if len(plan.problems) > before:
        return None

    def leaf(name: str) -> Any:
        value = flat[name]
        if not isinstance(value, Tensor):
            return value
        if local is None:
            return from_stored(parameter, value, "local")
        return from_stored(parameter, value, forms.get(name), live.get(name), name in local)

    try:
        tree = rebuild(node, leaf)
    except (LookupError, TypeError, ValueError):
        tree = None
    if not isinstance(tree, dict):
        plan.problems.append(_malformed(keys[LAYOUT]))
        return None
    return tree


def _check(
    slot: Slot,
    group: Mapping[str, Any],
    live: Mapping[str, Any],
    tree: dict[str, Any],
    keep: Sequence[str],
    plan: _Plan,
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
    if plan.steps[id(slot.optimizer), slot.group_index].only_in_group:
        needed.discard(STEP)
    lost = sorted(map(str, needed))
    if lost:
        plan.problems.append(_missing(f"state.{name}.", lost))
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
    fleet: Fleet, owned: Owned, state: Mapping[str, Any], keep: Sequence[str], plan: _Plan
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
        tree = _tree(None, owned.state(owned.label_of(label)), state, live, frozenset(), plan)
        if tree:
            plan.taken.states.setdefault(id(optimizer), {}).update(tree)
        elif live:
            plan.notes.append(f"{label}: the checkpoint has no such state; the present one stays")


def _unread(key: str) -> Problem:
    return Problem(code="optimizer.unread", what=f"{key} was planned and never read", where=key)


def _malformed(key: str) -> Problem:
    return Problem(
        code="optimizer.malformed",
        what=f"{key} does not describe what this package writes there",
        where=key,
        cause="the checkpoint was edited or damaged",
    )


def _missing(where: str, keys: Sequence[str]) -> Problem:
    return Problem(
        code="optimizer.missing-state",
        what=f"{where.removeprefix('state.').rstrip('.')}: the checkpoint lacks {', '.join(keys)}",
        where=where,
        cause="another optimizer saved this, or the checkpoint was edited",
        fix="leave the optimizer out of the load, or use the optimizer that saved it",
    )
