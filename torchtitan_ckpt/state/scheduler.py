"""State of learning-rate schedulers: one, several, chained, of any kind.

torchtitan keeps one number for all of them, `last_epoch`, since its schedules are functions of it.
Where that is the whole truth (`LambdaLR` with plain functions, all at one epoch) nothing else is
written, any number of schedulers loads it, and the rate is computed anew from this run's base
rates, as torchtitan does. Otherwise the full state of each lies beside it as `schedulers.<i>`, and
the number must be the same at the load.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchtitan_ckpt.errors import MismatchError, Problem, SaveError
from torchtitan_ckpt.manifest import Manifest
from torchtitan_ckpt.state.leaves import UNREAD, Unread, why_not_storable
from torchtitan_ckpt.state.theirs import state_of

Schedulers = LRScheduler | Iterable[LRScheduler]

LAST_EPOCH = "last_epoch"
_FULL = "schedulers."
_COUNTER = "@Counter"  # MultiStepLR's milestones: no plain container


def scheduler_state_dict(schedulers: Schedulers) -> dict[str, Any]:
    """The state of all schedulers as one flat dict. Raises `SaveError` for what no file can hold.

    >>> # {"last_epoch": 7} or {"last_epoch": 7, "schedulers.0": {...}, "schedulers.1": {...}}
    """
    found = _all(schedulers)
    epochs = [epoch for s in found if (epoch := getattr(s, LAST_EPOCH, None)) is not None]
    flat: dict[str, Any] = {LAST_EPOCH: epochs[0]} if epochs else {}
    if _is_whole_truth(found):
        return flat
    problems = []
    for index, scheduler in enumerate(found):
        state = _plain(state_of(scheduler))
        if (why := why_not_storable(state)) is not None:
            problems.append(
                Problem(
                    code="scheduler.unstorable",
                    what=f"scheduler {index} ({type(scheduler).__name__}) cannot be saved",
                    cause=why,
                    fix="keep functions and objects out of its state_dict",
                )
            )
        flat[f"{_FULL}{index}"] = state
    if problems:
        raise SaveError(*problems)
    return flat


def scheduler_template(manifest: Manifest, prefix: str) -> dict[str, Any]:
    """What to read: everything that the file has under `prefix`, keys without it."""
    return {k.removeprefix(prefix): UNREAD for k in sorted(manifest.keys) if k.startswith(prefix)}


def load_scheduler_state(schedulers: Schedulers, values: Mapping[str, Any]) -> None:
    """Restore all schedulers, or none: raises `MismatchError` and leaves them as they were.

    Group values such as `lr` are the optimizers' and come back with their state.
    """
    prepare_scheduler_load(schedulers, values)()


def prepare_scheduler_load(
    schedulers: Schedulers, values: Mapping[str, Any]
) -> Callable[[], list[str]]:
    """The refusals of `load_scheduler_state`; what it returns restores the schedulers."""
    found = _all(schedulers)
    full = {key: value for key, value in values.items() if key.startswith(_FULL)}
    if any(isinstance(value, Unread) for value in values.values()):
        raise _mismatch("scheduler.unread", "its values were planned and never read")
    if full and not _is_whole_truth(found):
        states = _full_states(found, full)
        return lambda: _all_or_none(found, lambda: _load_full(found, states))
    epoch = _epoch(found, values)
    return lambda: _all_or_none(found, lambda: _load_epoch(found, epoch))


def _all_or_none(found: Sequence[LRScheduler], load: Callable[[], None]) -> list[str]:
    before = [dict(scheduler.__dict__) for scheduler in found]
    copies = [copy.deepcopy(scheduler.state_dict()) for scheduler in found]
    try:
        load()
    except BaseException as error:
        for scheduler, was, state in zip(found, before, copies, strict=True):
            scheduler.load_state_dict(state)
            scheduler.__dict__.update(was)
        if isinstance(error, MismatchError) or not isinstance(error, Exception):
            raise
        raise _mismatch("scheduler.refused", f"{type(error).__name__}: {error}") from error
    return []


def _full_states(found: Sequence[LRScheduler], full: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = [f"{_FULL}{index}" for index in range(len(found))]
    if set(names) != set(full):
        raise MismatchError(
            Problem(
                code="scheduler.count",
                what="the checkpoint has another number of learning-rate schedulers",
                expected=f"{len(found)}",
                actual=f"{len(full)}",
                cause="other optimizers, or another pipeline degree, with schedulers whose state "
                "is more than a step",
                fix="build as many as in the saving run, or leave lr_scheduler out of the load",
            )
        )
    states = []
    for name, scheduler in zip(names, found, strict=True):
        state = _unplain(full[name])
        live = scheduler.state_dict()
        if not isinstance(state, dict) or live.keys() - state.keys():
            lacks = ", ".join(sorted(live.keys() - state.keys())) if isinstance(state, dict) else ""
            raise _mismatch(
                "scheduler.kind",
                f"{name} was saved by another kind of scheduler than {type(scheduler).__name__}"
                + (f": it lacks {lacks}" if lacks else ""),
            )
        states.append(state)
    return states


def _load_full(found: Sequence[LRScheduler], states: Sequence[dict[str, Any]]) -> None:
    for scheduler, state in zip(found, states, strict=True):
        scheduler.load_state_dict(state)


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


def _load_epoch(found: Sequence[LRScheduler], epoch: int) -> None:
    for scheduler in found:
        scheduler.last_epoch = epoch
        scheduler._step_count = epoch + 1
        assert isinstance(scheduler, LambdaLR)
        pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        scheduler._last_lr = [base * function(epoch) for base, function in pairs]


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


def _mismatch(code: str, what: str) -> MismatchError:
    return MismatchError(
        Problem(
            code=code,
            what=f"learning-rate schedulers: {what}",
            fix="build the schedulers of the saving run, or leave lr_scheduler out of the load",
        )
    )
