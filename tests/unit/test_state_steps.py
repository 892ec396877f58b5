"""The count of steps: with each parameter's state or once in its group, whoever saved and loads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.swap import MappedAdamW, SwapAdamW, speak
from tests.device.npu_job import SpeakingMapped
from tests.specimens.odd_optimizers import (
    Net,
    bits,
    make_net,
    model_bits,
    optimizer_bits,
    train,
)
from torchtitan_ckpt.errors import MismatchError
from torchtitan_ckpt.state.leaves import UNREAD
from torchtitan_ckpt.state.optimizer import optimizer_state_dict
from torchtitan_ckpt.state.optimizer_load import load_optimizer_state_dict

# All of them make the same updates; the first counts with the state, the others in the group.
KINDS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, 0.01, foreach=False),
    "mapped": lambda groups: MappedAdamW(groups, 0.01),
    "swap": lambda groups: speak(SwapAdamW(groups, 0.01)),
    "mapped-speaking": lambda groups: SpeakingMapped(groups, 0.01),
}
WAITING = ("unused.weight", "unused.bias")
KEY = "layers.11.weight"


def groups_of(net: Net) -> list[dict[str, Any]]:
    """One group that trains, and one whose parameters have had no gradient yet."""
    named = dict(net.named_parameters())
    return [
        {"params": [p for n, p in named.items() if n not in WAITING]},
        {"params": [named[n] for n in WAITING]},
    ]


def stepped(kind: str, steps: int = 3) -> tuple[Net, Any]:
    net = make_net()
    optimizer = KINDS[kind](groups_of(net))
    train(net, [optimizer], steps)
    return net, optimizer


def resumed(kind: str, net: Net, flat: dict[str, Any]) -> tuple[Net, Any, list[str]]:
    fresh = make_net(seed=9)
    fresh.load_state_dict(net.state_dict())
    optimizer = KINDS[kind](groups_of(fresh))
    return fresh, optimizer, load_optimizer_state_dict(optimizer, fresh, copy.deepcopy(flat))


def go_on(net: Net, optimizer: Any, *, waiting: bool) -> Any:
    """Two more steps; `waiting` gives the other group its first gradients in the first of them."""
    if waiting:
        for parameter in net.unused.parameters():
            parameter.grad = torch.ones_like(parameter)
    train(net, [optimizer], 2, start=3)
    return model_bits(net)


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_a_run_goes_on_wherever_it_was_counted(before: str, after: str) -> None:
    net, optimizer = stepped(before)
    flat = optimizer_state_dict(optimizer, net)
    counted = [group.get("step") for group in optimizer.param_groups]
    fresh, target, notes = resumed(after, net, flat)
    assert all(("step" in group) is (after != "adamw") for group in target.param_groups)
    if after != "adamw":
        expected = [3, 0] if before == "adamw" else counted
        assert [group["step"] for group in target.param_groups] == expected
    told = [note for note in notes if "step" in note]
    assert bool(told) is ((before == "adamw") is not (after == "adamw"))

    again, twin, _ = resumed(after, fresh, optimizer_state_dict(target, fresh))
    # A count of a group that nobody of had state is AdamW's to begin anew, as it says.
    waiting = before == "adamw" or after != "adamw"
    want = go_on(net, optimizer, waiting=waiting)
    assert go_on(fresh, target, waiting=waiting) == want
    assert go_on(again, twin, waiting=waiting) == want


def test_what_was_switched_and_trained_resumes_too() -> None:
    """From swapping to AdamW, whose waiting group gets its first gradients and is saved."""
    net, optimizer = stepped("swap")
    fresh, target, _ = resumed("adamw", net, optimizer_state_dict(optimizer, net))
    go_on(fresh, target, waiting=True)
    again, twin, _ = resumed("adamw", fresh, optimizer_state_dict(target, fresh))
    assert twin.state[again.unused.bias]["step"] == 1
    assert go_on(again, twin, waiting=True) == go_on(fresh, target, waiting=True)


@pytest.mark.parametrize("after", ["mapped", "swap"])
def test_counts_that_one_group_cannot_hold_are_refused(after: str) -> None:
    net, optimizer = stepped("adamw")
    optimizer.state[net.get_parameter(KEY)]["step"] += 1
    with pytest.raises(MismatchError, match=r"saved with different step") as caught:
        resumed(after, net, optimizer_state_dict(optimizer, net))
    assert f"{KEY}: 4" in str(caught.value)


@pytest.mark.parametrize("after", KINDS)
def test_a_count_that_lies_nowhere_is_refused(after: str) -> None:
    net, optimizer = stepped("mapped")
    flat = optimizer_state_dict(optimizer, net)
    flat = {key: value for key, value in flat.items() if not key.endswith(".step")}
    with pytest.raises(MismatchError, match=r"(lacks|has no) step"):
        resumed(after, net, flat)


@pytest.mark.parametrize("junk", [UNREAD, "three", None], ids=str)
@pytest.mark.parametrize("after", KINDS)
def test_what_is_no_count_is_refused(after: str, junk: Any) -> None:
    net, optimizer = stepped("adamw")
    flat = optimizer_state_dict(optimizer, net)
    flat |= {key: junk for key in flat if key.endswith(".step")}
    with pytest.raises(MismatchError, match=r"step|three"):
        resumed(after, net, flat)


def test_one_state_that_lacks_its_step_is_not_given_the_groups() -> None:
    """A value of this name that a user put into AdamW's group is no count."""
    net, optimizer = stepped("adamw")
    for group in optimizer.param_groups:
        group["step"] = 7
    flat = optimizer_state_dict(optimizer, net)
    fresh = make_net()
    target = KINDS["adamw"](groups_of(fresh))
    for group in target.param_groups:
        group["step"] = 5
    load_optimizer_state_dict(target, fresh, flat)
    assert optimizer_bits(target) == optimizer_bits(optimizer)
    for lost in (f"state.{KEY}.step", ".step"):
        partial = {k: v for k, v in flat.items() if "group" in k or not k.endswith(lost)}
        with pytest.raises(MismatchError, match=rf"{KEY}: the checkpoint lacks step"):
            load_optimizer_state_dict(target, fresh, partial)
    assert optimizer_bits(target) == optimizer_bits(optimizer)


