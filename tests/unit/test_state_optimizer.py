"""Every optimizer state: through a real file and back, bit for bit, and the run goes on exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.specimens.odd_optimizers import (
    HalfMoments,
    Kitchen,
    LocalMoments,
    Net,
    bits,
    load,
    make_net,
    manifest_of,
    model_bits,
    optimizer_bits,
    read,
    save,
    train,
)
from torchtitan_ckpt.errors import MismatchError, SaveError
from torchtitan_ckpt.state.hyperparameters import EXCUSABLE, NULL_BY_DEFAULT
from torchtitan_ckpt.state.optimizer import optimizer_state_dict, optimizer_template
from torchtitan_ckpt.state.optimizer_load import load_optimizer_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Make = Callable[[Net], list[torch.optim.Optimizer]]
NULLS = sorted(NULL_BY_DEFAULT)


def one(cls: Any, **options: Any) -> Make:
    return lambda net: [cls(net.parameters(), **options)]


def hybrid(net: Net) -> list[torch.optim.Optimizer]:
    named = dict(net.named_parameters())
    matrices = [p for n, p in named.items() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in named.items() if p.dim() != 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=0.125)
    return [muon, torch.optim.AdamW(rest, lr=0.01)]


def grouped(net: Net) -> list[torch.optim.Optimizer]:
    """Groups that split one module, an empty group, and other values in each."""
    named = list(net.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [], "weight_decay": 0.5, "lr": 0.75},
        {"params": [p for n, p in reversed(named) if not n.endswith("bias")], "label": "w"},
    ]
    return [torch.optim.AdamW(groups, lr=0.01, betas=(0.5, 0.75))]


KINDS: dict[str, tuple[Make, torch.dtype]] = {
    "adamw": (one(torch.optim.AdamW, lr=0.01), torch.float32),
    "adamw-amsgrad": (one(torch.optim.AdamW, lr=0.01, amsgrad=True), torch.float32),
    "adamw-foreach": (one(torch.optim.AdamW, lr=0.01, foreach=True), torch.float32),
    "adamw-fused": (one(torch.optim.AdamW, lr=0.01, fused=True), torch.float32),
    "adamw-lr-tensor": (
        one(torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False),
        torch.float32,
    ),
    "adamw-bf16": (one(torch.optim.AdamW, lr=0.01), torch.bfloat16),
    "adam-maximize": (one(torch.optim.Adam, lr=0.01, maximize=True), torch.float32),
    "nadam": (one(torch.optim.NAdam, lr=0.01), torch.float32),
    "radam": (one(torch.optim.RAdam, lr=0.01), torch.float32),
    "adamax": (one(torch.optim.Adamax, lr=0.01), torch.float32),
    "adagrad": (one(torch.optim.Adagrad, lr=0.01), torch.float32),
    "adadelta": (one(torch.optim.Adadelta, lr=0.01), torch.float32),
    "asgd": (one(torch.optim.ASGD, lr=0.01), torch.float32),
    "rprop": (one(torch.optim.Rprop, lr=0.01), torch.float32),
    "rmsprop": (one(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True), torch.float32),
    "sgd": (one(torch.optim.SGD, lr=0.01), torch.float32),
    "sgd-momentum": (one(torch.optim.SGD, lr=0.01, momentum=0.5, nesterov=True), torch.float32),
    "adafactor": (one(torch.optim.Adafactor, lr=0.01), torch.float32),
    "muon-adamw": (hybrid, torch.float32),
    "groups": (grouped, torch.float32),
    "kitchen": (one(Kitchen), torch.float32),
    "fp32-moments-of-bf16": (one(HalfMoments, moment=torch.float32), torch.bfloat16),
    "bf16-moments-of-fp32": (one(HalfMoments, moment=torch.bfloat16), torch.float32),
    "local": (one(LocalMoments), torch.float32),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Make, torch.dtype]:
    return KINDS[request.param]


def test_resumes_as_if_never_stopped(tmp_path: Path, kind: tuple[Make, torch.dtype]) -> None:
    make, dtype = kind
    net = make_net(dtype)
    optimizers = make(net)
    train(net, optimizers, 3)
    before = [optimizer_bits(o) for o in optimizers]
    save(tmp_path, optimizers, net)
    assert [optimizer_bits(o) for o in optimizers] == before  # saving disturbs nothing

    fresh = make_net(dtype, seed=9)
    fresh.load_state_dict(net.state_dict())
    resumed = make(fresh)
    load(tmp_path, resumed, fresh)
    assert [optimizer_bits(o) for o in resumed] == before

    train(net, optimizers, 3, start=3)
    train(fresh, resumed, 3, start=3)
    assert model_bits(fresh) == model_bits(net)
    assert [optimizer_bits(o) for o in resumed] == [optimizer_bits(o) for o in optimizers]


def test_loads_over_a_run_that_went_on(tmp_path: Path, kind: tuple[Make, torch.dtype]) -> None:
    make, dtype = kind
    net = make_net(dtype)
    optimizers = make(net)
    train(net, optimizers, 2)
    before = [optimizer_bits(o) for o in optimizers]
    save(tmp_path, optimizers, net)
    train(net, optimizers, 2, start=2)
    load(tmp_path, optimizers, net)
    assert [optimizer_bits(o) for o in optimizers] == before


def test_names_are_torchtitans(tmp_path: Path) -> None:
    net = make_net()
    named = [(n, p) for n, p in net.named_parameters() if n.startswith("up")]
    optimizer = torch.optim.AdamW(named, lr=0.01, foreach=False, fused=False)
    train(net, [optimizer], 1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1.0)
    flat = save(tmp_path, optimizer, net)
    group = "lr betas eps weight_decay amsgrad fused foreach maximize capturable differentiable"
    want = {
        f"state.up.{p}.{k}" for p in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")
    }
    want |= {
        f"param_groups.up.{p}.{k}"
        for p in ("weight", "bias")
        for k in [*group.split(), "decoupled_weight_decay", "initial_lr"]
    }
    assert set(flat) == want


def test_none_never_reaches_the_file() -> None:
    net = make_net()
    optimizer = Kitchen(net.parameters())
    train(net, [optimizer], 1)
    flat = optimizer_state_dict(optimizer, net)
    assert all(value is not None for value in flat.values())


def test_gradients_do_not_matter(tmp_path: Path) -> None:
    """OPT-16: torch's own state comes out empty while gradients are set."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 2)
    save(tmp_path, optimizer, net)
    fresh = make_net()
    target = torch.optim.AdamW(fresh.parameters())
    fresh(torch.tensor([1, 2])).sum().backward()
    grads = {n: bits(p.grad) for n, p in fresh.named_parameters() if p.grad is not None}
    weights = model_bits(fresh)
    rng = torch.get_rng_state()
    load(tmp_path, target, fresh)
    assert optimizer_bits(target) == optimizer_bits(optimizer)
    assert model_bits(fresh) == weights
    assert {n: bits(p.grad) for n, p in fresh.named_parameters() if p.grad is not None} == grads
    assert torch.equal(torch.get_rng_state(), rng)


