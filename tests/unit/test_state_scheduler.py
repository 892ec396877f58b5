"""Learning rates go on bit for bit, for every kind of scheduler and several at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim import lr_scheduler as lr
from torch.optim.lr_scheduler import LRScheduler

from tests.specimens.odd_optimizers import bits, manifest_of
from torchtitan_ckpt.errors import MismatchError, SaveError
from torchtitan_ckpt.state.optimizer import optimizer_state_dict
from torchtitan_ckpt.state.optimizer_load import load_optimizer_state_dict
from torchtitan_ckpt.state.scheduler import (
    load_scheduler_state,
    scheduler_state_dict,
    scheduler_template,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before"),
    pytest.mark.filterwarnings("ignore:The epoch parameter"),
]


class Decay:
    """A lambda with state of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, step: int) -> float:
        self.factor *= 0.75
        return self.factor


KINDS: dict[str, Callable[[Any], LRScheduler]] = {
    "lambda": lambda o: lr.LambdaLR(o, lambda n: 1 / (n + 3)),
    "lambda-object": lambda o: lr.LambdaLR(o, Decay(0.9)),
    "multistep": lambda o: lr.MultiStepLR(o, [2, 3, 5], gamma=0.3),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 11),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "one-cycle": lambda o: lr.OneCycleLR(o, 0.3, total_steps=20),
    "cyclic": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.5, total_iters=4), lr.ExponentialLR(o, 0.9)]
    ),
}


