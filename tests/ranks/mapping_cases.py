"""What the ranks of test_mapping_dtensor.py run: rules on DTensors against whole tensors."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from torchtitan_ckpt.mapping import (
    Deinterleave,
    Fuse,
    Mapping,
    RopeToHalf,
    Rule,
    Split,
    Transpose,
    Unstack,
)

RULES = {
    # heads of 6 rows: 2 heads, fewer than 4 shards; and 8 heads
    "rope": (Rule("w", "h", RopeToHalf(6)), {"w": (12, 20)}),
    "rope-many": (Rule("w", "h", RopeToHalf(6)), {"w": (48, 20)}),
    "identity-uneven": (Rule("w", "h"), {"w": (7, 5)}),
    "unstack": (Rule("w", "h.{expert}", Unstack("expert")), {"w": (8, 12, 20)}),
    "unstack-odd": (Rule("w", "h.{expert}", Unstack("expert")), {"w": (6, 7, 9)}),
    "unstack-tiny": (Rule("w", "h.{expert}", Unstack("expert")), {"w": (8, 3, 2)}),
    "w13": (
        Rule("w", ["h.{expert}.a", "h.{expert}.b"], Split(1), Unstack("expert")),
        {"w": (4, 40, 28)},
    ),
    "w13-native": (Rule(["a", "b"], "h", Fuse(1)), {"a": (4, 12, 20), "b": (4, 12, 20)}),
    "qkv": (
        Rule(["q", "k", "v"], "h", Fuse(0, sizes=(16, 8, 8))),
        {"q": (16, 10), "k": (8, 10), "v": (8, 10)},
    ),
    "transpose": (Rule("w", "h", Transpose(1, 2)), {"w": (4, 12, 20)}),
    "interleaved": (Rule("w", ["a", "b"], Deinterleave(0), Split(0)), {"w": (16, 20)}),
}


def value(shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = 1
    for n in shape:
        count *= n
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


def all_placements(ndim: int, rank: int) -> list[tuple[Placement, ...]]:
    one: list[Placement] = [Replicate(), *(Shard(d) for d in range(rank))]
    return list(itertools.product(one, repeat=ndim))


def check(mesh_shape: tuple[int, ...], names: list[str]) -> dict[str, Any]:
    """Every placement of every rule on one mesh; returns counts and what was wrong."""
    axes = tuple(f"d{i}" for i in range(len(mesh_shape)))
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
    wrong: list[str] = []
    cells = 0
    for name in names:
        rule, shapes = RULES[name]
        mapping = Mapping([rule])
        plain = {k: value(s, 1000 * i) for i, (k, s) in enumerate(shapes.items())}
        want = mapping.to_hf(plain)
        for placements in all_placements(mesh.ndim, len(next(iter(shapes.values())))):
            cells += 1
            where = f"{name} {placements}"
            native = {k: distribute_tensor(v.clone(), mesh, placements) for k, v in plain.items()}
            hf = mapping.to_hf(native)
            wrong += _compare(hf, want, f"{where} to_hf")
            # In-place filling, as a loader does, must survive the way back.
            for tensor in hf.values():
                assert isinstance(tensor, DTensor)
                tensor.to_local().add_(0.5)
            back = mapping.from_hf(hf)
            wrong += _compare(back, {k: v + 0.5 for k, v in plain.items()}, f"{where} from_hf")
            for key, tensor in back.items():
                if tuple(tensor.placements) != placements:
                    wrong.append(f"{where} {key}: came back as {tensor.placements}")
                origin = distribute_tensor(plain[key] + 0.5, mesh, placements)
                if not torch.equal(tensor.to_local(), origin.to_local()):
                    wrong.append(f"{where} {key}: another local shard")
    return {"cells": cells, "wrong": wrong[:20]}


def _compare(got: dict[str, Any], want: dict[str, torch.Tensor], where: str) -> list[str]:
    if got.keys() != want.keys():
        return [f"{where}: keys {sorted(got)}"]
    return [
        f"{where} {key}: wrong values"
        for key, tensor in got.items()
        if tuple(tensor.shape) != tuple(want[key].shape)
        or not torch.equal(tensor.full_tensor(), want[key])
    ]


class Holder(torch.nn.Module):
    """A module whose parameters are DTensors on an inner mesh dimension before FSDP cuts them."""

    def __init__(self, tensors: dict[str, torch.Tensor], mesh: Any, placement: Placement) -> None:
        super().__init__()
        for key, tensor in tensors.items():
            held = distribute_tensor(tensor.clone(), mesh, [placement])
            self.register_parameter(key, torch.nn.Parameter(held))


def check_fsdp(inner: str, inner_dim: int, outer_dim: int, names: list[str]) -> dict[str, Any]:
    """FSDP2 over an inner sharding (TP or EP), as torch places it: strided where dims meet."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", inner))
    wrong: list[str] = []
    seen: set[str] = set()
    for name in names:
        rule, shapes = RULES[name]
        mapping = Mapping([rule])
        plain = {k: value(s, 1000 * i) for i, (k, s) in enumerate(shapes.items())}
        module = Holder(plain, mesh[inner], Shard(inner_dim))
        fully_shard(module, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(outer_dim))
        native = dict(module.state_dict())
        seen |= {str(tensor.placements) for tensor in native.values()}
        hf = mapping.to_hf(native)
        wrong += _compare(hf, mapping.to_hf(plain), f"{name} to_hf")
        back = mapping.from_hf(hf)
        wrong += _compare(back, plain, f"{name} from_hf")
        for key, tensor in back.items():
            if tensor.placements != native[key].placements:
                wrong.append(f"{name} {key}: came back as {tensor.placements}")
            if not torch.equal(tensor.to_local(), native[key].to_local()):
                wrong.append(f"{name} {key}: another local shard")
    return {"wrong": wrong, "placements": sorted(seen)}


def check_share() -> dict[str, Any]:
    """Elements a rank holds before and after experts on an EP mesh become one key each."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    plain = value((8, 12, 20), 0)
    native = distribute_tensor(plain, mesh, [Shard(0)])
    mapping = Mapping([RULES["unstack"][0]])
    hf = mapping.to_hf({"w": native})
    return {
        "native": native.to_local().numel(),
        "held": sum(tensor.to_local().numel() for tensor in hf.values()),
        "placements": sorted({str(tensor.placements) for tensor in hf.values()}),
    }


def check_load(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Experts on EP over FSDP and the rest on FSDP: a load by plan reads each rank's bytes once."""
    from torchtitan_ckpt.adapter import MappingAdapter
    from torchtitan_ckpt.hf_load import load_native

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    adapter = MappingAdapter(config)
    native: dict[str, torch.Tensor] = {}
    for key, entry in adapter.native_entries().items():
        tensor = torch.full(entry.shape, float("nan"))
        if ".inner_experts." in key:
            native[key] = distribute_tensor(tensor, mesh, [Shard(1), Shard(0)])
        elif key.endswith("expert_bias_E"):
            native[key] = tensor
        else:
            native[key] = distribute_tensor(tensor, mesh["dp"], [Shard(0)])
    count = [0]

    def progress(read: int) -> None:
        count[0] += read

    load_native(adapter, folder, native, progress=progress)
    held = sum(
        4 * (t.to_local() if isinstance(t, DTensor) else t).numel()
        for k, t in native.items()
        if not k.endswith("expert_bias_E")
    )
    whole = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in native.items()}
    return {"read": count[0], "held": held, "values": {k: v.numpy() for k, v in whole.items()}}