def test_planning_takes_no_step_and_makes_no_entry(tmp_path: Path) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 1)
    save(tmp_path, optimizer, net)
    target = torch.optim.AdamW(net.parameters())
    calls: list[str] = []
    target.register_step_pre_hook(lambda *a: calls.append("step"))
    optimizer_template(target, net, manifest_of(tmp_path))
    optimizer_state_dict(target, net)
    assert not calls
    assert not target.state


def test_targets_are_never_the_optimizers_own(tmp_path: Path) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 1)
    save(tmp_path, optimizer, net)
    before = optimizer_bits(optimizer)
    template = optimizer_template(optimizer, net, manifest_of(tmp_path))
    for value in template.values():
        if isinstance(value, torch.Tensor):
            value.fill_(float("nan"))
    assert optimizer_bits(optimizer) == before


def test_frozen_after_training_keeps_its_state(tmp_path: Path) -> None:
    """OPT-02: torch drops the state of a parameter that was frozen."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 2)
    net.up.requires_grad_(False)
    save(tmp_path, optimizer, net)
    fresh = make_net()
    fresh.up.requires_grad_(False)
    target = torch.optim.AdamW(fresh.parameters())
    load(tmp_path, target, fresh)
    assert target.state[fresh.up.weight]
    assert optimizer_bits(target) == optimizer_bits(optimizer)


def test_never_updated_parameters_are_listed(tmp_path: Path) -> None:
    """OPT-10."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 1)
    save(tmp_path, optimizer, net)
    target = torch.optim.AdamW(net.parameters())
    notes = load(tmp_path, target, net)
    assert any("unused.weight" in note and "unused.bias" in note for note in notes)
    assert net.unused.weight not in target.state


