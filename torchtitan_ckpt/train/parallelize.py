"""Split a model over the ranks with torch's own APIs: tensor, expert and FSDP2 parallelism.

Order matters for tied weights: what replaces parameters comes first, then the tie, then FSDP2,
which keeps one shared parameter of one group. No weights are given here.
"""

from __future__ import annotations

from torch import nn
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

from torchtitan_ckpt.parallel import Meshes
from torchtitan_ckpt.train.models.moe import InnerExperts, MoE
from torchtitan_ckpt.train.models.qwen3 import Qwen3Model


def split(model: Qwen3Model, meshes: Meshes) -> None:
    """Split `model`, which lies on the meta device, over the ranks of `meshes`, in place."""
    if meshes.degrees.tp > 1:
        _tensor_parallel(model, meshes.dense["tp"])
    if meshes.sparse is not None:
        for moe in model.moe_layers():
            experts = moe.routed_experts.inner_experts
            _expert_parallel(experts, meshes.sparse["ep"])
            experts.copies = meshes.degrees.tp
    model.tie()
    _fully_shard(model, meshes)


def _tensor_parallel(model: Qwen3Model, mesh: DeviceMesh) -> None:
    """Heads and inner rows of the feed-forward over the ranks; the stream itself is not split."""
    edges: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    present = {name: style for name, style in edges.items() if getattr(model, name) is not None}
    parallelize_module(model, mesh, present)
    plan: dict[str, ParallelStyle] = {
        "attention.qkv_linear.wq": ColwiseParallel(),
        "attention.qkv_linear.wk": ColwiseParallel(),
        "attention.qkv_linear.wv": ColwiseParallel(),
        # A rank sees only its heads, so these norms' gradients must be summed over the ranks:
        # as DTensors whose input is sharded by head (dimension 2) they are.
        "attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attention.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attention.wo": RowwiseParallel(),
    }
    dense: dict[str, ParallelStyle] = {
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
    }
    for block in model.layers.values():
        parallelize_module(block, mesh, plan if hasattr(block, "moe") else {**plan, **dense})


def _expert_parallel(experts: InnerExperts, mesh: DeviceMesh) -> None:
    for name, value in list(experts.named_parameters(recurse=False)):
        split = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(split))
    experts.group = mesh.get_group()
    experts.first = mesh.get_local_rank() * (experts.w1_EFD.shape[0] // mesh.size())


def _fully_shard(model: Qwen3Model, meshes: Meshes) -> None:
    mesh = meshes.dense[meshes.fsdp_axes()]
    for block in model.layers.values():
        moe = getattr(block, "moe", None)
        if meshes.sparse is not None and isinstance(moe, MoE):
            _shard_experts(moe.routed_experts.inner_experts, meshes)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the tokens of all ranks, so gradients are summed.
            # (No other factor works here: torch 2.13 divides twice where one rank shards.)
            module.set_gradient_divide_factor(1.0)
            # Plain sums also run over gloo, which knows no scaled ones.
            module.set_force_sum_reduction_for_comms(True)


def _shard_experts(experts: InnerExperts, meshes: Meshes) -> None:
    """FSDP2 for experts, over the ranks that hold the same ones.

    Like torchtitan: split further by expert while there are enough of them, else by rows.
    """
    assert meshes.sparse is not None
    degrees = meshes.degrees
    dim = 0 if degrees.efsdp * degrees.ep <= experts.w1_EFD.shape[0] else 1

    def placement(_: nn.Parameter) -> Shard:
        return Shard(dim)

    axes = meshes.fsdp_axes(experts=True)
    fully_shard(experts, mesh=meshes.sparse[axes], shard_placement_fn=placement)
