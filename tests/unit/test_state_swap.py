"""Swapping optimizers: saved and resumed where they speak, refused by name where they do not.

The unmodified path through torch is kept as a specimen of all three faces: the crash, on save and
on a load's planning, and the silent None.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from conformance.swap import MappedAdamW, SwapAdamW, speak
from tests.device.npu_job import SpeakingMapped
from tests.specimens.odd_optimizers import (
    Net,
    bits,
    load,
    make_net,
    model_bits,
    optimizer_bits,
    save,
    train,
)
from torchtitan_ckpt.errors import MismatchError, SaveError
from torchtitan_ckpt.state.optimizer import optimizer_state_dict
from torchtitan_ckpt.state.optimizer_load import load_optimizer_state_dict
from torchtitan_ckpt.state.swapped import CheckpointableState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

GUIDE = (
    "Flattening optimizer state_dict only supports tensor, int, float, dict states now. "
    "Type is <class 'NoneType'>."
)


def stepped(optimizer_of: Any, steps: int = 3) -> tuple[Net, Any]:
    net = make_net()
    optimizer = optimizer_of(net.parameters(), lr=0.01)
    train(net, [optimizer], steps)
    return net, optimizer


def host_bits(optimizer: SwapAdamW) -> Any:
    optimizer.finish()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    held = {i: bits(optimizer.host[p]) for i, p in enumerate(order) if p in optimizer.host}
    return held, [
        bits({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups
    ]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [SwapAdamW, MappedAdamW])
def test_the_model_is_an_adamw(kind: Any, amsgrad: bool) -> None:
    net, _ = stepped(lambda p, lr: kind(p, lr, amsgrad=amsgrad))
    twin, _ = stepped(lambda p, lr: torch.optim.AdamW(p, lr, amsgrad=amsgrad, foreach=False))
    assert model_bits(net) == model_bits(twin)


def test_the_model_empties_and_lags() -> None:
    net, optimizer = stepped(SwapAdamW)
    state = optimizer.state[net.up.weight]
    assert state["exp_avg"].shape == (10, 6)
    assert state["exp_avg"].untyped_storage().nbytes() == 0
    assert state["max_exp_avg_sq"] is None
    assert "step" not in state
    assert optimizer.param_groups[0]["step"] == 3
    before = bits(optimizer.host[net.up.weight])
    train(net, [optimizer], 1, start=3)
    optimizer.finish()
    assert bits(optimizer.host[net.up.weight]) != before


@pytest.mark.parametrize("amsgrad", [False, True])
def test_speaking_saves_and_resumes(tmp_path: Path, amsgrad: bool) -> None:
    def make(params: Any, lr: float) -> SwapAdamW:
        return speak(SwapAdamW(params, lr, amsgrad=amsgrad))

    net, optimizer = stepped(make)
    assert isinstance(optimizer.checkpointable, CheckpointableState)
    assert optimizer._pending  # copies are on their way: reading now would give old bytes
    flat = save(tmp_path, optimizer, net)
    keys = ["step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    assert [k for k in flat if k.startswith("state.up.weight.")] == [
        f"state.up.weight.{k}" for k in keys
    ]
    assert not any("@" in key or (key.endswith("weight.step") and "group" in key) for key in flat)
    assert flat["state.up.weight.step"] == 3

    fresh = make_net(seed=9)
    fresh.load_state_dict(net.state_dict())
    resumed = make(fresh.parameters(), 0.5)
    load(tmp_path, resumed, fresh)
    assert host_bits(resumed) == host_bits(optimizer)
    assert resumed.state[fresh.up.weight]["exp_avg"].untyped_storage().nbytes() == 0
    train(net, [optimizer], 3, start=3)
    train(fresh, [resumed], 3, start=3)
    assert model_bits(fresh) == model_bits(net)
    assert host_bits(resumed) == host_bits(optimizer)


def test_loads_over_a_running_one_and_twice(tmp_path: Path) -> None:
    net, optimizer = stepped(lambda p, lr: speak(SwapAdamW(p, lr)))
    want = host_bits(optimizer)
    save(tmp_path, optimizer, net)
    for _ in range(2):
        train(net, [optimizer], 1)
        load(tmp_path, optimizer, net)
        assert host_bits(optimizer) == want


def test_swap_and_adamw_read_each_others_files(tmp_path: Path) -> None:
    """Turning swapping on or off between two runs changes nothing of the run."""
    net, swapping = stepped(lambda p, lr: speak(SwapAdamW(p, lr)))
    save(tmp_path / "swap", swapping, net)
    twin, plain = stepped(lambda p, lr: torch.optim.AdamW(p, lr, foreach=False))
    save(tmp_path / "plain", plain, twin)

    back = speak(SwapAdamW(net.parameters(), 0.5))
    load(tmp_path / "plain", back, net)
    assert host_bits(back)[0] == host_bits(swapping)[0]
    target = torch.optim.AdamW(twin.parameters(), 0.5, foreach=False)
    load(tmp_path / "swap", target, twin)
    assert optimizer_bits(target)["state"] == optimizer_bits(plain)["state"]
    train(net, [back], 2, start=3)
    train(twin, [target], 2, start=3)
    assert model_bits(net) == model_bits(twin)


def test_a_file_of_torchtitan_npu(tmp_path: Path) -> None:
    """Its later format: flat names, None left out, `step` in the state and not in the group."""
    net, optimizer = stepped(lambda p, lr: speak(SwapAdamW(p, lr)))
    flat = optimizer_state_dict(optimizer, net)
    assert not any(key.startswith("param_groups.") and key.endswith(".step") for key in flat)
    target = speak(SwapAdamW(net.parameters(), 0.5))
    load_optimizer_state_dict(target, net, flat)
    assert host_bits(target) == host_bits(optimizer)


@pytest.mark.parametrize("stepped_before", [False, True])
@pytest.mark.parametrize("lost", ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_what_a_speaker_cannot_step_without_is_wanted_of_the_file(
    lost: str, stepped_before: bool
) -> None:
    """OPT-03, for one that has never been stepped too."""
    net, optimizer = stepped(lambda p, lr: speak(SwapAdamW(p, lr, amsgrad=True)))
    flat = optimizer_state_dict(optimizer, net)
    del flat[f"state.up.weight.{lost}"]
    target = speak(SwapAdamW(net.parameters(), 0.5, amsgrad=True))
    if stepped_before:
        train(net, [target], 1)
    before = host_bits(target)
    with pytest.raises(MismatchError, match=rf"up\.weight: the checkpoint lacks {lost}"):
        load_optimizer_state_dict(target, net, flat)
    assert host_bits(target) == before


@pytest.mark.parametrize("make", [lambda p: speak(SwapAdamW(p)), SpeakingMapped])
def test_a_speaker_refuses_by_itself_what_it_cannot_step_from(make: Any) -> None:
    """Whatever manager hands it in; nothing has changed."""
    net = make_net()
    optimizer = make(net.parameters())
    train(net, [optimizer], 2)
    speaker = getattr(optimizer, "checkpointable", optimizer)

    def told() -> Any:
        return [bits(dict(speaker.checkpoint_state(p))) for p in net.parameters()]

    before = told()
    states = {p: dict(s) for p in net.parameters() if (s := speaker.checkpoint_state(p))}
    for edit in ({"exp_avg_sq": None}, {"step": None}, {"step": torch.tensor(5.0)}):
        state = {k: v for k, v in (states[net.up.weight] | edit).items() if v is not None}
        with pytest.raises(ValueError, match=r"exp_avg_sq|step"):
            speaker.checkpoint_restore({**states, net.up.weight: state})
        assert told() == before
        assert optimizer.param_groups[0]["step"] == 2


@pytest.mark.parametrize("kind", [torch.optim.AdamW, MappedAdamW, SwapAdamW])
def test_amsgrad_switched_on_by_the_one_who_resumes(kind: Any) -> None:
    """A None that the file records is no maximum: it starts from zero, as the rule says."""
    net, optimizer = stepped(MappedAdamW)
    target = kind(net.parameters(), 0.01, amsgrad=True)
    if kind is SwapAdamW:
        speak(target)
    notes = load_optimizer_state_dict(
        target, net, optimizer_state_dict(optimizer, net), keep=("amsgrad",)
    )
    assert any("amsgrad switched on" in note for note in notes)
    train(net, [target], 1, start=3)


def test_together_with_muon(tmp_path: Path) -> None:
    def make(net: Net) -> list[Any]:
        matrices = [p for n, p in net.named_parameters() if p.dim() == 2 and "embed" not in n]
        rest = [p for n, p in net.named_parameters() if p.dim() != 2 or "embed" in n]
        return [torch.optim.Muon(matrices, lr=0.125), speak(SwapAdamW(rest, 0.01))]

    net = make_net()
    pair = make(net)
    train(net, pair, 2)
    save(tmp_path, pair, net)
    fresh = make_net(seed=9)
    fresh.load_state_dict(net.state_dict())
    resumed = make(fresh)
    load(tmp_path, resumed, fresh)
    assert optimizer_bits(resumed[0]) == optimizer_bits(pair[0])
    assert host_bits(resumed[1]) == host_bits(pair[1])
    train(net, pair, 2, start=2)
    train(fresh, resumed, 2, start=2)
    assert model_bits(fresh) == model_bits(net)


def test_the_mapped_generation_needs_no_protocol(tmp_path: Path) -> None:
    net, optimizer = stepped(MappedAdamW)
    save(tmp_path, optimizer, net)
    target = MappedAdamW(net.parameters(), 0.5)
    load(tmp_path, target, net)
    assert optimizer_bits(target) == optimizer_bits(optimizer)
    assert target.state[net.up.weight]["max_exp_avg_sq"] is None


def test_emptied_without_a_word_is_refused_by_name(tmp_path: Path) -> None:
    net, optimizer = stepped(SwapAdamW)
    with pytest.raises(SaveError) as caught:
        optimizer_state_dict(optimizer, net)
    assert {p.code for p in caught.value.problems} == {"optimizer.emptied"}
    text = str(caught.value)
    assert "layers.11.weight: its optimizer state exp_avg has 36 elements and no storage" in text
    assert "CheckpointableState" in text

    _, plain = stepped(lambda p, lr: torch.optim.AdamW(p, lr))
    source = make_net()
    plain = torch.optim.AdamW(source.parameters())
    train(source, [plain], 1)
    with pytest.raises(MismatchError, match="no storage"):
        load_optimizer_state_dict(optimizer, net, optimizer_state_dict(plain, source))


def test_moments_that_are_none_are_refused_by_name() -> None:
    net, optimizer = stepped(torch.optim.AdamW)
    optimizer.state[net.up.weight]["exp_avg"] = None
    with pytest.raises(SaveError, match=r"up\.weight: its optimizer state exp_avg is None"):
        optimizer_state_dict(optimizer, net)


class _Wrapper:
    """What a trainer hands to DCP: torch's own flattening behind a Stateful."""

    def __init__(self, net: Any, optimizer: Any) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return get_optimizer_state_dict(self.net, self.optimizer, options=options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("planning fails before this")


@pytest.mark.parametrize("kind", [SwapAdamW, MappedAdamW])
def test_specimen_torch_crashes_on_save_and_on_planning_a_load(tmp_path: Path, kind: Any) -> None:
    healthy_net, healthy = stepped(torch.optim.AdamW)
    dcp.save({"optimizer": _Wrapper(healthy_net, healthy)}, checkpoint_id=tmp_path / "healthy")
    net, optimizer = stepped(kind)
    with pytest.raises(NotImplementedError) as caught:
        dcp.save({"optimizer": _Wrapper(net, optimizer)}, checkpoint_id=tmp_path / "swap")
    assert str(caught.value) == GUIDE
    with pytest.raises(NotImplementedError) as caught:
        dcp.load({"optimizer": _Wrapper(net, optimizer)}, checkpoint_id=tmp_path / "healthy")
    assert str(caught.value) == GUIDE


@pytest.mark.needs_titan
def test_specimen_torchtitan_is_silent_and_loses_moments(tmp_path: Path) -> None:
    utils = pytest.importorskip(
        "torchtitan.components.optimizer.utils", reason="the extra 'titan' is absent"
    )
    net = make_net()
    optimizer = MappedAdamW(net.named_parameters(), 0.01)
    train(net, [optimizer], 1)
    flat = utils.get_flat_optim_state_dict(optimizer)
    assert flat["state.up.weight.max_exp_avg_sq"] is None
    dcp.save({"optimizer": flat}, checkpoint_id=tmp_path)

    healthy = MappedAdamW(net.named_parameters(), 0.01, amsgrad=True)
    train(net, [healthy], 1)
    target = {"optimizer": utils.get_flat_optim_state_dict(healthy)}
    assert target["optimizer"]["state.up.weight.max_exp_avg_sq"] is not None
    dcp.load(target, checkpoint_id=tmp_path)  # no error
    utils.load_flat_optim_state_dict(healthy, target["optimizer"])
    assert healthy.state[net.up.weight]["max_exp_avg_sq"] is None

    ours = MappedAdamW(net.parameters(), 0.01, amsgrad=True)
    train(net, [ours], 1)
    before = optimizer_bits(ours)
    flat["param_groups.up.weight.amsgrad"] = True  # a run that does need the maximum
    with pytest.raises(MismatchError, match=r"lacks max_exp_avg_sq"):
        load_optimizer_state_dict(ours, net, {**flat})
    assert optimizer_bits(ours) == before