def test_stateless_optimizer_stays_stateless(tmp_path: Path) -> None:
    """OPT-04: no empty entries for SGD without momentum, and nothing to say about it."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    train(net, [optimizer], 1)
    save(tmp_path, optimizer, net)
    target = torch.optim.SGD(net.parameters(), lr=0.25)
    assert load(tmp_path, target, net) == []
    assert dict(target.state) == {}
    assert target.param_groups[0]["lr"] == 0.5


def test_names_pair_not_positions(tmp_path: Path) -> None:
    """OPT-08, OPT-13: other order of groups and of parameters at the load."""
    net = make_net()
    optimizer = grouped(net)[0]
    train(net, [optimizer], 2)
    save(tmp_path, optimizer, net)
    named = dict(net.named_parameters())
    target = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if not n.endswith("bias")]},
            {"params": [p for n, p in reversed(named.items()) if n.endswith("bias")]},
        ],
        lr=1.0,
    )
    load(tmp_path, target, net)
    for parameter in named.values():
        assert bits(target.state.get(parameter, {})) == bits(optimizer.state.get(parameter, {}))
    assert [g["weight_decay"] for g in target.param_groups] == [0.01, 0.0]
    assert target.param_groups[0]["label"] == "w"


def test_groups_cut_differently_are_refused(tmp_path: Path) -> None:
    net = make_net()
    optimizer = grouped(net)[0]
    train(net, [optimizer], 1)
    save(tmp_path, optimizer, net)
    target = torch.optim.AdamW(net.parameters(), lr=1.0)
    with pytest.raises(MismatchError) as caught:
        load(tmp_path, target, net)
    codes = {problem.code for problem in caught.value.problems}
    assert codes == {"optimizer.group-conflict"}
    assert "weight_decay" in str(caught.value)
    assert not target.state


def test_an_empty_group_that_is_gone_is_harmless_and_a_new_one_keeps_its_values(
    tmp_path: Path,
) -> None:
    """OPT-15."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    optimizer.add_param_group({"params": [], "weight_decay": 0.25})
    train(net, [optimizer], 1)
    save(tmp_path, optimizer, net)
    load(tmp_path, torch.optim.AdamW(net.parameters()), net)
    target = torch.optim.AdamW(net.parameters())
    target.add_param_group({"params": [], "weight_decay": 0.75})
    target.add_param_group({"params": [], "weight_decay": 0.125})
    notes = load(tmp_path, target, net)
    assert [g["weight_decay"] for g in target.param_groups] == [0.01, 0.25, 0.125]
    assert any("@empty.AdamW.0.2" in note for note in notes)


@pytest.mark.parametrize("removed", sorted(EXCUSABLE))
def test_keys_of_other_torch_versions_are_filled(tmp_path: Path, removed: str) -> None:
    """OPT-14: a file without a key that some torch added."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    optimizer.param_groups[0].pop(removed, None)
    flat = optimizer_state_dict(optimizer, net)
    target = torch.optim.AdamW(net.parameters(), foreach=False, fused=False)
    target.param_groups[0].setdefault(removed, 0.5)
    live = target.param_groups[0][removed]
    notes = load_optimizer_state_dict(target, net, flat)
    default = EXCUSABLE[removed]
    expected = default if default in (None, False) else live
    assert target.param_groups[0][removed] == expected
    assert any(removed in note for note in notes)


def test_an_unknown_missing_hyperparameter_is_an_error() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    flat = optimizer_state_dict(optimizer, net)
    flat = {key: value for key, value in flat.items() if not key.endswith(".eps")}
    with pytest.raises(MismatchError, match=r"has no eps for AdamW group 0") as caught:
        load_optimizer_state_dict(optimizer, net, flat)
    assert caught.value.problems[0].code == "optimizer.missing-hyperparameter"
    load_optimizer_state_dict(optimizer, net, flat, keep=("eps",))


def test_none_hyperparameters_come_back_over_values() -> None:
    net = make_net()
    optimizer = Kitchen(net.parameters())
    flat = optimizer_state_dict(optimizer, net)
    target = Kitchen(net.parameters(), warmup=5)
    load_optimizer_state_dict(target, net, flat)
    assert target.param_groups[0]["warmup"] is None


def test_initial_lr_is_kept() -> None:
    """OPT-17."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    flat = optimizer_state_dict(optimizer, net)
    target = torch.optim.AdamW(net.parameters(), lr=0.125)
    load_optimizer_state_dict(target, net, flat)
    assert target.param_groups[0]["initial_lr"] == 0.5
    assert target.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("saved", [True, False])