def make(
    kind: str, rate: float = 0.1, part: str = "up"
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = over({f"{part}.weight": rate, f"{part}.bias": rate})
    return optimizer, KINDS[kind](optimizer)


def over(*groups: dict[str, float]) -> torch.optim.Optimizer:
    """An optimizer with a group for each `{parameter: rate}`, whose rates are equal."""
    held: list[dict[str, Any]] = [
        {
            "params": [(name, torch.nn.Parameter(torch.ones(3))) for name in group or {"none"}],
            "lr": next(iter(group.values()), 0.25),
        }
        for group in groups
    ]
    optimizer = torch.optim.SGD(held, momentum=0.9)
    for made, group in zip(optimizer.param_groups, groups, strict=True):
        if not group:  # torch takes none that is empty from the start
            made.update(params=[], param_names=[])
    return optimizer


def run(pairs: list[tuple[torch.optim.Optimizer, LRScheduler]], steps: int) -> list[Any]:
    rates = []
    for _ in range(steps):
        for optimizer, scheduler in pairs:
            optimizer.step()
            scheduler.step()
            rates.append([float(g["lr"]).hex() for g in optimizer.param_groups])
    return rates


def through_disk(folder: Path, flat: dict[str, Any]) -> dict[str, Any]:
    disk = {f"lr_scheduler.{key}": value for key, value in flat.items()}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(disk, checkpoint_id=folder, planner=planner)
    template = scheduler_template(manifest_of(folder), "lr_scheduler.")
    target = {f"lr_scheduler.{key}": value for key, value in template.items()}
    load = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(target, checkpoint_id=folder, planner=load)
    return {key.removeprefix("lr_scheduler."): value for key, value in target.items()}


@pytest.mark.parametrize("kinds", [[k] for k in KINDS] + [["lambda", "cosine"], ["multistep"] * 2])
def test_rates_go_on_bit_for_bit(tmp_path: Path, kinds: list[str]) -> None:
    pairs = [make(kind, 0.1 / (i + 1), f"part{i}") for i, kind in enumerate(kinds)]
    run(pairs, 4)
    schedulers = [scheduler for _, scheduler in pairs]
    before = [bits(s.state_dict()) for s in schedulers]
    flat = scheduler_state_dict(schedulers)
    assert [bits(s.state_dict()) for s in schedulers] == before
    values = through_disk(tmp_path, flat)

    fresh = [make(kind, 0.1 / (i + 1), f"part{i}") for i, kind in enumerate(kinds)]
    for (target, _), (source, _) in zip(fresh, pairs, strict=True):
        load_optimizer_state_dict(target, [], optimizer_state_dict(source, []))
    load_scheduler_state([s for _, s in fresh], values)
    assert [bits(s.state_dict()) for _, s in fresh] == before
    assert [s.get_last_lr() for _, s in fresh] == [s.get_last_lr() for s in schedulers]
    assert run(fresh, 6) == run(pairs, 6)


def test_plateau() -> None:
    def feed(scheduler: Any, losses: list[float]) -> list[str]:
        rates = []
        for loss in losses:
            scheduler.step(loss)
            rates.append(scheduler.optimizer.param_groups[0]["lr"].hex())
        return rates

    optimizer, _ = make("lambda")
    scheduler = lr.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    feed(scheduler, [1.0, 1.0])
    flat = scheduler_state_dict(scheduler)
    target, _ = make("lambda")
    load_optimizer_state_dict(target, [], optimizer_state_dict(optimizer, []))
    resumed = lr.ReduceLROnPlateau(target, patience=1, factor=0.5)
    load_scheduler_state(resumed, flat)
    assert feed(resumed, [1.0, 1.0, 0.5, 0.6]) == feed(scheduler, [1.0, 1.0, 0.5, 0.6])


def test_plain_lambdas_write_torchtitans_one_number() -> None:
    pairs = [make("lambda", 0.1), make("lambda", 0.2)]
    run(pairs, 5)
    assert scheduler_state_dict([s for _, s in pairs]) == {"last_epoch": 5}
    one = make("lambda", 0.4)  # another pipeline degree: another number of schedulers
    load_scheduler_state(one[1], {"last_epoch": 5})
    assert one[1].get_last_lr() == [0.4 / 8]
    assert one[1].state_dict()["last_epoch"] == 5


def test_differing_schedulers_lose_nothing() -> None:
    pairs = [make("lambda", part="up"), make("lambda", part="down")]
    run(pairs[:1], 3)
    flat = scheduler_state_dict([s for _, s in pairs])
    names = ("up.weight", "up.bias", "down.weight", "down.bias")
    assert set(flat) == {"last_epoch", *(f"schedulers.of.{name}" for name in names)}
    fresh = [make("lambda", part="up"), make("lambda", part="down")]
    # One epoch for both would do for these targets, but it is not what was saved.
    run(fresh[1:], 1)
    load_scheduler_state([s for _, s in fresh], flat)
    assert [s.last_epoch for _, s in fresh] == [3, 0]


def of_both(entry: Any) -> dict[str, Any]:
    return {"schedulers.of.up.weight": entry, "schedulers.of.up.bias": entry}


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({}, "scheduler.missing"),
        ({"last_epoch": 3}, "scheduler.kind"),
        ({"last_epoch": 3, "schedulers.0": {}, "schedulers.1": {}}, "scheduler.count"),
        ({"last_epoch": 3, "schedulers.0": {"gamma": 1.0}}, "scheduler.kind"),
        ({"last_epoch": 3, "schedulers.0": 7}, "scheduler.kind"),
        ({"last_epoch": 3, "schedulers.of.other": [{}]}, "scheduler.missing"),
        ({"last_epoch": 3, "schedulers.of.up.weight": [{}]}, "scheduler.missing"),
        (of_both([{"gamma": 1.0}]), "scheduler.kind"),
        (of_both([{}, {}]), "scheduler.count"),
        (of_both([{}]) | {"schedulers.0": {}}, "scheduler.count"),
        (of_both(7), "scheduler.count"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(values: Any, code: str) -> None:
    pair = make("multistep")
    run([pair], 2)
    before = bits(pair[1].state_dict())
    with pytest.raises(MismatchError) as caught:
        load_scheduler_state(pair[1], values)
    assert caught.value.problems[0].code == code
    assert bits(pair[1].state_dict()) == before


def test_a_failure_in_the_second_restores_the_first() -> None:
    class Breaks(lr.MultiStepLR):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if state_dict["last_epoch"] == 4:
                raise RuntimeError("no")
            super().load_state_dict(state_dict)

    first, (optimizer, _) = make("multistep"), make("multistep", part="down")
    pair = [first, (optimizer, Breaks(optimizer, [2]))]
    run(pair, 4)
    flat = scheduler_state_dict([s for _, s in pair])
    run(pair, 1)
    before = [bits(s.state_dict()) for _, s in pair]
    with pytest.raises(MismatchError, match="RuntimeError: no"):
        load_scheduler_state([s for _, s in pair], flat)
    assert [bits(s.state_dict()) for _, s in pair] == before


def test_one_that_refuses_every_state_gets_its_attributes_back() -> None:
    class Broken(lr.StepLR):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.step_size = -1
            raise RuntimeError("not this either")

    first, (optimizer, _) = make("multistep"), make("multistep", part="down")
    pair = [first, (optimizer, Broken(optimizer, 2))]
    run(pair, 4)
    flat = scheduler_state_dict([s for _, s in pair])
    run(pair, 1)
    before = [bits(s.state_dict()) for _, s in pair]
    with pytest.raises(MismatchError) as caught:
        load_scheduler_state([s for _, s in pair], flat)
    (problem,) = caught.value.problems
    assert (problem.code, problem.actual) == ("scheduler.refused", "RuntimeError: not this either")
    assert "Broken.load_state_dict" in problem.where
    assert [bits(s.state_dict()) for _, s in pair] == before


def test_a_function_that_fails_is_found_before_anything_changes() -> None:
    first, (optimizer, _) = make("lambda"), make("lambda", part="down")
    pair = [first, (optimizer, lr.LambdaLR(optimizer, lambda n: 1 / (n - 5)))]
    before = [bits(s.state_dict()) for _, s in pair]
    with pytest.raises(MismatchError, match="epoch 5 raised ZeroDivisionError"):
        load_scheduler_state([s for _, s in pair], {"last_epoch": 5})
    assert [bits(s.state_dict()) for _, s in pair] == before


# --- groups and optimizers that are divided otherwise -------------------------------------------

RATES = {"embed": 0.3, "a": 0.1, "b": 0.1, "head": 0.2}
# As one optimizer with groups, as stages of a pipeline have them, and one for each parameter.
DIVISIONS: dict[str, list[list[list[str]]]] = {
    "one": [[["a", "b"], ["embed"], ["head"]]],
    "other order": [[["head"], ["b", "a"], ["embed"]]],
    "stages": [[["embed"], ["a"]], [["b"], [], ["head"]]],
    "each": [[["head"]], [["b"]], [["a"]], [["embed"]]],
}
DIVIDED: dict[str, Callable[[Any], LRScheduler]] = {
    **{kind: make for kind, make in KINDS.items() if "lambda" not in kind},
    "cyclic": lambda o: lr.CyclicLR(
        o, rates(o, 0.5), rates(o, 3.0), step_size_up=3, base_momentum=0.5
    ),
    "lambdas": lambda o: lr.LambdaLR(o, [Decay(4 * g["lr"]) for g in o.param_groups]),
    "warmed": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 9)], [3]
    ),
}


