"""Learning rates go on bit for bit, for every kind of scheduler and several at once."""

from __future__ import annotations

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


def make(kind: str, rate: float = 0.1) -> tuple[torch.optim.Optimizer, LRScheduler]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=rate, momentum=0.9)
    return optimizer, KINDS[kind](optimizer)


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
    pairs = [make(kind, 0.1 / (i + 1)) for i, kind in enumerate(kinds)]
    run(pairs, 4)
    schedulers = [scheduler for _, scheduler in pairs]
    before = [bits(s.state_dict()) for s in schedulers]
    flat = scheduler_state_dict(schedulers)
    assert [bits(s.state_dict()) for s in schedulers] == before
    values = through_disk(tmp_path, flat)

    fresh = [make(kind, 0.1 / (i + 1)) for i, kind in enumerate(kinds)]
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
    pairs = [make("lambda"), make("lambda")]
    run(pairs[:1], 3)
    flat = scheduler_state_dict([s for _, s in pairs])
    assert set(flat) == {"last_epoch", "schedulers.0", "schedulers.1"}
    fresh = [make("lambda"), make("lambda")]
    # One epoch for both would do for these targets, but it is not what was saved.
    run(fresh[1:], 1)
    load_scheduler_state([s for _, s in fresh], flat)
    assert [s.last_epoch for _, s in fresh] == [3, 0]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({}, "scheduler.missing"),
        ({"last_epoch": 3}, "scheduler.kind"),
        ({"last_epoch": 3, "schedulers.0": {}, "schedulers.1": {}}, "scheduler.count"),
        ({"last_epoch": 3, "schedulers.0": {"gamma": 1.0}}, "scheduler.kind"),
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

    first, (optimizer, _) = make("multistep"), make("multistep")
    pair = [first, (optimizer, Breaks(optimizer, [2]))]
    run(pair, 4)
    flat = scheduler_state_dict([s for _, s in pair])
    run(pair, 1)
    before = [bits(s.state_dict()) for _, s in pair]
    with pytest.raises(MismatchError, match="RuntimeError: no"):
        load_scheduler_state([s for _, s in pair], flat)
    assert [bits(s.state_dict()) for _, s in pair] == before


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
