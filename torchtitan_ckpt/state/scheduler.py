"""State of learning-rate schedulers: one, several, chained, of any kind.

torchtitan keeps one number for all of them, `last_epoch`, since its schedules are functions of it.
Where that is the whole truth (`LambdaLR` with plain functions, all at one epoch) nothing else is
written, any number of schedulers loads it, and the rate is computed anew from this run's base
rates, as torchtitan does.

Otherwise each parameter has beside it, as `schedulers.of.<fqn>`, what the schedulers over its
optimizer say of its group. So optimizers and groups may be divided otherwise at the load, as other
pipeline stages divide them, and the number must be the same. A scheduler over no parameter has its
state as `schedulers.<i>`; files of earlier versions have all of them so.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchtitan_ckpt.errors import MismatchError, Problem, SaveError, list_keys
from torchtitan_ckpt.manifest import Manifest
from torchtitan_ckpt.state.change import Change, remember
from torchtitan_ckpt.state.groupwise import Differ, joined, of_group, widths
from torchtitan_ckpt.state.leaves import UNREAD, Unread, equal, why_not_storable
from torchtitan_ckpt.state.slots import Slot, fleet_of
from torchtitan_ckpt.state.theirs import give, state_of

Schedulers = LRScheduler | Iterable[LRScheduler]
Parts = nn.Module | Iterable[nn.Module]

LAST_EPOCH = "last_epoch"
_FULL = "schedulers."
_OF = "schedulers.of."
_COUNTER = "@Counter"  # MultiStepLR's milestones: no plain container


def scheduler_state_dict(schedulers: Schedulers, model_parts: Parts = ()) -> dict[str, Any]:
    """The state of all schedulers as one flat dict. Raises `SaveError` for what no file can hold.

    >>> # {"last_epoch": 7} or {"last_epoch": 7, "schedulers.of.norm.weight": [{...}]}
    """
    found = _all(schedulers)
    epochs = [epoch for s in found if (epoch := getattr(s, LAST_EPOCH, None)) is not None]
    flat: dict[str, Any] = {LAST_EPOCH: epochs[0]} if epochs else {}
    if _is_whole_truth(found):
        return flat
    states = [_plain(state_of(scheduler)) for scheduler in found]
    problems = [
        Problem(
            code="scheduler.unstorable",
            what=f"scheduler {index} ({type(scheduler).__name__}) cannot be saved",
            cause=why,
            fix="keep functions and objects out of its state_dict",
        )
        for index, (scheduler, state) in enumerate(zip(found, states, strict=True))
        if (why := why_not_storable(state)) is not None
    ]
    if problems:
        raise SaveError(*problems)
    for index, (state, slots) in enumerate(zip(states, _slots(found, model_parts), strict=True)):
        for slot in slots:
            groups = len(slot.optimizer.param_groups)
            part = of_group(state, slot.group_index, groups)
            flat.setdefault(f"{_OF}{slot.names.canonical}", []).append(part)
        if not slots:
            flat[f"{_FULL}{index}"] = state
    return flat


def scheduler_template(manifest: Manifest, prefix: str) -> dict[str, Any]:
    """What to read: everything that the file has under `prefix`, keys without it."""
    return {k.removeprefix(prefix): UNREAD for k in sorted(manifest.keys) if k.startswith(prefix)}


def load_scheduler_state(
    schedulers: Schedulers, values: Mapping[str, Any], model_parts: Parts = ()
) -> None:
    """Restore all schedulers, or none: raises `MismatchError` and leaves them as they were.

    Group values such as `lr` are the optimizers' and come back with their state.
    """
    prepare_scheduler_load(schedulers, values, model_parts)()


def prepare_scheduler_load(
    schedulers: Schedulers, values: Mapping[str, Any], model_parts: Parts = ()
) -> Change:
    """The refusals of `load_scheduler_state`; the change restores the schedulers."""
    found = _all(schedulers)
    full = {key: value for key, value in values.items() if key.startswith(_FULL)}
    if any(isinstance(value, Unread) for value in values.values()):
        raise _mismatch("scheduler.unread", "its values were planned and never read")
    if full and not _is_whole_truth(found):
        states = _full_states(found, full, _slots(found, model_parts))
        return Change(lambda: _load_full(found, states), lambda: remember(*found))
    epoch = _epoch(found, values)
    rates = [_rates(scheduler, epoch) for scheduler in found]
    return Change(lambda: _load_epoch(found, epoch, rates), lambda: remember(*found))


# --- full states --------------------------------------------------------------------------------


def _slots(found: Sequence[LRScheduler], model_parts: Parts) -> list[list[Slot]]:
    """For each scheduler, the parameters that it is over."""
    given = [getattr(scheduler, "optimizer", None) for scheduler in found]
    optimizers = {id(o): o for o in given if isinstance(o, Optimizer)}
    slots = fleet_of(optimizers.values(), model_parts).slots
    return [[slot for slot in slots if slot.optimizer is optimizer] for optimizer in given]


def _full_states(
    found: Sequence[LRScheduler], full: Mapping[str, Any], slots: Sequence[Sequence[Slot]]
) -> list[dict[str, Any]]:
    """The state of each scheduler, out of its parameters' entries or by its number."""
    by_parameter = any(key.startswith(_OF) for key in full)
    named = [bool(by_parameter and own) for own in slots]
    numbers = {f"{_FULL}{index}" for index, own in enumerate(named) if not own}
    stored = {key for key in full if not key.startswith(_OF)}
    if numbers != stored:
        raise _count(
            len(numbers),
            len(stored),
            "schedulers over no parameter, or a checkpoint of an earlier version, which kept all "
            "schedulers by number; and other optimizers, or another pipeline degree",
        )
    entries = [_entries(own, full) if named[i] else [] for i, own in enumerate(slots)]
    over = Counter(id(own[0].optimizer) for own in slots if own)
    seen: Counter[int] = Counter()
    states = []
    for index, (scheduler, own) in enumerate(zip(found, slots, strict=True)):
        live = _plain(state_of(scheduler))
        if named[index]:
            optimizer = id(own[0].optimizer)
            state = _of_parameters(own, entries[index], seen[optimizer], over[optimizer], live)
            seen[optimizer] += 1
        else:
            state = full[f"{_FULL}{index}"]
        states.append(_unplain(_checked(state, live, scheduler)))
    return states