def test_amsgrad_follows_the_file_unless_kept(tmp_path: Path, saved: bool) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), amsgrad=saved)
    train(net, [optimizer], 2)
    save(tmp_path, optimizer, net)
    for stepped in (False, True):
        target = torch.optim.AdamW(net.parameters(), amsgrad=not saved)
        if stepped:
            train(net, [target], 1)
        notes = load(tmp_path, target, net)
        assert optimizer_bits(target) == optimizer_bits(optimizer)
        assert any("amsgrad" in note for note in notes)
        dropped = "max_exp_avg_sq dropped: the checkpoint's group does not use it"
        assert any(dropped in note for note in notes) is (stepped and not saved)
        train(net, [target], 1)

    target = torch.optim.AdamW(net.parameters(), amsgrad=not saved)
    notes = load(tmp_path, target, net, keep=("amsgrad",))
    assert target.param_groups[0]["amsgrad"] is not saved
    state = target.state[net.up.weight]
    assert ("max_exp_avg_sq" in state) is not saved
    assert bits(state["exp_avg"]) == bits(optimizer.state[net.up.weight]["exp_avg"])
    assert any("amsgrad switched" in note for note in notes)
    train(net, [target], 1)


class Renamed(torch.optim.AdamW):
    """A subclass that keeps what torch's own keeps, since it steps as torch's own does."""


class Otherwise(torch.optim.AdamW):
    """A subclass that steps by itself, and keeps what it likes."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            self.state[p]["mean"] = p.grad.clone()


def test_a_subclass_that_steps_by_itself_keeps_what_it_likes() -> None:
    net = make_net()
    optimizer, target = Otherwise(net.parameters()), Otherwise(net.parameters())
    train(net, [optimizer], 1)
    load_optimizer_state_dict(target, net, optimizer_state_dict(optimizer, net))
    assert optimizer_bits(target) == optimizer_bits(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Renamed])
@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("stepped", [False, True])
def test_missing_state_names_the_parameter(kind: Any, key: str, stepped: bool) -> None:
    """OPT-03."""
    net = make_net()
    optimizer = kind(net.parameters())
    train(net, [optimizer], 1)
    flat = optimizer_state_dict(optimizer, net)
    del flat[f"state.layers.11.weight.{key}"]
    target = kind(net.parameters())
    if stepped:
        train(net, [target], 1)
    before = optimizer_bits(target)
    with pytest.raises(MismatchError, match=rf"layers\.11\.weight: the checkpoint lacks {key}"):
        load_optimizer_state_dict(target, net, flat)
    assert optimizer_bits(target) == before


class Holding(torch.optim.Optimizer):
    """Nothing is known of it, so what it holds is all that tells what a file must have."""

    def __init__(self, params: Any, **flags: float) -> None:
        super().__init__(params, {"lr": 0.5, **flags})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            self.state[p] = {"step": torch.tensor(1.0), "momentum_buffer": p.grad.clone()}


@pytest.mark.parametrize(
    ("flags", "lost"),
    [({}, "momentum_buffer"), ({"momentum": 0.5}, "momentum_buffer"), ({"momentum": 0.0}, "step")],
    ids=str,
)
def test_what_an_unknown_optimizer_holds_is_wanted_of_the_file(
    flags: dict[str, float], lost: str
) -> None:
    with pytest.raises(MismatchError, match=rf"layers\.11\.weight: the checkpoint lacks {lost}"):
        _without(lost, flags)


@pytest.mark.parametrize(
    ("flags", "lost", "told"),
    [
        ({"momentum": 0.0}, "momentum_buffer", "does not use it"),
        ({"step": 1.0}, "step", ""),
    ],
    ids=str,
)
def test_what_a_group_has_switched_off_or_counts_itself_may_be_absent(
    flags: dict[str, float], lost: str, told: str
) -> None:
    state, notes = _without(lost, flags)
    assert lost not in state
    assert len(state) == 1
    dropped = [note for note in notes if f"{lost} dropped: the checkpoint's group" in note]
    assert [note[-len(told) :] for note in dropped] == ([told] if told else [])


def _without(lost: str, flags: dict[str, float]) -> tuple[dict[str, Any], list[str]]:
    """One parameter's state, and the notes, after the load of a file that lacks a part of it."""
    net = make_net()
    optimizer, target = (Holding(net.parameters(), **flags) for _ in range(2))
    train(net, [optimizer], 1)
    flat = optimizer_state_dict(optimizer, net)
    del flat[f"state.layers.11.weight.{lost}"]
    train(net, [target], 1)
    notes = load_optimizer_state_dict(target, net, flat)
    return target.state[net.get_parameter("layers.11.weight")], notes


