"""DCP and Hugging Face files, saved from and loaded into DTensors on devices, at other degrees too.

Every rank knows the whole of each tensor from its name, so what is loaded is compared with that and
not with what was saved: shapes are uneven, sizes pairwise different, some ranks own nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from conformance.ranks import RankPool, RanksFailed
from torchtitan_ckpt import device
from torchtitan_ckpt.errors import SaveError
from torchtitan_ckpt.state.tensors import local_of, same_bits, wrap_local

Layout = Callable[[int], tuple[tuple[int, ...], tuple[Placement, ...]]]

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "rows": ((13, 6), torch.float32),
    "half": ((7, 10), torch.bfloat16),
    "short": ((3, 5), torch.float16),
    "experts": ((12, 4, 9), torch.bfloat16),
    "counts": ((11,), torch.int64),
    "flags": ((17,), torch.bool),
    "scalar": ((), torch.float32),
    "large": ((700, 331), torch.float32),
}


def whole(name: str) -> torch.Tensor:
    """The tensor called `name`: its numbers say where they belong."""
    shape, dtype = SHAPES[name]
    count = torch.Size(shape).numel()
    start = 100 * sorted(SHAPES).index(name)
    values = torch.arange(start, start + count, dtype=torch.int64).reshape(shape)
    return values % 3 == 0 if dtype is torch.bool else values.to(dtype)


def layout_rows(world: int) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    return (world,), (Shard(0),)


def layout_columns(world: int) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """Tensors of one dimension have no columns; `place` replicates them."""
    return (world,), (Shard(1),)


def layout_mixed(world: int) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    return (2, world // 2), (Replicate(), Shard(0))


def layout_grid(world: int) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    return (2, world // 2), (Shard(0), Shard(1))


def place(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """This rank's part of `full`, computed on the host and then moved: no collective is used."""
    where = device.current().select(dist.get_rank())
    local = full
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            if placement.dim >= full.ndim:
                placement = Replicate()
                placements = (*placements[:dim], placement, *placements[dim + 1 :])
                continue
            coordinate = mesh.get_local_rank(dim)
            # Chunks as torch cuts them: the last ranks may own nothing.
            chunks = list(torch.chunk(local, mesh.size(dim), placement.dim))
            part = chunks[coordinate] if coordinate < len(chunks) else None
            empty = local.narrow(placement.dim, 0, 0)
            local = empty if part is None else part
    return wrap_local(local.contiguous().to(where), mesh, placements, full.shape)


def targets(layout: Layout, *, fill: bool) -> dict[str, torch.Tensor]:
    """All tensors laid out; `fill` with their values, else with something else."""
    world = dist.get_world_size()
    shape, placements = layout(world)
    device.current().select(dist.get_rank())
    mesh = init_device_mesh(device.current().kind.value, shape)
    made = {}
    for name in SHAPES:
        full = whole(name)
        source = full if fill else (~full if full.dtype is torch.bool else torch.full_like(full, 7))
        made[name] = place(source, mesh, placements)
    made["plain"] = (torch.arange(6) if fill else torch.zeros(6).long()).to(device.current().at())
    return made


def check(state: dict[str, Any], layout: Layout) -> None:
    wanted = targets(layout, fill=True)
    for name, expected in wanted.items():
        assert local_of(state[name]).device.type == device.current().kind.value, name
        assert same_bits(state[name], expected), name


# ------------------------------------------------------------------ DCP


def _save_dcp(path: str, layout: Layout, with_torch: bool) -> None:
    state: dict[str, Any] = targets(layout, fill=True)
    if with_torch:
        dcp.save(state, checkpoint_id=path)
        return
    from torchtitan_ckpt.formats import dcp as ours

    ours.save({**state, "note": {"step": 3}}, path, sync_files=False)


def _load_dcp(path: str, layout: Layout, with_torch: bool) -> None:
    state: dict[str, Any] = targets(layout, fill=False)
    if with_torch:
        dcp.load(state, checkpoint_id=path)
    else:
        from torchtitan_ckpt.formats import dcp as ours

        state = ours.load(path, state)
    device.current().synchronize()
    check(state, layout)


