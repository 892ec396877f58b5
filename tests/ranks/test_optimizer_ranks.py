"""Optimizer state under FSDP2 on real processes: every degree to every other, and exact resumes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from conformance.degrees import Case
from conformance.jobs import Job, small_table
from conformance.ranks import RankPool
from conformance.swap import SwapAdamW, speak
from tests.specimens.odd_optimizers import (
    Factored,
    HalfMoments,
    LocalMoments,
    SpeakingLocal,
    bits,
    load,
    save,
)
from torchtitan_ckpt.state.model import load_model_state_dict, model_state_dict
from torchtitan_ckpt.state.optimizer import optimizer_state_dict

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Wide(nn.Module):
    """Rows that 2, 3 and 4 ranks cut unevenly, one so short that ranks come out empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 11)
        self.down = nn.Linear(11, 5, bias=False)
        self.short = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.short(self.down(self.up(x)))
        return out


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.125, amsgrad=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.125, fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.125, momentum=0.5),
    "factored": lambda m: Factored(m.parameters()),
    "factored-plain": lambda m: Factored(m.parameters(), plain=True),
    "local": lambda m: LocalMoments(m.parameters()),
    "speaking-local": lambda m: SpeakingLocal(m.parameters()),
    "swap": lambda m: speak(SwapAdamW(m.parameters(), 0.125)),
    "bf16-moments": lambda m: HalfMoments(m.parameters(), torch.bfloat16),
}


def build(shape: tuple[int, ...] | None) -> nn.Module:
    """The same weights on every rank, sharded over `shape` (one number: FSDP, two: HSDP)."""
    torch.manual_seed(5)
    model = Wide()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            count = torch.arange(parameter.numel()).reshape(parameter.shape)
            parameter.copy_((count % 7 - 3) / 8 + index / 16)
    if shape is not None:
        names = ("dp_replicate", "dp_shard")[-len(shape) :]
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model


def train(model: nn.Module, optimizer: Any, steps: int, start: int = 0) -> None:
    """Dyadic data, and the same on every rank, so that averages over ranks are exact."""
    for step in range(start, start + steps):
        x = ((torch.arange(12).reshape(2, 6) + step) % 5 - 2) / 4
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_bits(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    flat = {**optimizer_state_dict(optimizer, model), **model_state_dict(model)}
    out: dict[str, Any] = {}
    for key, value in flat.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if isinstance(full, Tensor):
            data = full.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
            out[key] = (str(full.dtype), tuple(full.shape), data)
        elif not key.endswith("@layout"):
            out[key] = full
    return out


def save_run(folder: str, name: str, shape: tuple[int, ...] | None) -> dict[str, Any]:
    model = build(shape)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 2)
    save(Path(folder), optimizer, model)
    at_save = whole_bits(model, optimizer)
    train(model, optimizer, 2, start=2)
    return {"saved": at_save, "after": whole_bits(model, optimizer)}


def load_run(folder: str, name: str, shape: tuple[int, ...] | None, weights: Any) -> dict[str, Any]:
    model = build(shape)
    load_model_state_dict(model, weights)
    optimizer = OPTIMIZERS[name](model)
    load(Path(folder), optimizer, model)
    at_load = whole_bits(model, optimizer)
    train(model, optimizer, 2, start=2)
    return {"saved": at_load, "after": whole_bits(model, optimizer)}


def weights_of(saved: dict[str, Any]) -> dict[str, Tensor]:
    """The model's part of `whole_bits`, as tensors again."""
    out = {}
    for key, value in saved.items():
        if not key.startswith(("state.", "param_groups.")):
            data = torch.tensor(value[2], dtype=torch.uint8)
            out[key] = data.view(torch.float32).reshape(value[1])
    return out


# They want plain tensors although their parameters are DTensors; forms.py says what that takes.
PLAIN_UNDER_SHARDS = {"local", "factored-plain"}

SHAPES: dict[str, tuple[int, ...] | None] = {
    "plain": None,
    "fsdp1": (1,),
    "fsdp2": (2,),
    "fsdp4": (4,),
    "hsdp2x2": (2, 2),
}


def ranks_of(shape: tuple[int, ...] | None) -> int:
    return 1 if shape is None else torch.Size(shape).numel()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp2", "fsdp2"),
        ("fsdp2", "plain"),
        ("plain", "fsdp2"),
        pytest.param("fsdp4", "fsdp2", marks=pytest.mark.slow),
        pytest.param("fsdp2", "fsdp4", marks=pytest.mark.slow),
        pytest.param("fsdp1", "fsdp4", marks=pytest.mark.slow),
        pytest.param("hsdp2x2", "fsdp2", marks=pytest.mark.slow),
        pytest.param("fsdp4", "hsdp2x2", marks=pytest.mark.slow),
    ],
)
def test_every_degree_to_every_other(
    pool: RankPool, tmp_path: Path, name: str, before: str, after: str
) -> None:
    if before == "plain" and name in PLAIN_UNDER_SHARDS:
        pytest.skip("what a run without shards saved cannot say that plain tensors are wanted")
    first = SHAPES[before]
    saved = pool.run(save_run, ranks_of(first), str(tmp_path), name, first)
    weights = weights_of(saved[0]["saved"])
    second = SHAPES[after]
    loaded = pool.run(load_run, ranks_of(second), str(tmp_path), name, second, weights)
    for rank in loaded:
        assert rank["saved"] == saved[0]["saved"]
        if before == after or name != "fused":  # its kernel rounds by position in a vector
            assert rank["after"] == saved[0]["after"]