def test_other_shape_is_refused(tmp_path: Path) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 1)
    save(tmp_path, optimizer, net)
    other = make_net()
    other.up = nn.Linear(6, 11)
    target = torch.optim.AdamW(other.parameters())
    with pytest.raises(MismatchError) as caught:
        load(tmp_path, target, other)
    assert {p.code for p in caught.value.problems} == {"optimizer.shape"}
    assert len(caught.value.problems) == 4  # exp_avg and exp_avg_sq of weight and bias: all said


def test_a_parameter_the_file_does_not_know_is_refused() -> None:
    net = make_net()
    part = [p for n, p in net.named_parameters() if not n.startswith("up")]
    flat = optimizer_state_dict(torch.optim.AdamW(part), net)
    with pytest.raises(MismatchError, match=r"up\.weight, up\.bias"):
        load_optimizer_state_dict(torch.optim.AdamW(net.parameters()), net, flat)


def test_other_processes_parameters_are_left_out(tmp_path: Path) -> None:
    """OPT-18: two pipeline stages in one checkpoint, each takes its own."""
    net = make_net()
    first = torch.optim.AdamW(net.up.parameters(), lr=0.5)
    second = torch.optim.AdamW(net.down.parameters(), lr=0.25)
    train(net, [first, second], 1)
    save(tmp_path, [first, second], net)
    target = torch.optim.AdamW(net.down.parameters(), lr=1.0)
    template = optimizer_template(target, net, manifest_of(tmp_path))
    assert all(".down." in key for key in template)
    load(tmp_path, target, net)
    assert target.param_groups[0]["lr"] == 0.25
    assert optimizer_bits(target) == optimizer_bits(second)


def tied() -> nn.Module:
    model = nn.Module()
    model.head = nn.Linear(6, 13, bias=False)
    model.embed = nn.Embedding(13, 6)
    model.embed.weight = model.head.weight
    return model


