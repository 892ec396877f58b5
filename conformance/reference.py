"""Real modules from a table of native names: parameters, gradients and sharding without a model.

`build` makes `nn.Linear`, `nn.Embedding`, norms, stacked experts and buffers under exactly the
names of a table, and splits them as torchtitan does, with torch's own `parallelize_module` and
`fully_shard`. The forward pass is a weighted sum of all parameters: enough for FSDP's hooks to
gather and reduce, and exact whatever the split. What the numbers mean is no concern here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from torchtitan_ckpt.parallel import Meshes, ParallelDegrees
from torchtitan_ckpt.placement import Split, fsdp_dim, split_of, stage_of_keys, uses_fsdp

Weigh = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Shape and dtype of one native tensor, and the parameter that it is, where it is another's."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    tied: str = ""


Table = Mapping[str, Leaf]


class Block(nn.Module):
    """A module of the generated tree. `path` is its name in the whole model, over all parts."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, weigh: Weigh) -> Tensor:
        """The sum of `weigh(key, parameter)` over this module, FSDP units by their own forward."""
        total = torch.zeros(())
        for module in self._own():
            for name, value in module.named_parameters(recurse=False):
                total = total + weigh(f"{_path(module)}.{name}".removeprefix("."), value)
        for unit in self._units():
            total = total + unit(weigh)
        return total

    def _own(self) -> Iterator[nn.Module]:
        stack: list[nn.Module] = [self]
        while stack:
            module = stack.pop()
            yield module
            stack += [child for child in module.children() if not isinstance(child, FSDPModule)]

    def _units(self) -> Iterator[nn.Module]:
        for module in self._own():
            yield from (child for child in module.children() if isinstance(child, FSDPModule))


class Norm(nn.Module):
    """A scale, and perhaps a shift, over one dimension."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))


def build(
    table: Table,
    degrees: ParallelDegrees,
    meshes: Meshes | None,
    fill: Callable[[str, Leaf], Tensor],
    *,
    chunks: int = 1,
) -> list[nn.Module]:
    """This rank's model parts: one, or with pipeline stages `chunks` of them.

    `fill` gives the whole value of each tensor. Without meshes there is one unsplit part a stage.
    """
    stages = stage_of_keys(table, degrees.pp * chunks)
    mine = 0 if meshes is None else meshes.dense.get_local_rank("pp")
    parts: list[nn.Module] = []
    for stage in range(mine, degrees.pp * chunks, degrees.pp):
        own = {key: leaf for key, leaf in table.items() if stages[key] == stage}
        part = _tree(own, fill)
        _tie(part, own)
        if meshes is not None:
            split(part, meshes, table)
        parts.append(part)
    return parts


def split(part: nn.Module, meshes: Meshes, table: Table) -> None:
    """Tensor and expert parallelism, then FSDP2, in place."""
    if meshes.degrees.tp > 1:
        plan: dict[str, ParallelStyle] = {}
        for name, module in part.named_modules():
            style = _tensor_style(module, expert_mesh=meshes.sparse is not None)
            if style is not None:
                plan[name] = style
        for name, style in plan.items():
            parallelize_module(
                part.get_submodule(name), meshes.dense["tp"], style, src_data_rank=None
            )
        _tie(part, table)  # each module's parameters were distributed for themselves
    if meshes.sparse is not None:
        axes = ("ep", "etp") if meshes.degrees.etp > 1 else ("ep",)
        for module in part.modules():
            if _holds_experts(module):
                parallelize_module(module, meshes.sparse[axes], ByName(), src_data_rank=None)
    if uses_fsdp(meshes.degrees):
        _fully_shard(part, meshes, table)


def _tie(part: nn.Module, table: Table) -> None:
    """Tie what the table says of this part's parameters; a stage holds a share of the table."""
    own = dict(part.named_parameters(remove_duplicate=False))
    for key, leaf in table.items():
        if leaf.tied and key in own:
            path, _, name = key.rpartition(".")
            part.get_submodule(path).register_parameter(name, part.get_parameter(leaf.tied))