def notes_of_load(folder: str, name: str, shape: tuple[int, ...]) -> list[str]:
    model = build(shape)
    return load(Path(folder), OPTIMIZERS[name](model), model)


@pytest.mark.parametrize("before", ["plain", "fsdp2"])
def test_factors_that_come_as_dtensors_because_nothing_says_otherwise(
    pool: RankPool, tmp_path: Path, before: str
) -> None:
    """Where the optimizer wants plain ones, its next step would fail: the load has said why."""
    first = SHAPES[before]
    pool.run(save_run, ranks_of(first), str(tmp_path), "factored-plain", first)
    for notes in pool.run(notes_of_load, 2, str(tmp_path), "factored-plain", (2,)):
        told = [note for note in notes if "saved without shards" in note]
        assert len(told) == (before == "plain")
        assert all(
            "up.weight.columns" in note and "step" not in note.split(";")[0] for note in told
        )


def fused_job(case: Case, *, empty: bool = False) -> Job:
    """A job of the matrix with a fused AdamW for each model part."""
    job = Job.start(small_table(), case.degrees, chunks=case.chunks, empty=empty)
    job.optimizers = [
        torch.optim.AdamW(part.parameters(), lr=0.125, fused=True) for part in job.parts
    ]
    job.schedulers = [LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in job.optimizers]
    return job


def fused_bits(job: Job) -> dict[str, Any]:
    flat = job.state("model", "optimizer")
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in flat.items()}
    return {key: bits(value) for key, value in whole.items()}


def fused_run(folder: str, case: Case, *, loads: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a job holds that trained and saved, or that loaded; and that after two more steps."""
    job = fused_job(case, empty=loads)
    if loads:
        manager = job.manager(folder, load_only=True, exclude_from_loading=["dataloader"])
        assert manager.load()
    else:
        job.train(2)
        manager = job.manager(folder, interval=1)
        assert manager.save(2)
    manager.close()
    held = fused_bits(job)
    job.train(2)
    return held, fused_bits(job)


SPLITS = ("1", "tp2", "pp2", "fsdp2 x cp2", "fsdp2 x ep2")
TURNED = (*SPLITS[1:], SPLITS[0])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [*zip(SPLITS * 2, SPLITS + TURNED, strict=True)])
def test_fused_state_under_every_kind_of_split(
    pool: RankPool, tmp_path: Path, before: str, after: str
) -> None:
    """Its kernel rounds by position in a vector, so the matrix has no truth to hold it against."""
    one, two = Case.parse(before), Case.parse(after)
    saved = pool.run(fused_run, one.ranks, str(tmp_path), one, loads=False)
    loaded = pool.run(fused_run, two.ranks, str(tmp_path), two, loads=True)
    held, later = ({k: v for rank in saved for k, v in rank[n].items()} for n in (0, 1))
    assert {k: v for rank in loaded for k, v in rank[0].items()} == held
    assert all(rank[0][key] == held[key] for rank in (*saved, *loaded) for key in rank[0])
    if before == after:
        assert {k: v for rank in loaded for k, v in rank[1].items()} == later


def staged_run(folder: str, shape: tuple[int, ...]) -> bool:
    """A snapshot of DTensors is written after the run went on, and read by the run itself."""
    import torch.distributed.checkpoint as dcp

    from torchtitan_ckpt.state.staging import Stager

    model = build(shape)
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, 1)
    stager = Stager()
    stager.snapshot({**optimizer_state_dict(optimizer, model), **model_state_dict(model)})
    train(model, optimizer, 1, start=1)
    flat = {**optimizer_state_dict(optimizer, model), **model_state_dict(model)}
    tensors = {k: v for k, v in flat.items() if isinstance(v, Tensor)}
    want = whole_bits(model, optimizer)
    held = stager.snapshot(tensors)
    for key, value in tensors.items():
        assert type(held[key]) is type(value) or not isinstance(value, DTensor)
        if isinstance(value, DTensor):
            assert held[key].placements == value.placements
            assert held[key].device_mesh is value.device_mesh
            assert held[key].to_local().data_ptr() != value.to_local().data_ptr() or not (
                value.to_local().numel()
            )
    train(model, optimizer, 2, start=2)
    dcp.save(held, checkpoint_id=folder)
    load_model_state_dict(model, {k: held[k] for k in model_state_dict(model)})
    target = {k: torch.zeros_like(v) for k, v in tensors.items()}
    dcp.load(target, checkpoint_id=folder)
    for key, value in target.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        data = full.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        assert want[key] == (str(full.dtype), tuple(full.shape), data), key
    return True


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("hsdp2x2", marks=pytest.mark.slow)])
def test_snapshots_of_shards_are_saved_by_dcp(pool: RankPool, tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    assert all(pool.run(staged_run, ranks_of(shape), str(tmp_path), shape))