def test_ties_have_one_name_and_load_under_any(tmp_path: Path) -> None:
    """OPT-06."""
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.embed(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    flat = save(tmp_path, optimizer, model)
    assert {key.split(".")[1] for key in flat} == {"head"}

    other = nn.Module()  # the other name first
    other.embed = nn.Embedding(13, 6)
    other.head = nn.Linear(6, 13, bias=False)
    other.head.weight = other.embed.weight
    target = torch.optim.AdamW(other.parameters())
    load(tmp_path, target, other)
    assert optimizer_bits(target) == optimizer_bits(optimizer)
    assert {k.split(".")[1] for k in optimizer_state_dict(target, other)} == {"embed"}


def test_two_states_for_one_tie_are_refused(tmp_path: Path) -> None:
    loose = nn.Module()
    loose.head, loose.embed = nn.Linear(6, 13, bias=False), nn.Embedding(13, 6)
    optimizer = torch.optim.AdamW(loose.parameters())
    loose.head(loose.embed(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    save(tmp_path, optimizer, loose)
    model = tied()
    with pytest.raises(MismatchError, match=r"two optimizer states: head\.weight, embed\.weight"):
        load(tmp_path, torch.optim.AdamW(model.parameters()), model)


def test_wrappers_do_not_show(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = make_net()
    plain = {n for n, _ in net.named_parameters()}
    net.layers["3"] = checkpoint_wrapper(net.layers["3"])
    wrapped = torch.compile(net)
    optimizer = torch.optim.SGD(wrapped.named_parameters(), momentum=0.5)
    flat = optimizer_state_dict(optimizer, wrapped)
    assert {
        k.removeprefix("param_groups.").removesuffix(".lr") for k in flat if k.endswith(".lr")
    } == plain


def test_names_of_a_wrapper_that_the_optimizer_remembers_give_way_to_the_models() -> None:
    """Built from a DDP wrapper's names: the model, looked at by identity, knows better."""
    net = make_net()
    named = [(f"module.{name}", parameter) for name, parameter in net.named_parameters()]
    flat = optimizer_state_dict(torch.optim.SGD(named), net)
    assert {k.split(".")[1] for k in flat} == {n.split(".")[0] for n, _ in net.named_parameters()}


class FailsOnLoad(torch.optim.AdamW):
    """Breaks half-way: its second copies cannot be refreshed."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if getattr(self, "armed", False):
            raise RuntimeError("no room for second copies")


@pytest.mark.parametrize("how", ["setstate", "hook"])
def test_a_load_that_fails_half_way_changes_nothing(tmp_path: Path, how: str) -> None:
    net = make_net()
    make = [
        torch.optim.AdamW(net.up.parameters(), lr=0.5),
        FailsOnLoad(net.down.parameters(), lr=0.25),
    ]
    train(net, make, 1)
    save(tmp_path, make, net)
    train(net, make, 1)
    groups = [o.param_groups for o in make]
    states = [o.state for o in make]
    before = [optimizer_bits(o) for o in make]
    if how == "setstate":
        make[1].armed = True
    else:
        make[1].register_load_state_dict_post_hook(lambda o: 1 / 0)
    with pytest.raises(MismatchError, match="all optimizers are as they were") as caught:
        load(tmp_path, make, net)
    assert caught.value.problems[0].code == "optimizer.refused"
    assert [optimizer_bits(o) for o in make] == before
    assert all(o.param_groups is g for o, g in zip(make, groups, strict=True))
    assert all(o.state is s for o, s in zip(make, states, strict=True))
    train(net, make, 1)


def test_post_hooks_refresh_second_copies(tmp_path: Path) -> None:
    """REF-01: an optimizer with copies of its own hears of the load."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    train(net, [optimizer], 1)
    save(tmp_path, optimizer, net)
    target = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    seen: list[Any] = []
    target.register_load_state_dict_post_hook(
        lambda o: seen.append(bits(o.state[net.up.weight]["momentum_buffer"]))
    )
    load(tmp_path, target, net)
    assert seen == [bits(optimizer.state[net.up.weight]["momentum_buffer"])]


def test_groups_keep_their_identity_for_schedulers(tmp_path: Path) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    group = optimizer.param_groups[0]
    load_optimizer_state_dict(optimizer, net, optimizer_state_dict(optimizer, net))
    assert optimizer.param_groups[0] is group


def test_old_float_steps_become_tensors_as_torch_does(tmp_path: Path) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 2)
    flat = optimizer_state_dict(optimizer, net)
    flat = {k: float(v) if k.endswith(".step") else v for k, v in flat.items()}
    target = torch.optim.AdamW(net.parameters())
    load_optimizer_state_dict(target, net, flat)
    assert optimizer_bits(target) == optimizer_bits(optimizer)


def test_a_pickled_none_is_no_moment() -> None:
    """The silent face: torchtitan 0.3.0 passes None on, DCP pickles it."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 1)
    flat = optimizer_state_dict(optimizer, net)
    flat["state.up.weight.max_exp_avg_sq"] = None
    notes = load_optimizer_state_dict(optimizer, net, flat)
    assert "max_exp_avg_sq" not in optimizer.state[net.up.weight]
    assert any("pickled None" in note and "up.weight.max_exp_avg_sq" in note for note in notes)
    before = optimizer_bits(optimizer)
    flat = optimizer_state_dict(optimizer, net)
    flat["state.up.weight.exp_avg"] = None
    with pytest.raises(MismatchError, match=r"up\.weight: the checkpoint lacks exp_avg"):
        load_optimizer_state_dict(optimizer, net, flat)
    assert optimizer_bits(optimizer) == before


def test_a_recorded_none_is_no_moment_that_torch_needs() -> None:
    """An optimizer that moved its moments away recorded it; torch's AdamW could not step."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 1)
    flat = optimizer_state_dict(optimizer, net)
    leaves = [[key, ("leaf", key)] for key in ("step", "exp_avg")]
    flat["state.up.weight.@layout"] = {"node": ("dict", [*leaves, ["exp_avg_sq", ("none",)]])}
    del flat["state.up.weight.exp_avg_sq"]
    target = torch.optim.AdamW(net.parameters())
    with pytest.raises(MismatchError, match=r"up\.weight: the checkpoint lacks exp_avg_sq"):
        load_optimizer_state_dict(target, net, flat)


@pytest.mark.parametrize("key", ["lr", "weight_decay", "betas"])
def test_a_pickled_none_is_no_hyperparameter(key: str) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    flat = optimizer_state_dict(optimizer, net)
    flat |= {name: None for name in flat if name.endswith(f".{key}")}
    before = optimizer_bits(optimizer)
    with pytest.raises(MismatchError, match=rf"has no {key} for AdamW group 0"):
        load_optimizer_state_dict(optimizer, net, flat)
    assert optimizer_bits(optimizer) == before
    notes = load_optimizer_state_dict(optimizer, net, flat, keep=(key,))
    assert optimizer_bits(optimizer) == before
    assert any("pickled None counts as absent" in note and key in note for note in notes)


def test_a_pickled_none_of_a_group_counts_as_absent_and_is_said() -> None:
    net = make_net()
    kitchen = Kitchen(net.parameters())
    flat = optimizer_state_dict(kitchen, net)
    flat = {k: v for k, v in flat.items() if not k.endswith("@none")}
    flat |= {f"param_groups.{n}.warmup": None for n, _ in net.named_parameters()}
    notes = load_optimizer_state_dict(kitchen, net, flat)
    assert any("pickled None" in note and "warmup" in note for note in notes)
    with pytest.raises(MismatchError, match="has no warmup"):
        load_optimizer_state_dict(Kitchen(net.parameters(), warmup=5), net, flat)
    # What torch holds None for anyway is nothing to talk about.
    adamw = torch.optim.AdamW(net.parameters())
    flat = optimizer_state_dict(adamw, net)
    flat |= {f"param_groups.{n}.{k}": None for n, _ in net.named_parameters() for k in NULLS}
    assert load_optimizer_state_dict(adamw, net, flat) == []


def test_a_tensor_in_the_file_beats_none_in_memory(tmp_path: Path) -> None:
    net = make_net()
    optimizer = Kitchen(net.parameters())
    train(net, [optimizer], 1)
    optimizer.state[net.up.weight]["absent"] = torch.tensor([0.5, 2.0])
    save(tmp_path, optimizer, net)
    target = Kitchen(net.parameters())
    train(net, [target], 1)
    assert target.state[net.up.weight]["absent"] is None
    load(tmp_path, target, net)
    assert optimizer_bits(target) == optimizer_bits(optimizer)


def test_a_recorded_none_beats_a_tensor_in_memory(tmp_path: Path) -> None:
    net = make_net()
    optimizer = Kitchen(net.parameters())
    train(net, [optimizer], 1)
    save(tmp_path, optimizer, net)
    optimizer.state[net.up.weight]["absent"] = torch.tensor([0.5, 2.0])
    load(tmp_path, optimizer, net)
    assert optimizer.state[net.up.weight]["absent"] is None


@pytest.mark.parametrize(
    "value",
    [object(), lambda x: x, Path, Net(), torch.eye(3).to_sparse()],
    ids=["object", "lambda", "class", "module", "sparse"],
)
def test_values_no_file_holds_are_refused_by_name(value: Any) -> None:
    net = make_net()
    optimizer = Kitchen(net.parameters())
    train(net, [optimizer], 1)
    optimizer.state[net.up.weight]["odd"] = value
    optimizer.param_groups[0]["strange"] = value
    with pytest.raises(SaveError) as caught:
        optimizer_state_dict(optimizer, net)
    text = str(caught.value)
    assert "up.weight: its optimizer state odd" in text
    assert "strange" in text


def test_state_without_a_parameter(tmp_path: Path) -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.state["clock"] = {"ticks": 5, "mean": torch.tensor(0.5)}
    save(tmp_path, optimizer, net)
    target = torch.optim.SGD(net.parameters())
    load(tmp_path, target, net)
    assert bits(target.state["clock"]) == bits(optimizer.state["clock"])


def test_lbfgs(tmp_path: Path) -> None:
    def run(net: Net, optimizer: torch.optim.LBFGS, steps: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.tensor([1, 5, 7])).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)

    net = make_net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.25, max_iter=3)
    run(net, optimizer, 3)
    save(tmp_path, optimizer, net)
    fresh = make_net(seed=9)
    fresh.load_state_dict(net.state_dict())
    target = torch.optim.LBFGS(fresh.parameters(), lr=0.25, max_iter=3)
    load(tmp_path, target, fresh)
    assert optimizer_bits(target) == optimizer_bits(optimizer)
    run(net, optimizer, 2)
    run(fresh, target, 2)
    assert model_bits(fresh) == model_bits(net)


def test_state_of_a_parameter_that_left_its_group_is_refused_by_name() -> None:
    """It would not be in the file, and nobody would know."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 1)
    (group,) = optimizer.param_groups
    for module in (net.up, net.down):
        gone = {id(p) for p in module.parameters()}
        group["params"] = [p for p in group["params"] if id(p) not in gone]
    stranger = nn.Parameter(torch.ones(5, 4))
    optimizer.state[stranger]["step"] = torch.tensor(1.0)
    optimizer.state[nn.Parameter(torch.ones(3))] = {}  # no state is nothing to lose
    with pytest.raises(SaveError) as caught:
        optimizer_state_dict(optimizer, net)
    assert [p.code for p in caught.value.problems] == ["optimizer.no-group"]
    assert "up.weight, up.bias, down.weight" in str(caught.value)
    assert "(5, 4)" in str(caught.value)
    for parameter in [p for p in optimizer.state if id(p) not in {id(q) for q in group["params"]}]:
        del optimizer.state[parameter]
    assert "state.layers.11.weight.exp_avg" in optimizer_state_dict(optimizer, net)


def test_one_parameter_in_two_optimizers_is_refused() -> None:
    net = make_net()
    pair = [torch.optim.SGD(net.parameters()), torch.optim.AdamW(net.up.parameters())]
    with pytest.raises(SaveError, match=r"under one name: up\.weight, up\.bias"):
        optimizer_state_dict(pair, net)


def test_a_parameter_of_no_model_part_is_refused() -> None:
    net = make_net()
    optimizer = torch.optim.SGD([*net.parameters(), nn.Parameter(torch.ones(5, 4))])
    with pytest.raises(SaveError, match=r"group 0, parameter \d+ \(5, 4\)"):
        optimizer_state_dict(optimizer, net)


def test_reading_twice_and_loading_twice(tmp_path: Path) -> None:
    """OPT-09, and two loads of one file."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 2)
    save(tmp_path, optimizer, net)
    want = optimizer_bits(optimizer)
    target = torch.optim.AdamW(net.parameters())
    load(tmp_path, target, net)
    load(tmp_path, target, net)
    assert optimizer_bits(target) == want


def test_unread_values_are_refused(tmp_path: Path) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 1)
    save(tmp_path, optimizer, net)
    template = optimizer_template(optimizer, net, manifest_of(tmp_path))
    with pytest.raises(MismatchError, match="planned and never read"):
        load_optimizer_state_dict(optimizer, net, template)


