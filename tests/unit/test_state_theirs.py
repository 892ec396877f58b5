"""The caller's own code raises, or gives what is no state: said by name, place and exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from torchtitan_ckpt.errors import (
    CheckpointError,
    DeviceError,
    MappingError,
    MismatchError,
    Problem,
    SaveError,
)
from torchtitan_ckpt.state.dataloader import dataloader_state_dict, load_dataloader_state
from torchtitan_ckpt.state.model import load_model_state_dict, model_state_dict
from torchtitan_ckpt.state.objects import load_object_state, object_state_dict
from torchtitan_ckpt.state.scheduler import scheduler_state_dict
from torchtitan_ckpt.state.theirs import converted


class Theirs:
    """A state whose methods do what a test says."""

    def __init__(self, gives: Callable[[], Any]) -> None:
        self._gives = gives

    def state_dict(self) -> Any:
        return self._gives()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("tokens")


def fails() -> Any:
    raise KeyError("my key")


def refuses() -> Any:
    raise SaveError(Problem(code="mine.own", what="it said so itself"))


@pytest.mark.parametrize("save", [object_state_dict, dataloader_state_dict])
@pytest.mark.parametrize(
    ("gives", "code", "parts"),
    [
        (fails, "state.not-given", ["Theirs could not give", __file__, "KeyError: 'my key'"]),
        (lambda: None, "state.no-dict", ["NoneType", "Theirs.state_dict"]),
        (lambda: 7, "state.no-dict", ["actual   int"]),
        (refuses, "mine.own", ["it said so itself"]),
    ],
)
def test_a_state_that_is_not_given_is_said(
    save: Callable[[Any], Any], gives: Callable[[], Any], code: str, parts: list[str]
) -> None:
    with pytest.raises(SaveError) as caught:
        save(Theirs(gives))
    assert [p.code for p in caught.value.problems] == [code]
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("load", "state", "code"),
    [
        (load_object_state, {"step": 1}, "state.refused"),
        (load_dataloader_state, {"dp_rank_0": {"step": 1}, "world_size": 1}, "dataloader.refused"),
    ],
)
def test_a_state_that_is_refused_is_said(
    load: Callable[[Any, Any], Any], state: dict[str, Any], code: str
) -> None:
    with pytest.raises(MismatchError) as caught:
        load(Theirs(lambda: {"step": 0}), state)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert __file__ in problem.where
    assert problem.actual == "KeyError: 'tokens'"


class Adapter:
    def __init__(self, gives: Callable[[], Any]) -> None:
        self._gives = gives

    def to_hf(self, state: dict[str, Any]) -> Any:
        return self._gives()

    from_hf = to_hf


@pytest.mark.parametrize("method", ["to_hf", "from_hf"])
@pytest.mark.parametrize(
    ("gives", "code", "text"),
    [
        (fails, "adapter.failed", "KeyError: 'my key'"),
        (lambda: None, "adapter.no-dict", "NoneType"),
    ],
)
def test_an_adapter_that_fails_is_named(
    method: str, gives: Callable[[], Any], code: str, text: str
) -> None:
    """At the end of a training, on one rank of many."""
    with pytest.raises(MappingError) as caught:
        converted(Adapter(gives), method, {})
    (problem,) = caught.value.problems
    assert (problem.code, problem.actual) == (code, text)
    assert f"test_state_theirs.Adapter.{method}" in problem.where
    assert "torchtitan-ckpt check" in problem.fix


def test_a_device_that_fails_in_their_code_is_told_as_such() -> None:
    def no_memory() -> Any:
        torch.empty(2**60)

    with pytest.raises(DeviceError, match="host ran out of memory"):
        object_state_dict(Theirs(no_memory))


def test_hooks_of_modules_and_schedulers_are_their_code_too() -> None:
    def fail(*_: Any) -> None:
        raise KeyError("my key")

    module = nn.Linear(3, 2)
    scheduler = StepLR(SGD(module.parameters()), 2)
    scheduler.state_dict = fail  # type: ignore[method-assign]
    with pytest.raises(SaveError, match="StepLR could not give its state"):
        scheduler_state_dict(scheduler)
    state = model_state_dict(module)
    handle = module.register_load_state_dict_pre_hook(fail)
    with pytest.raises(MismatchError, match="KeyError: 'my key'"):
        load_model_state_dict(module, state)
    handle.remove()
    module.register_state_dict_post_hook(fail)
    with pytest.raises(SaveError, match="Linear could not give its state"):
        model_state_dict(module)


def deep() -> dict[str, Any]:
    state: dict[str, Any] = {"value": 1}
    for _ in range(5000):
        state = {"inner": state}
    return state


def endless() -> dict[str, Any]:
    state: dict[str, Any] = {"value": 1}
    state["me"] = state
    return state


@pytest.mark.parametrize("save", [object_state_dict, dataloader_state_dict])
@pytest.mark.parametrize("gives", [deep, endless])
def test_a_state_without_an_end_is_refused(
    save: Callable[[Any], Any], gives: Callable[[], Any]
) -> None:
    with pytest.raises(CheckpointError, match="nested too deeply, or holds itself"):
        save(Theirs(gives))