def rates(optimizer: torch.optim.Optimizer, factor: float) -> list[float]:
    return [group["lr"] * factor for group in optimizer.param_groups]


def divided(division: str, kind: str) -> list[tuple[torch.optim.Optimizer, LRScheduler]]:
    optimizers = [
        over(*({name: RATES[name] for name in group} for group in groups))
        for groups in DIVISIONS[division]
    ]
    return [(optimizer, DIVIDED[kind](optimizer)) for optimizer in optimizers]


def rate_of(pairs: list[tuple[torch.optim.Optimizer, LRScheduler]]) -> dict[str, tuple[str, str]]:
    """By parameter: the rate of its group, and what the scheduler says that it is."""
    return {
        name: (group["lr"].hex(), last.hex())
        for optimizer, scheduler in pairs
        for group, last in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True)
        for name in group["param_names"]
    }


@pytest.mark.parametrize("kind", DIVIDED)
@pytest.mark.parametrize("target", DIVISIONS)
@pytest.mark.parametrize("source", DIVISIONS)
def test_rates_go_on_where_groups_are_divided_otherwise(
    source: str, target: str, kind: str
) -> None:
    pairs = divided(source, kind)
    run(pairs, 4)
    flat = scheduler_state_dict([s for _, s in pairs])
    optimizers = optimizer_state_dict([o for o, _ in pairs], [])
    fresh = divided(target, kind)
    load_optimizer_state_dict([o for o, _ in fresh], [], optimizers)
    load_scheduler_state([s for _, s in fresh], flat)
    assert bits(scheduler_state_dict([s for _, s in fresh])) == bits(flat)
    assert rate_of(fresh) == rate_of(pairs)
    for _ in range(6):
        run(fresh, 1)
        run(pairs, 1)
        assert rate_of(fresh) == rate_of(pairs)


def test_stages_say_the_same_of_what_they_share() -> None:
    """Nothing in an entry tells how many groups or optimizers its stage has."""
    flats = {}
    for division in DIVISIONS:
        pairs = divided(division, "warmed")
        run(pairs, 4)
        flats[division] = bits(scheduler_state_dict([s for _, s in pairs]))
    assert all(flat == flats["one"] for flat in flats.values())
    assert set(scheduler_state_dict([s for _, s in pairs])) == {
        "last_epoch",
        *(f"schedulers.of.{name}" for name in RATES),
    }