class Both(torch.optim.Optimizer):
    """Counts in the group, and for each parameter too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["step"] = self.state[p].get("step", 0) + 1


def test_an_optimizer_that_counts_in_both_places_gets_both() -> None:
    net = make_net()
    optimizer, target = Both(net.parameters()), Both(net.parameters())
    train(net, [optimizer], 2)
    load_optimizer_state_dict(target, net, optimizer_state_dict(optimizer, net))
    assert optimizer_bits(target) == optimizer_bits(optimizer)


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_a_load_that_fails_leaves_every_count(before: str, after: str) -> None:
    """Also that of the group that waits, which no state tells."""
    source, saved = stepped(before)
    net, optimizer = stepped(after, 1)
    twin, going = stepped(after, 1)
    optimizer.register_load_state_dict_post_hook(lambda _: 1 / 0)
    with pytest.raises(MismatchError, match="as they were"):
        load_optimizer_state_dict(optimizer, net, optimizer_state_dict(saved, source))
    counts = [[group.get("step") for group in o.param_groups] for o in (optimizer, going)]
    assert counts[0] == counts[1]
    assert go_on(net, optimizer, waiting=True) == go_on(twin, going, waiting=True)


def test_each_parameter_has_a_count_of_its_own() -> None:
    """Counts are added to in place."""
    net, optimizer = stepped("mapped")
    _, target, _ = resumed("adamw", net, optimizer_state_dict(optimizer, net))
    counts = [state["step"] for state in target.state.values()]
    assert len({count.data_ptr() for count in counts}) == len(counts)
    assert {bits(count)[2] for count in counts} == {"torch.float32"}
