"""A small FSDP2 training job on devices, with the project's own manager around it.

Twelve layers of pairwise different sizes, AdamW in several spellings, a schedule, data that depends
on the step alone, so that a resumed run can be compared with one that was never stopped.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from conformance import swap
from torchtitan_ckpt import device
from torchtitan_ckpt.manager import CheckpointManager
from torchtitan_ckpt.state.tensors import like, local_of


class Net(nn.Module):
    """Rows of every layer divide unevenly over two and four ranks."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        sizes = [width + i for i in range(13)]
        pairs = enumerate(itertools.pairwise(sizes))
        self.layers = nn.ModuleDict({str(i): nn.Linear(a, b, bias=False) for i, (a, b) in pairs})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = nn.functional.silu(layer(x))
        return x


class Loader:
    """Where in the data the job is."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Steps(Loader):
    """The training state: the step."""


def _swapped(parameter: Tensor) -> Tensor:
    """Memory of the host that the device maps (the second generation of swapping)."""
    import torch_npu

    part = local_of(parameter)
    made = torch_npu.empty_with_swapped_memory(part.shape, dtype=part.dtype, device=part.device)
    return like(parameter, made)


class SpeakingMapped(swap.MappedAdamW):
    """The second generation, with the protocol that brings its moments back to mapped memory."""

    def checkpoint_wait(self) -> None:
        device.current().synchronize()

    def checkpoint_state(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state.get(parameter)
        if not state:
            return {}
        held = {key: local_of(value) for key, value in state.items() if value is not None}
        return {"step": swap.step_of(self, parameter), **held}

    def checkpoint_required(self, group: Any) -> tuple[str, ...]:
        return swap.required(group)

    def checkpoint_restore(self, states: Any) -> None:
        steps = swap.steps_of(self, states)
        self.state.clear()
        swap.take_steps(self, steps)
        for parameter, state in states.items():
            mine: dict[str, Any] = dict.fromkeys(swap.MOMENTS)
            for key in state.keys() & set(swap.MOMENTS):
                mine[key] = self.allocate(parameter)
                local_of(mine[key]).copy_(state[key])
            self.state[parameter] = mine


def make_optimizer(kind: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if kind == "swap":
        return swap.speak(swap.SwapAdamW(parameters, lr=0.01))
    if kind == "swap, silent":
        return swap.SwapAdamW(parameters, lr=0.01)
    if kind == "mapped":
        return swap.MappedAdamW(parameters, lr=0.01, allocate=_swapped)
    if kind == "mapped, speaking":
        return SpeakingMapped(parameters, lr=0.01, allocate=_swapped)
    how = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    return torch.optim.AdamW(parameters, lr=0.01, **how[kind])


@dataclass
class Job:
    """One rank of the job; everything is built by `start`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    loader: Loader
    steps: Steps
    manager: CheckpointManager
    where: torch.device
    width: int
    losses: list[float] = field(default_factory=list)

    def train(self, until: int, *, last: bool = False) -> None:
        """Steps up to `until`, saving when it is due; the last one as the job's last if `last`."""
        while self.steps.position < until:
            step = self.steps.position + 1
            generator = torch.Generator().manual_seed(1000 + self.loader.position)
            x = torch.randn(5, self.width, generator=generator).to(self.where)
            loss = self.model(x).pow(2).mean()
            loss.backward()
            self.manager.maybe_wait_for_staging()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses.append(loss.item())
            self.steps.position, self.loader.position = step, step
            self.manager.save(step, last_step=last and step == until)

    def bits(self) -> dict[str, tuple[Any, ...]]:
        """Every parameter, moment and number of this rank, byte for byte."""
        if isinstance(self.optimizer, swap.SwapAdamW):
            self.optimizer.finish()
        out: dict[str, Any] = {"step": self.steps.position, "loader": self.loader.position}
        out["schedule"] = self.scheduler.last_epoch
        out["lr"] = self.optimizer.param_groups[0]["lr"]
        for name, parameter in self.model.named_parameters():
            out[name] = _bits(parameter)
            for key, value in moments(self.optimizer, parameter).items():
                out[f"{name}.{key}"] = _bits(value)
        return out


def moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The true moments of a parameter, wherever the optimizer keeps them."""
    if isinstance(optimizer, swap.SwapAdamW):
        return dict(optimizer.host.get(parameter, {}))
    state = optimizer.state.get(parameter, {})
    return {key: value for key, value in state.items() if key in swap.MOMENTS and value is not None}


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    local = local_of(tensor).detach().cpu().contiguous()
    return (
        tuple(local.shape),
        str(local.dtype),
        local.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def start(folder: str, kind: str, *, seed: int = 0, width: int = 10, **options: Any) -> Job:
    """Build the job on all ranks of the process group; nothing is loaded yet."""
    found = device.current()
    where = found.select(dist.get_rank())
    torch.manual_seed(seed)
    model = Net(width).to(where)
    mesh = init_device_mesh(found.kind.value, (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(kind, list(model.parameters()))
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader, steps = Loader(), Steps()
    config = {"enable": True, "interval": 2, "sync_files": False, **options}
    manager = CheckpointManager(
        CheckpointManager.Config(**config),
        model_parts=[model],
        optimizers=[optimizer],
        lr_schedulers=[scheduler],
        dataloader=loader,
        states={"train_state": steps},
        base_folder=folder,
    )
    return Job(model, optimizer, scheduler, loader, steps, manager, where, width)
