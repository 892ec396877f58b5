"""What a load of optimizer state will give to whom: collected, checked, and told. Nothing changes.

The rules stand in `optimizer_load`, which fills the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_ckpt.errors import Problem, list_keys
from torchtitan_ckpt.state.forms import from_stored
from torchtitan_ckpt.state.leaves import Unread, default_node, leaf_names, rebuild
from torchtitan_ckpt.state.optimizer import LAYOUT
from torchtitan_ckpt.state.slots import Slot
from torchtitan_ckpt.state.steps import Steps
from torchtitan_ckpt.state.takeover import Taken


@dataclass(slots=True)
class Plan:
    """What will be taken over, and what is wrong or worth saying.

    `laid_out` are tensors under a sharded parameter of which neither the file nor the optimizer
    says how they lie on ranks; where the file says it of others (`forms`), it would say it of them.
    """

    taken: Taken = field(default_factory=Taken)
    steps: dict[tuple[int, int], Steps] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    without_state: list[Slot] = field(default_factory=list)
    pickled_none: list[str] = field(default_factory=list)
    laid_out: list[str] = field(default_factory=list)
    forms: bool = False

    def steps_of(self, slot: Slot) -> Steps:
        return self.steps[id(slot.optimizer), slot.group_index]

    def said(self) -> list[str]:
        """Notes for the log, each once."""
        notes = list(dict.fromkeys(self.notes))
        # Of an optimizer without any state, such as plain SGD, there is nothing to say.
        stateful = self.taken.states.keys() | self.taken.spoken.keys()
        bare = [
            slot.names.canonical
            for slot in self.without_state
            if {id(slot.optimizer), id(slot.speaker)} & stateful
        ]
        if bare:
            notes.append(f"no state in the checkpoint, as when it was saved: {list_keys(bare)}")
        if self.pickled_none:
            notes.append(f"a pickled None counts as absent: {list_keys(self.pickled_none)}")
        if self.laid_out and not self.forms:
            notes.append(
                "saved without shards, and now DTensors that every rank holds whole: "
                f"{list_keys(self.laid_out)}; an optimizer that wants plain tensors there must "
                "have stepped before the load, or speak CheckpointableState"
            )
        return notes


def state_tree(
    parameter: Tensor | None,
    keys: Mapping[str, str],
    state: Mapping[str, Any],
    live: Mapping[Any, Any],
    local: frozenset[str] | None,
    plan: Plan,
) -> dict[Any, Any] | None:
    """The nested state of one owner from its flat values, or None after a problem.

    `local` names the plain shards among `live`; None asks for plain shards throughout.
    """
    before = len(plan.problems)
    flat = {suffix: state[key] for suffix, key in keys.items()}
    plan.problems += [unread(keys[s]) for s, v in flat.items() if isinstance(v, Unread)]
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
        plan.problems.append(malformed(keys[LAYOUT]))
        return None
    if lost:
        plan.problems.append(missing(next(iter(keys.values())).rpartition(".")[0], lost))
    if len(plan.problems) > before:
        return None
    plan.forms = plan.forms or bool(forms)
    shape = None if parameter is None else parameter.shape

    def leaf(name: str) -> Any:
        value, own = flat[name], live.get(name)
        if not isinstance(value, Tensor):
            return value
        if local is None:
            return from_stored(parameter, value, "local")
        stored = from_stored(parameter, value, forms.get(name), own, name in local)
        unsaid = own is None and name not in forms
        if unsaid and isinstance(stored, DTensor) and stored.shape != shape:
            plan.laid_out.append(keys[name])
        return stored

    try:
        tree = rebuild(node, leaf)
    except (AttributeError, LookupError, TypeError, ValueError):
        tree = None
    if not isinstance(tree, dict):
        plan.problems.append(malformed(keys[LAYOUT]))
        return None
    return tree


def unread(key: str) -> Problem:
    return Problem(code="optimizer.unread", what=f"{key} was planned and never read", where=key)


def malformed(key: str) -> Problem:
    return Problem(
        code="optimizer.malformed",
        what=f"{key} does not describe what this package writes there",
        where=key,
        cause="the checkpoint was edited or damaged",
    )


def missing(where: str, keys: Sequence[str]) -> Problem:
    return Problem(
        code="optimizer.missing-state",
        what=f"{where.removeprefix('state.').rstrip('.')}: the checkpoint lacks {', '.join(keys)}",
        where=where,
        cause="another optimizer saved this, or the checkpoint was edited",
        fix="leave the optimizer out of the load, or use the optimizer that saved it",
    )