@pytest.mark.parametrize(
    "junk",
    [
        {"node": ("dict", 5)},
        {"node": ("leaf",)},
        {"node": ("?", [])},
        {"node": ("none",)},
        {"forms": 5},
    ],
)
def test_damaged_layouts_are_refused(tmp_path: Path, junk: Any) -> None:
    net = make_net()
    optimizer = Kitchen(net.parameters())
    train(net, [optimizer], 1)
    flat = optimizer_state_dict(optimizer, net)
    flat["state.up.weight.@layout"] = junk
    with pytest.raises(MismatchError, match=r"state\.up\.weight\.@layout"):
        load_optimizer_state_dict(optimizer, net, flat)


def test_the_file_names_types_exactly(tmp_path: Path) -> None:
    """Types of hyperparameters and of numbers in the state survive the file."""
    net = make_net()
    optimizer = Kitchen(net.parameters())
    train(net, [optimizer], 1)
    template_of = optimizer_template(optimizer, net, manifest_of_saved(tmp_path, optimizer, net))
    values = read(tmp_path, template_of)
    assert type(values["state.up.weight.step"]) is int
    assert type(values["param_groups.up.weight.betas"]) is tuple
    assert values["param_groups.up.weight.nesterov"] is True


def manifest_of_saved(folder: Path, optimizer: Any, net: Any) -> Any:
    save(folder, optimizer, net)
    return manifest_of(folder)


def test_deep_copies_are_not_needed(tmp_path: Path) -> None:
    """The dict holds the live tensors: staging copies once, not this module."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 1)
    flat = optimizer_state_dict(optimizer, net)
    assert flat["state.up.weight.exp_avg"] is optimizer.state[net.up.weight]["exp_avg"]
    assert copy.copy(flat).keys() == flat.keys()