def _entries(slots: Sequence[Slot], full: Mapping[str, Any]) -> list[Any]:
    """What the file has for each parameter."""
    keys = [next((k for n in s.names.all if (k := f"{_OF}{n}") in full), None) for s in slots]
    lacking = [s.names.canonical for s, key in zip(slots, keys, strict=True) if key is None]
    if lacking:
        raise _mismatch("scheduler.missing", f"no schedule in the file for {list_keys(lacking)}")
    return [full[key] for key in keys if key is not None]


def _of_parameters(
    slots: Sequence[Slot], entries: Sequence[Any], place: int, count: int, live: Any
) -> Any:
    """The state of the scheduler that is number `place` of `count` over one optimizer."""
    views: dict[int, Any] = {}
    for slot, said in zip(slots, entries, strict=True):
        if not isinstance(said, list) or len(said) != count:
            actual = len(said) if isinstance(said, list) else 0
            raise _count(count, actual, f"schedulers over the optimizer of {slot.names.canonical}")
        if not equal(views.setdefault(slot.group_index, said[place]), said[place]):
            raise _differs(slot)
    try:
        return joined(views, live)
    except Differ:
        raise _differs(slots[0]) from None


def _checked(state: Any, live: dict[str, Any], scheduler: LRScheduler) -> dict[str, Any]:
    """`state`, if it can be one of `scheduler`, whose own is `live`."""
    kind = type(scheduler).__name__
    if not isinstance(state, dict):
        raise _mismatch("scheduler.kind", f"what was saved for a {kind} is no state")
    if lacks := sorted(live.keys() - state.keys()):
        raise _mismatch(
            "scheduler.kind",
            f"another kind of scheduler than {kind} was saved: it lacks {', '.join(lacks)}",
        )
    if widths(state) != widths(live):
        raise _mismatch("scheduler.groups", f"the optimizer of a {kind} had other groups")
    return state


