"""The caller's own code raises, or gives what is no state: said by name, place and exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchtitan_ckpt.errors import CheckpointError, MismatchError, Problem, SaveError
from torchtitan_ckpt.state.dataloader import dataloader_state_dict, load_dataloader_state
from torchtitan_ckpt.state.objects import load_object_state, object_state_dict


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
