"""Ranks that do not mean the same by a key are found before a save, on every rank, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from conformance.degrees import CASES
from conformance.jobs import Job, small_table
from conformance.ranks import RankPool
from torchtitan_ckpt.agree import agree
from torchtitan_ckpt.errors import RankError


def state(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    return {
        "layers.0.w": distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)]),
        "layers.0.buffer": torch.tensor([1, 2, 3]),
        "one": torch.ones(7),
        "nan": torch.full((3,), float("nan")),
        "empty": torch.empty(0, 4),
        "train_state.step": torch.tensor(4),
        "optimizer.param_groups.w.betas": (0.9, 0.95),
        "lr_scheduler.last_epoch": 3,
        f"dataloader.dp_rank_{rank}": {"position": rank},
        "dataloader.world_size": dist.get_world_size(),
    }


def change_value(s: dict[str, Any], rank: int) -> None:
    if rank == 2:
        s["layers.0.buffer"][1] = 9


def change_shape(s: dict[str, Any], rank: int) -> None:
    if rank == 1:
        s["one"] = torch.ones(8)


def change_dtype(s: dict[str, Any], rank: int) -> None:
    if rank == 0:
        s["one"] = s["one"].to(torch.bfloat16)


def drop_plain(s: dict[str, Any], rank: int) -> None:
    if rank == 3:
        del s["one"]


def drop_shard(s: dict[str, Any], rank: int) -> None:
    if rank == 1:
        del s["layers.0.w"]


def change_object(s: dict[str, Any], rank: int) -> None:
    s["lr_scheduler.last_epoch"] = rank // 2


def change_placement(s: dict[str, Any], rank: int) -> None:
    w = s["layers.0.w"]
    if rank == 3:
        s["layers.0.w"] = w.from_local(torch.ones(5, 2), w.device_mesh, [Replicate()])


def local_experts(s: dict[str, Any], rank: int) -> None:
    """Expert parallelism by hand: every rank has its own block under one name (GEO-01)."""
    s["layers.0.moe.experts.w1"] = torch.full((2, 3), float(rank))
    s["layers.0.moe.experts.w2"] = torch.full((2, 3), float(rank))


def scales_of_blocks(s: dict[str, Any], rank: int) -> None:
    """As 8-bit optimizers: a number for every four elements of a rank's shard, of 10 in all."""
    s["optimizer.state.layers.0.w.absmax"] = torch.full((2 - rank // 2,), 0.5)


def scales_of_equal_blocks(s: dict[str, Any], rank: int) -> None:
    s["optimizer.state.layers.0.w.absmax"] = torch.full((2,), float(rank))


def object_instead(s: dict[str, Any], rank: int) -> None:
    if rank == 1:
        s["one"] = [1.0] * 7


def negative_zero(s: dict[str, Any], rank: int) -> None:
    if rank == 1:
        s["one"] = s["one"] * 0.0 * -1
    else:
        s["one"] = s["one"] * 0.0


def no_change(s: dict[str, Any], rank: int) -> None:
    """A dict in another order, and another object of equal value, are no disagreement."""
    if rank == 1:
        for key in sorted(s, reverse=True):
            s[key] = s.pop(key)
        s["optimizer.param_groups.w.betas"] = tuple(float(f"0.9{x}") for x in ("", "5"))


def check(edit: Callable[[dict[str, Any], int], None]) -> list[tuple[str, str]]:
    rank = dist.get_rank()
    mine = state(rank)
    edit(mine, rank)
    try:
        agree(mine)
    except RankError as error:
        return [(p.code, str(p)) for p in error.problems]
    return []


@pytest.mark.parametrize(
    ("edit", "code", "texts"),
    [
        (change_value, "ranks.plain-differs", ["layers.0.buffer", "rank 2"]),
        (change_shape, "ranks.shape", ["one", "[7]", "[8]", "rank 1"]),
        (change_dtype, "ranks.dtype", ["one", "bfloat16", "ranks 1..3"]),
        (drop_plain, "ranks.keys", ["one", "rank 3 without", "held by ranks 0..2"]),
        (change_object, "ranks.object-differs", ["lr_scheduler", "ranks 0..1 | ranks 2..3"]),
        (change_placement, "ranks.placement", ["layers.0.w", "R", "rank 3"]),
        (local_experts, "ranks.plain-differs", ["experts.w1", "experts.w2", "DTensor"]),
        (scales_of_blocks, "ranks.shape", ["w.absmax", "8-bit", "CheckpointableState"]),
        (scales_of_equal_blocks, "ranks.plain-differs", ["w.absmax", "8-bit", "CheckpointableSt"]),
        (object_instead, "ranks.kind", ["one", "no tensor", "rank 1"]),
        (negative_zero, "ranks.plain-differs", ["one"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_disagreement_is_named_on_every_rank(
    pool: RankPool, edit: Callable[..., None], code: str, texts: list[str]
) -> None:
    outcomes = pool.run(check, 4, edit)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    ((found, text),) = outcomes[0]
    assert found == code
    assert all(part in text for part in texts), text


def test_a_shard_that_a_rank_left_out(pool: RankPool) -> None:
    outcomes = pool.run(check, 4, drop_shard)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    codes = dict(outcomes[0])
    assert "layers.0.w" in codes["ranks.mesh"]


def test_equal_states_agree(pool: RankPool) -> None:
    assert pool.run(check, 4, no_change) == [[]] * 4


def job_agrees(case: Any) -> None:
    job = Job.start(small_table(), case.degrees, chunks=case.chunks)
    job.train(1)
    agree(job.state())


@pytest.mark.parametrize(
    "case", [c for c in CASES if "pp" in c.name or "ep" in c.name], ids=lambda c: c.name
)
def test_real_jobs_agree_whatever_their_stages(pool: RankPool, case: Any) -> None:
    pool.run(job_agrees, case.ranks, case)


def stages_with_a_gap() -> list[tuple[str, str]]:
    """Two pipeline stages of two ranks; one rank of the first lacks a key of its stage."""
    rank = dist.get_rank()
    mine: dict[str, Any] = {f"layers.{rank // 2}.w": torch.ones(2), "shared": torch.ones(1)}
    if rank in (0, 2, 3):
        mine[f"layers.{rank // 2}.b"] = torch.ones(3)
    try:
        agree(mine)
    except RankError as error:
        return [(p.code, str(p)) for p in error.problems]
    return []


def test_a_rank_that_differs_from_its_stage(pool: RankPool) -> None:
    ((code, text),) = pool.run(stages_with_a_gap, 4)[0]
    assert code == "ranks.keys"
    assert "layers.0.b" in text
    assert "rank 1 without" in text


def emptied(how: str) -> str:
    """A tensor without memory is the writer's to refuse; reading it would end the process."""
    mine: dict[str, Any] = {"w": torch.ones(3000), "quantized": torch.ones(3)}
    if how == "meta":
        mine["w"] = torch.ones(3000, device="meta")
    elif how == "freed":
        mine["w"].untyped_storage().resize_(0)
    elif dist.get_rank() == 1:
        mine["quantized"] = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    try:
        agree(mine)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["meta", "freed"])
def test_tensors_without_memory_are_not_read(pool: RankPool, how: str) -> None:
    assert pool.run(emptied, 2, how) == ["", ""]


def test_a_rank_that_cannot_say_makes_every_rank_fail(pool: RankPool) -> None:
    first, second = pool.run(emptied, 2, "other")
    assert "quantized" in first
    assert "quantized" in second