class ByName(ParallelStyle):
    """Distribute a module's own parameters as the table of splits says of their names."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, value in list(module.named_parameters(recurse=False)):
            role = split_of(f"{_path(module)}.{name}")
            placements: list[Placement] = [
                _experts_on(role, axis) if role.is_expert else _dense_on(role)
                for axis in device_mesh.mesh_dim_names or ()
            ]
            placed = distribute_tensor(value, device_mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(placed, requires_grad=value.requires_grad))
        return module


def _experts_on(role: Split, axis: str) -> Placement:
    if axis == "ep":
        return Shard(0)
    if role is Split.EXPERTS_COLUMN:
        return Shard(1)
    return Shard(2) if role is Split.EXPERTS_ROW else Replicate()


def _dense_on(role: Split) -> Placement:
    if role is Split.COLUMN:
        return Shard(0)
    return Shard(1) if role is Split.ROW else Replicate()


def _tensor_style(module: nn.Module, *, expert_mesh: bool) -> ParallelStyle | None:
    own = [f"{_path(module)}.{name}" for name, _ in module.named_parameters(recurse=False)]
    if not own or (expert_mesh and _holds_experts(module)):
        return None
    roles = {split_of(key) for key in own if not key.endswith(".bias")}
    if isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    if isinstance(module, nn.Linear) and roles == {Split.COLUMN}:
        return ColwiseParallel()
    if isinstance(module, nn.Linear) and roles == {Split.ROW}:
        return RowwiseParallel()
    return SequenceParallel() if isinstance(module, Norm) else ByName()


def _fully_shard(part: nn.Module, meshes: Meshes, table: Table) -> None:
    dense = meshes.dense[meshes.fsdp_axes()]
    for module in list(part.modules()):
        if _holds_experts(module):
            _shard_experts(module, meshes, table)
    layers = getattr(part, "layers", None)
    for layer in layers.children() if layers is not None else ():
        fully_shard(layer, mesh=dense)
    fully_shard(part, mesh=dense)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            # gloo has neither the average nor the scaled sum that FSDP asks of NCCL and HCCL.
            module.set_force_sum_reduction_for_comms(True)


def _shard_experts(module: nn.Module, meshes: Meshes, table: Table) -> None:
    mesh = meshes.dense[meshes.fsdp_axes()]
    if meshes.sparse is not None:
        mesh = meshes.sparse[meshes.fsdp_axes(experts=True)]
    key = f"{_path(module)}.{next(iter(dict(module.named_parameters(recurse=False))))}"
    dim = fsdp_dim(split_of(key), table[key].shape, meshes.degrees)

    def placement(_: nn.Parameter) -> Shard:
        return Shard(dim)

    fully_shard(module, mesh=mesh, shard_placement_fn=placement)


def _holds_experts(module: nn.Module) -> bool:
    return any(
        split_of(f"{_path(module)}.{name}").is_expert
        for name, _ in module.named_parameters(recurse=False)
    )


def _path(module: nn.Module) -> str:
    path = getattr(module, "path", "")
    return path if isinstance(path, str) else ""


def _tree(table: Table, fill: Callable[[str, Leaf], Tensor]) -> Block:
    root = Block("")
    grouped: dict[str, dict[str, Leaf]] = {}
    for key, leaf in table.items():
        path, _, name = key.rpartition(".")
        grouped.setdefault(path, {})[name] = leaf
    for path, leaves in grouped.items():
        values = {
            name: fill(f"{path}.{name}".removeprefix("."), leaf) for name, leaf in leaves.items()
        }
        _put(root, path, values)
    return root


def _put(root: Block, path: str, values: Mapping[str, Tensor]) -> None:
    parent: nn.Module = root
    steps = path.split(".") if path else []
    for depth, step in enumerate(steps[:-1]):
        if not hasattr(parent, step):
            parent.add_module(step, Block(".".join(steps[: depth + 1])))
        parent = parent.get_submodule(step)
    made = _module(path, values)
    if made is not None and steps and not hasattr(parent, steps[-1]):
        parent.add_module(steps[-1], made)
        return
    if steps:
        if not hasattr(parent, steps[-1]):
            parent.add_module(steps[-1], Block(path))
        parent = parent.get_submodule(steps[-1])
    for name, value in values.items():
        key = f"{path}.{name}".removeprefix(".")
        if split_of(key) is Split.BUFFER or not value.is_floating_point():
            parent.register_buffer(name, value)
        else:
            parent.register_parameter(name, nn.Parameter(value))


def _module(path: str, values: Mapping[str, Tensor]) -> nn.Module | None:
    """A torch module where the names are those of one, else None."""
    weight = values.get("weight")
    if weight is None or not set(values) <= {"weight", "bias"}:
        return None
    module: nn.Module
    if weight.ndim == 1:
        module = Norm(values)
    elif weight.ndim == 2 and path == "tok_embeddings":
        module = nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)
    elif weight.ndim == 2:
        rows, columns = weight.shape
        module = nn.Linear(columns, rows, bias="bias" in values, device="meta")
        for name, value in values.items():
            module.register_parameter(name, nn.Parameter(value))
    else:
        return None
    module.path = path  # type: ignore[assignment]
    return module
