"""What the ranks of test_dcp_ranks.py run: DCP saves and loads under many splits."""

from __future__ import annotations

import errno
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.formats import dcp

SHAPES = {
    "embed": ((37, 10), torch.float32),
    "rows": ((13, 6, 5), torch.bfloat16),
    "few": ((3, 11), torch.float16),
    "ids": ((9, 14), torch.int64),
    "mask": ((8, 7), torch.bool),
    "large": ((611, 601), torch.float32),
}


def truth() -> dict[str, torch.Tensor]:
    out = {}
    for n, (key, (shape, dtype)) in enumerate(SHAPES.items()):
        ramp = torch.arange(torch.Size(shape).numel()).reshape(shape) + 17 * n
        out[key] = ramp % 3 == 0 if dtype is torch.bool else (ramp % 2048 / 8).to(dtype)
    return out


def blank(tensor: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(tensor)
    out.view(-1).view(torch.uint8).fill_(0xFF)
    return out


def sharded(split: Any, fill: Any) -> dict[str, Any]:
    mesh_shape, placements = split
    mesh = init_device_mesh("cpu", mesh_shape)
    return {
        key: distribute_tensor(fill(value), mesh, placements(value.dim()))
        for key, value in truth().items()
    }


def check(state: dict[str, Any]) -> None:
    for key, value in truth().items():
        full = state[key].full_tensor() if isinstance(state[key], DTensor) else state[key]
        same = torch.equal(
            full.contiguous().view(-1).view(torch.uint8),
            value.view(-1).view(torch.uint8),
        )
        assert same, key


def save(split: Any, path: str, by: str) -> None:
    state = sharded(split, lambda v: v)
    state |= {"step": torch.tensor(4.0), "n": 4, f"dataloader.{dist.get_rank()}": b"x"}
    if by == "torch":
        torch_dcp.save(state, checkpoint_id=path)
    else:
        dcp.save(state, path, checksums=True)


def load(split: Any, path: str, by: str) -> None:
    state = sharded(split, blank)
    if by == "torch":
        torch_dcp.load(state, checkpoint_id=path)
    else:
        manifest = dcp.read_manifest(path)
        assert dcp.load(path, state | {"n": 0}, manifest=manifest)["n"] == 4
    check(state)


class Block(torch.nn.Module):
    """Two layers whose rows divide by neither 2 nor 4."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10, bias=False)
        self.down = torch.nn.Linear(10, 7, bias=False)


def fsdp_over_tp(rows: int) -> dict[str, Any]:
    block = Block()
    block.up = torch.nn.Linear(6, rows, bias=False)
    with torch.no_grad():
        for n, p in enumerate(block.parameters()):
            p.copy_(torch.arange(p.numel()).reshape(p.shape) + 100.0 * n)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, mesh["tp"], plan)
    fully_shard(block, mesh=mesh["fsdp"])
    return dict(block.state_dict())


def strided(path: str, rows: int) -> str:
    state = fsdp_over_tp(rows)
    try:
        dcp.save(state, path)
    except CheckpointError as error:
        return error.problems[0].code
    if dist.get_rank() == 0:
        whole = {"up.weight": torch.zeros(rows, 6), "down.weight": torch.zeros(7, 10)}
        dcp.load(path, whole)
        for n, value in enumerate(whole.values()):
            wanted = torch.arange(value.numel()).reshape(value.shape) + 100.0 * n
            assert torch.equal(value, wanted), (n, value)
    dist.barrier()
    for value in state.values():
        with torch.no_grad():
            value.to_local().fill_(float("nan"))
    dcp.load(path, state)
    for n, value in enumerate(state.values()):
        full = value.full_tensor()
        assert torch.equal(full, torch.arange(full.numel()).reshape(full.shape) + 100.0 * n)
    return "loaded"


def fail_on(rank: int, path: str, how: str) -> tuple[str, str]:
    state: dict[str, Any] = {"a": torch.ones(3), f"b{dist.get_rank()}": torch.ones(2)}
    if dist.get_rank() == rank and how == "emptied":
        state["b"] = torch.ones(4)
        state["b"].untyped_storage().resize_(0)
    if dist.get_rank() == rank and how == "full":
        import os

        def fsync(fd: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        real, os.fsync = os.fsync, fsync
    try:
        dcp.save(state, path)
    except CheckpointError as error:
        return type(error).__name__, str(error)
    finally:
        if dist.get_rank() == rank and how == "full":
            os.fsync = real
    return "", ""


def interleaved(path: str) -> list[int]:
    """A strided shard whose local rows are two blocks of the whole."""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(8 * 3.0).reshape(8, 3)
    rank = dist.get_rank()
    rows = [0, 1, 4, 5] if rank == 0 else [2, 3, 6, 7]
    placement = [_StridedShard(0, split_factor=2)]
    state = {"w": DTensor.from_local(full[rows].clone(), mesh, placement, run_check=False)}
    dcp.save(state, path)
    whole = {"w": torch.full((8, 3), float("nan"))}
    dcp.load(path, whole)
    assert torch.equal(whole["w"], full), whole["w"]
    state["w"].to_local().fill_(float("nan"))
    dcp.load(path, state)
    assert torch.equal(state["w"].to_local(), full[rows])
    return [len(dcp.read_manifest(path).tensors["w"].shards), len(rows)]
