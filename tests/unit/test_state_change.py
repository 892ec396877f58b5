"""A change that fails, here or later, leaves what it changed as it was."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from torchtitan_ckpt.state.change import Change, remember


class Held:
    """Attributes of every sort, one written in place, and a load that may stop half-way."""

    def __init__(self) -> None:
        self.step, self.history = 3, [1.0, 2.0]
        self.weights = {"ema": torch.tensor([1.0, 2.0, 3.0], requires_grad=True)}
        self.refuses = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "history": self.history, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.history[:] = state["history"]
        if self.refuses:
            self.refuses -= 1
            raise RuntimeError("no more")
        with torch.no_grad():
            self.weights["ema"].copy_(state["weights"]["ema"])

    def seen(self) -> tuple[int, list[float], list[float]]:
        return self.step, list(self.history), self.weights["ema"].tolist()


NEW = {"step": 9, "history": [7.0, 8.0, 9.0], "weights": {"ema": torch.tensor([4.0, 5.0, 6.0])}}


def change_of(held: Any) -> Change:
    return Change(lambda: held.load_state_dict(NEW) or ["given"], lambda: remember(held))


def fail() -> list[str]:
    raise KeyError("later")


def one_after_another(*changes: Change) -> None:
    with contextlib.ExitStack() as undo:
        for change in changes:
            change.within(undo)
        undo.pop_all()


def test_a_change_gives_and_says() -> None:
    held = Held()
    assert change_of(held)() == ["given"]
    assert held.seen() == (9, [7.0, 8.0, 9.0], [4.0, 5.0, 6.0])


def test_a_refusal_takes_back_what_was_written_in_place() -> None:
    held = Held()
    before, history = held.seen(), held.history
    held.refuses = 1
    with pytest.raises(RuntimeError, match="no more"):
        change_of(held)()
    assert held.seen() == before
    assert held.history is history


def test_a_later_failure_takes_back_all_in_reverse() -> None:
    first, second = Held(), Held()
    before = first.seen()
    with pytest.raises(KeyError, match="later"):
        one_after_another(change_of(first), change_of(second), Change(fail))
    assert first.seen() == second.seen() == before


def test_one_that_refuses_its_own_state_too_gets_its_attributes_back() -> None:
    class Broken(Held):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.step = -1
            raise RuntimeError("nor this")

    held = Broken()
    with pytest.raises(RuntimeError, match="nor this"):
        change_of(held)()
    assert held.step == 3


def test_a_state_that_cannot_be_copied_is_no_hindrance() -> None:
    class Silent(Held):
        def state_dict(self) -> dict[str, Any]:
            raise OSError("not now")

    held = Silent()
    held.refuses = 1
    with pytest.raises(RuntimeError, match="no more"):
        change_of(held)()
    assert held.step == 3


def test_a_plain_dict_gets_its_own_values_back() -> None:
    tensor = torch.ones(3)
    plain: dict[str, Any] = {"tokens": 5, "seen": tensor}
    undo = remember(plain)
    plain.clear()
    plain["tokens"] = 9
    undo()
    assert plain.keys() == {"tokens", "seen"}
    assert plain["seen"] is tensor


def test_a_way_back_that_fails_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The failure is the load's; what could not be brought back is in the log, the rest is back."""

    def gone() -> None:
        raise OSError("the device is gone")

    held = Held()
    before = held.seen()
    with pytest.raises(KeyError, match="later"):
        one_after_another(change_of(held), Change(fail, lambda: gone))
    assert held.seen() == before
    assert "the device is gone" in caplog.text