def _load_full(found: Sequence[LRScheduler], states: Sequence[dict[str, Any]]) -> list[str]:
    for scheduler, state in zip(found, states, strict=True):
        give(scheduler, state, code="scheduler.refused")
    return []


# --- one number ---------------------------------------------------------------------------------


def _epoch(found: Sequence[LRScheduler], values: Mapping[str, Any]) -> int:
    epoch = values.get(LAST_EPOCH)
    if epoch is None:
        raise _mismatch("scheduler.missing", f"the checkpoint has no {LAST_EPOCH}")
    if not _is_whole_truth(found):
        kinds = ", ".join(sorted({type(s).__name__ for s in found}))
        raise _mismatch(
            "scheduler.kind",
            f"the checkpoint has {LAST_EPOCH} only, which is not all that {kinds} needs",
        )
    return int(epoch)


def _rates(scheduler: LRScheduler, epoch: int) -> list[float | Tensor]:
    assert isinstance(scheduler, LambdaLR)
    pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    try:
        return [base * function(epoch) for base, function in pairs]
    except Exception as error:
        what = f"its function of epoch {epoch} raised {type(error).__name__}: {error}"
        raise _mismatch("scheduler.refused", what) from error


def _load_epoch(
    found: Sequence[LRScheduler], epoch: int, rates: Sequence[list[float | Tensor]]
) -> list[str]:
    for scheduler, rate in zip(found, rates, strict=True):
        scheduler.last_epoch = epoch
        scheduler._step_count = epoch + 1
        scheduler._last_lr = list(rate)
    return []


def _is_whole_truth(found: Sequence[LRScheduler]) -> bool:
    """Whether `last_epoch` says everything about these schedulers."""
    epochs = set()
    for scheduler in found:
        if type(scheduler) is not LambdaLR:
            return False
        # A lambda that is an object with attributes has state of its own.
        if any(own for own in scheduler.state_dict()["lr_lambdas"]):
            return False
        if scheduler._step_count != scheduler.last_epoch + 1:
            return False
        epochs.add(scheduler.last_epoch)
    return len(epochs) <= 1


def _all(schedulers: Schedulers) -> list[LRScheduler]:
    return [schedulers] if isinstance(schedulers, LRScheduler) else list(schedulers)


def _plain(value: Any) -> Any:
    if isinstance(value, Counter):
        return {_COUNTER: dict(value)}
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _unplain(value: Any) -> Any:
    if type(value) is dict:
        if value.keys() == {_COUNTER}:
            return Counter(value[_COUNTER])
        return {key: _unplain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unplain(item) for item in value)
    return copy.deepcopy(value)


def _count(expected: int, actual: int, cause: str) -> MismatchError:
    return MismatchError(
        Problem(
            code="scheduler.count",
            what="the checkpoint has another number of learning-rate schedulers",
            expected=f"{expected}",
            actual=f"{actual}",
            cause=cause,
            fix="load it into a job built as the saving one and save it anew, or leave "
            "lr_scheduler out of the load",
        )
    )


def _differs(slot: Slot) -> MismatchError:
    return _mismatch(
        "scheduler.differs",
        "one scheduler here is over parameters that had differing schedules when saved, "
        f"{slot.names.canonical} among them",
    )


def _mismatch(code: str, what: str) -> MismatchError:
    return MismatchError(
        Problem(
            code=code,
            what=f"learning-rate schedulers: {what}",
            fix="build the schedulers of the saving run, or leave lr_scheduler out of the load",
        )
    )