@pytest.mark.parametrize("layout", [layout_rows, layout_columns, layout_mixed, layout_grid])
@pytest.mark.parametrize(
    ("saver", "loader"), [("ours", "ours"), ("ours", "torch"), ("torch", "ours")]
)
def test_dcp_from_four_ranks_to_two(
    ranks: RankPool, tmp_path: Path, layout: Layout, saver: str, loader: str
):
    path = str(tmp_path / "step-1")
    ranks.run(_save_dcp, 4, path, layout, saver == "torch")
    ranks.run(_load_dcp, 2, path, layout_rows, loader == "torch")
    ranks.run(_load_dcp, 4, path, layout_grid, loader == "torch")


def test_dcp_from_two_ranks_to_four_and_to_one(ranks: RankPool, tmp_path: Path):
    path = str(tmp_path / "step-1")
    ranks.run(_save_dcp, 2, path, layout_rows, False)
    ranks.run(_load_dcp, 4, path, layout_columns, False)
    ranks.run(_load_dcp, 1, path, layout_rows, False)


def test_dcp_in_lazy_mode(lazy_ranks: RankPool, tmp_path: Path):
    path = str(tmp_path / "step-1")
    lazy_ranks.run(_save_dcp, 2, path, layout_rows, False)
    lazy_ranks.run(_load_dcp, 2, path, layout_columns, False)
    lazy_ranks.run(_load_dcp, 1, path, layout_rows, True)


# ------------------------------------------------------------------ Hugging Face


def _save_hf(folder: str, layout: Layout, ownership: str) -> None:
    state = targets(layout, fill=True)
    from torchtitan_ckpt.formats import hf

    # Small files, so that there are several, and owners on several ranks.
    hf.save(state, folder, max_shard_size=400_000, sync_files=False, ownership=ownership)


def _load_hf(folder: str, layout: Layout) -> None:
    from torchtitan_ckpt.formats import hf

    state = targets(layout, fill=False)
    hf.load(folder, state)
    device.current().synchronize()
    check(state, layout)


@pytest.mark.parametrize("ownership", ["tensor", "bytes"])
@pytest.mark.parametrize("layout", [layout_rows, layout_mixed, layout_grid])
def test_hf_from_four_ranks_to_two(ranks: RankPool, tmp_path: Path, layout: Layout, ownership: str):
    ranks.run(_save_hf, 4, str(tmp_path), layout, ownership)
    assert (tmp_path / "model.safetensors.index.json").exists()
    ranks.run(_load_hf, 2, str(tmp_path), layout_rows)
    ranks.run(_load_hf, 4, str(tmp_path), layout_columns)
    # Any other program reads the files.
    from safetensors.torch import load_file

    found = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    for name in SHAPES:
        assert same_bits(found[name], whole(name)), name


def test_hf_in_lazy_mode(lazy_ranks: RankPool, tmp_path: Path):
    lazy_ranks.run(_save_hf, 2, str(tmp_path), layout_rows, "tensor")
    lazy_ranks.run(_load_hf, 2, str(tmp_path), layout_columns)


# ------------------------------------------------------------------ faults


def _save_with_a_fault(path: str, call: str, code: int) -> list[str]:
    """The codes and texts of the problems of a save in which rank 1's device fails."""
    from conformance.ascend_sim import probe
    from torchtitan_ckpt.formats import dcp as ours

    state: dict[str, Any] = targets(layout_rows, fill=True)
    dist.barrier()
    try:
        if dist.get_rank() == 1:
            with probe.fault(call, 2, code):
                ours.save(state, path, sync_files=False)
        else:
            ours.save(state, path, sync_files=False)
    except SaveError as error:
        return [str(error)]
    return []


@pytest.mark.simulator_only
def test_a_device_that_fails_during_a_save_fails_it_on_every_rank(ranks: RankPool, tmp_path: Path):
    path = tmp_path / "step-1"
    try:
        texts = ranks.run(_save_with_a_fault, 2, str(path), "aclrtMemcpy*", 507018)
    except RanksFailed as error:
        pytest.fail(f"not a SaveError: {error}")
    for text in texts:
        assert text, "the save did not fail"
        assert "507018" in text[0]
    assert not (path / ".metadata").exists()
