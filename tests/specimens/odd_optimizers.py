"""Optimizers and models with every kind of state that training jobs have, and a real disk.

Small, exact and odd on purpose: sizes are pairwise different, values are dyadic where they cross
ranks. The broken ones are named for what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from torchtitan_ckpt.manifest import Manifest, ObjectEntry, TensorEntry
from torchtitan_ckpt.state.optimizer import optimizer_state_dict, optimizer_template
from torchtitan_ckpt.state.optimizer_load import load_optimizer_state_dict


class Net(nn.Module):
    """Sizes pairwise different; a bias, a norm, an unused and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleDict({str(i): nn.Linear(6, 6, bias=i % 2 == 0) for i in range(12)})
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 4, bias=False)
        self.unused = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = x + 0.125 * layer(x)
        out: Tensor = self.down(torch.relu(self.up(x))) * self.scale
        return out


def make_net(dtype: torch.dtype = torch.float32, seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def train(model: nn.Module, optimizers: Iterable[Optimizer], steps: int, start: int = 0) -> None:
    """Steps whose data depends only on their number, so that a resumed run sees the same."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(100 + step)
        tokens = torch.randint(0, 13, (5,), generator=generator)
        model(tokens).float().pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def manifest_of(folder: Path) -> Manifest:
    """What torch's own reader says lies in `folder`."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    tensors, objects = {}, {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[key] = TensorEntry(key, tuple(entry.size), dtype)
        else:
            objects[key] = ObjectEntry(key, "", 0, 0)
    return Manifest(str(folder), "dcp", tensors, objects)


class _Flat(dcp.DefaultSavePlanner):
    """The flat dict as it is: lists stay one leaf."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


def save(folder: Path, optimizers: Any, parts: Any) -> dict[str, Any]:
    flat = optimizer_state_dict(optimizers, parts)
    disk = {f"optimizer.{key}": value for key, value in flat.items()}
    dcp.save(disk, checkpoint_id=folder, planner=_Flat())
    return flat


def read(folder: Path, template: dict[str, Any]) -> dict[str, Any]:
    disk = {f"optimizer.{key}": value for key, value in template.items()}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(disk, checkpoint_id=folder, planner=planner)
    return {key.removeprefix("optimizer."): value for key, value in disk.items()}


def load(folder: Path, optimizers: Any, parts: Any, **options: Any) -> list[str]:
    template = optimizer_template(optimizers, parts, manifest_of(folder))
    return load_optimizer_state_dict(optimizers, parts, read(folder, template), **options)


def bits(value: Any) -> Any:
    """A value as something that compares by bytes, types and structure."""
    if isinstance(value, Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        data = local.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return ("tensor", type(value).__name__, str(value.dtype), tuple(value.shape), data)
    if isinstance(value, dict):
        return (type(value), {key: bits(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return (type(value), [bits(item) for item in value])
    return (type(value), value)


def optimizer_bits(optimizer: Optimizer) -> Any:
    """All of an optimizer, with parameters replaced by their positions."""
    position = {}
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            position.setdefault(id(parameter), len(position))
        plain = {key: bits(value) for key, value in group.items() if key != "params"}
        groups.append({**plain, "params": [position[id(p)] for p in group["params"]]})
    state = {
        position.get(id(key), key): bits(value) for key, value in optimizer.state.items() if value
    }
    return {"state": state, "groups": groups}


def model_bits(model: nn.Module) -> Any:
    return {name: bits(parameter) for name, parameter in model.named_parameters()}


class Kitchen(Optimizer):
    """One of everything that state may be: nested dicts, int keys, lists, tuples, None, numbers."""

    def __init__(self, params: Any, **extra: Any) -> None:
        defaults = {
            "lr": 0.25,
            "name": "kitchen",
            "warmup": None,
            "nesterov": True,
            "betas": (0.5, 0.75),
            "table": {"a": [1, 2]},
            **extra,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["beta_product"] = 1.0
                    state["pre"] = {
                        dim: torch.eye(size, dtype=torch.float64)
                        for dim, size in enumerate(p.shape)
                    }
                    state["history"] = [torch.zeros_like(p), torch.full_like(p, 0.5)]
                    state["pair"] = (p.detach().clone(), 7)
                    state["trace"] = [1, "two", None]
                    state["absent"] = None
                    state["empty"] = {}
                    state["a.b"] = torch.tensor(3, dtype=torch.int64)
                    state["a"] = {"b": torch.tensor([True, False])}
                    state["code"] = torch.arange(p.numel(), dtype=torch.uint8).reshape(p.shape)
                state["step"] += 1
                state["beta_product"] *= 0.5
                state["history"][0].mul_(0.5).add_(p.grad)
                state["trace"].append(state["step"])
                p.add_(state["history"][0], alpha=-group["lr"])


class HalfMoments(Optimizer):
    """fp32 moments of bf16 parameters, or bf16 ones of fp32 parameters, and `step` in the group."""

    def __init__(self, params: Any, moment: torch.dtype) -> None:
        super().__init__(params, {"lr": 0.25, "step": 0})
        self.moment = moment

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.full_like(p, 1.00001, dtype=self.moment)
                state["exp_avg"].mul_(0.5).add_(p.grad.to(self.moment), alpha=0.5)
                p.add_(state["exp_avg"].to(p.dtype), alpha=-group["lr"])


class LocalMoments(Optimizer):
    """Works on `to_local()`: plain moments of the local shard's shape, as 8-bit optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                local, grad = (t.to_local() if hasattr(t, "to_local") else t for t in (p, p.grad))
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(local)
                state["m"].mul_(0.5).add_(grad)
                local.add_(state["m"], alpha=-group["lr"])


class SpeakingLocal(LocalMoments):
    """The same, and it says so: its shards reach the file and come back at any degree."""

    def checkpoint_wait(self) -> None:
        pass

    def checkpoint_state(self, parameter: Tensor) -> dict[str, Any]:
        return dict(self.state.get(parameter, {}))

    def checkpoint_restore(self, states: Any) -> None:
        self.state.clear()
        self.state.update({parameter: dict(state) for parameter, state in states.items()})


class Factored(Optimizer):
    """Row and column moments, as Adafactor's, in sums that are exact in any order.

    torch's own Adafactor cannot step DTensors that are sharded on their rows.
    """

    def __init__(self, params: Any, *, plain: bool = False) -> None:
        super().__init__(params, {"lr": 0.25})
        self.plain = plain

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                grad = p.grad
                if self.plain and hasattr(grad, "full_tensor"):
                    grad = grad.full_tensor()
                size = (grad.abs() * 16).round()  # whole numbers: their sums do not round
                rows = size.sum(dim=-1, keepdim=True)
                columns = size.sum(dim=0)
                if hasattr(columns, "full_tensor"):  # a sum over shards is Partial
                    columns = columns.redistribute(
                        placements=[_replicate()] * grad.device_mesh.ndim
                    )
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                state["rows"] = rows * 0.5 + state.get("rows", 0.0)
                state["columns"] = columns * 0.5 + state.get("columns", 0.0)
                p.add_(p.grad, alpha=-group["lr"])


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()