def test_several_over_one_optimizer() -> None:
    def chained() -> list[tuple[torch.optim.Optimizer, LRScheduler]]:
        optimizer = over({"a": 0.1}, {"b": 0.3})
        return [
            (optimizer, lr.ConstantLR(optimizer, 0.5, total_iters=3)),
            (optimizer, lr.ExponentialLR(optimizer, 0.9)),
        ]

    pairs, fresh = chained(), chained()
    run(pairs, 4)
    load_optimizer_state_dict(fresh[0][0], [], optimizer_state_dict(pairs[0][0], []))
    load_scheduler_state([s for _, s in fresh], scheduler_state_dict([s for _, s in pairs]))
    assert run(fresh, 4) == run(pairs, 4)


def test_what_was_several_schedules_is_not_made_one() -> None:
    pairs = [make("multistep", part="up"), make("multistep", part="down")]
    run(pairs[:1], 2)
    flat = scheduler_state_dict([s for _, s in pairs])
    for groups in (
        [{"up.weight": 0.1, "down.bias": 0.1}],
        [{"up.weight": 0.1}, {"down.bias": 0.1}],
    ):
        target = KINDS["multistep"](over(*groups))
        with pytest.raises(MismatchError, match="differing schedules") as caught:
            load_scheduler_state(target, flat)
        assert caught.value.problems[0].code == "scheduler.differs"
        assert "lr_scheduler" in caught.value.problems[0].fix


# --- files of earlier versions ------------------------------------------------------------------


def numbered(pairs: list[tuple[torch.optim.Optimizer, LRScheduler]]) -> dict[str, Any]:
    """The state as earlier versions wrote it: whole, by the scheduler's number."""

    def plain(value: Any) -> Any:
        if isinstance(value, Counter):
            return {"@Counter": dict(value)}
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if type(value) is list else value

    return {f"schedulers.{i}": plain(s.state_dict()) for i, (_, s) in enumerate(pairs)}


@pytest.mark.parametrize("kind", DIVIDED)
def test_a_file_of_an_earlier_version_is_read(tmp_path: Path, kind: str) -> None:
    pairs, fresh = divided("stages", kind), divided("stages", kind)
    run(pairs, 4)
    values = through_disk(tmp_path, numbered(pairs))
    load_optimizer_state_dict(
        [o for o, _ in fresh], [], optimizer_state_dict([o for o, _ in pairs], [])
    )
    load_scheduler_state([s for _, s in fresh], values)
    assert run(fresh, 6) == run(pairs, 6)


@pytest.mark.parametrize(("target", "code"), [("one", "count"), ("groups", "groups")])
def test_a_file_of_an_earlier_version_that_does_not_fit_is_refused(target: str, code: str) -> None:
    pairs = divided("stages", "cosine")
    fresh = divided("one", "cosine")
    if target == "groups":
        pairs, fresh = divided("one", "cosine"), [make("cosine")]
    before = [bits(s.state_dict()) for _, s in fresh]
    with pytest.raises(MismatchError) as caught:
        load_scheduler_state([s for _, s in fresh], numbered(pairs))
    assert caught.value.problems[0].code == f"scheduler.{code}"
    assert "leave lr_scheduler out of the load" in caught.value.problems[0].fix
    assert [bits(s.state_dict()) for _, s in fresh] == before


def test_unstorable_schedules_are_refused() -> None:
    optimizer, _ = make("lambda")
    scheduler = lr.LambdaLR(optimizer, Decay(0.5))
    scheduler.lr_lambdas[0].callback = lambda: 1
    with pytest.raises(SaveError, match=r"scheduler 0 \(LambdaLR\)"):
        scheduler_state_dict(scheduler)


@pytest.mark.needs_titan
def test_torchtitans_container() -> None:
    titan = pytest.importorskip(
        "torchtitan.components.optimizer.lr_scheduler", reason="the extra 'titan' is absent"
    )
    optimizer, _ = make("lambda")
    container = titan.LRSchedulersContainer([optimizer], lambda n: 1 / (n + 3))
    for _ in range(3):
        optimizer.step()
        container.step()
    flat = scheduler_state_dict(container)
    assert flat == container.state_dict() == {"last_epoch": 3}
    other = titan.LRSchedulersContainer([make("lambda")[0]], lambda n: 1 / (n + 3))
    load_scheduler_state(other, flat)
    assert other.schedulers[0].get_last_lr() == container.schedulers[0].get_last_lr()
