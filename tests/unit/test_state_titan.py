"""Beside torchtitan's own optimizer container: the same names and values, and both read both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.specimens.odd_optimizers import Net, bits, make_net, optimizer_bits
from torchtitan_ckpt.errors import MismatchError
from torchtitan_ckpt.state.optimizer import optimizer_state_dict
from torchtitan_ckpt.state.optimizer_load import load_optimizer_state_dict

titan: Any = pytest.importorskip(
    "torchtitan.components.optimizer", reason="the extra 'titan' is absent"
)
pytestmark = pytest.mark.needs_titan


def container(parts: list[Any]) -> Any:
    def group(pattern: str, name: str, **options: Any) -> Any:
        return titan.ParamGroupConfig(
            pattern=pattern, optimizer_name=name, optimizer_kwargs=options
        )

    groups = [
        group(r"bias$", "AdamW", lr=0.02, weight_decay=0.0),
        group(r"embed", "Adam", lr=0.03, amsgrad=True),
        group(r".*", "AdamW", lr=0.01),
    ]
    config = titan.OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    return titan.OptimizersContainer(config, model_parts=parts)


def parts_of(net: Net) -> list[Any]:
    """Two pipeline stages with the names of the whole model."""
    first, second = net, make_net()
    keep = {"embed", "layers"}
    second.load_state_dict(net.state_dict())
    for name in list(first._modules):
        if name not in keep:
            del first._modules[name]
    for name in keep - {"embed"}:
        del second._modules[name]
    del first._parameters["scale"]
    # Every pattern must match in every part, so each stage has an embedding of its own name.
    second.add_module("embed_out", second._modules.pop("embed"))
    return [first, second]


def step(parts: list[Any], optimizers: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for part in parts:
        for parameter in part.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizers.step()
    optimizers.zero_grad()


def run(steps: int, seed: int = 0) -> tuple[list[Any], Any]:
    parts = parts_of(make_net())
    optimizers = container(parts)
    for index in range(steps):
        step(parts, optimizers, seed + index)
    return parts, optimizers


def test_the_same_names_and_the_same_values() -> None:
    parts, optimizers = run(3)
    ours = optimizer_state_dict(optimizers, parts)
    theirs = optimizers.state_dict()
    assert {k: bits(v) for k, v in ours.items()} == {k: bits(v) for k, v in theirs.items()}


def test_ours_reads_theirs_and_theirs_reads_ours() -> None:
    parts, optimizers = run(3)
    want = [optimizer_bits(o) for o in optimizers]
    fresh_parts, fresh = run(0)
    load_optimizer_state_dict(fresh, fresh_parts, optimizers.state_dict())
    assert [optimizer_bits(o) for o in fresh] == want
    _, other = run(0)
    other.load_state_dict(optimizer_state_dict(optimizers, parts))
    assert [optimizer_bits(o) for o in other] == want


def test_the_containers_own_hooks_are_left_alone() -> None:
    parts, optimizers = run(1)
    calls: list[int] = []
    optimizers.register_step_pre_hook(lambda *a: calls.append(1))
    flat = optimizer_state_dict(optimizers, parts)
    load_optimizer_state_dict(optimizers, parts, flat)
    assert not calls
    step(parts, optimizers, 7)
    assert calls == [1]


def test_bf16_states_of_torchtitan_stay_bf16() -> None:
    """OPT-01: moments in bf16 under fp32 parameters."""
    parts, optimizers = run(1)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].bfloat16()
    flat = optimizer_state_dict(optimizers, parts)
    fresh_parts, fresh = run(0)
    load_optimizer_state_dict(fresh, fresh_parts, flat)
    assert [optimizer_bits(o) for o in fresh] == [optimizer_bits(o) for o in optimizers]


def test_another_pipeline_degree() -> None:
    """Two stages into one and back: names pair, whatever the order of optimizers and groups."""
    parts, optimizers = run(2)
    flat = optimizer_state_dict(optimizers, parts)
    one = torch.nn.Module()
    for part in parts:
        for name, child in part.named_children():
            one.add_module(name, child)
    one.scale = parts[1].scale
    merged = container([one])
    load_optimizer_state_dict(merged, one, flat)
    again = optimizer_state_dict(merged, one)
    assert {k: bits(v) for k, v in again.items()} == {k: bits(v) for k, v in flat.items()}
    with pytest.raises(MismatchError, match="no optimizer state or group for"):
        load_optimizer_state_dict(
            merged, one, optimizer_state_dict(optimizers.optimizers[0], parts)
        )
