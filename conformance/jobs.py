"""A small training job under any parallel degrees, whose every state is known without running it.

Weights, gradients and buffers are dyadic numbers told by their key and place, so a job split over
ranks and one that is not agree bit for bit, step by step. `truth` is the unsplit one. Used inside
rank processes; it saves and loads through this project's own state and format modules.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from conformance.kinds import MIXED, Kind, kind_of
from conformance.reference import Leaf, Table, build
from torchtitan_ckpt.device import ENV, current
from torchtitan_ckpt.manager import CheckpointManager
from torchtitan_ckpt.parallel import Meshes, ParallelDegrees, build_meshes
from torchtitan_ckpt.state.model import load_model_state_dict, model_state_dict
from torchtitan_ckpt.state.optimizer import optimizer_state_dict
from torchtitan_ckpt.state.optimizer_load import load_optimizer_state_dict
from torchtitan_ckpt.state.scheduler import load_scheduler_state, scheduler_state_dict

STATES = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
# The one parameter whose elements are alike at every step, and so are its moments: equal shards
# are shards all the same.
ALIKE = "layers.1.attention_norm.weight"


def small_table() -> dict[str, Leaf]:
    """A model for the matrix: 12 layers, 12 experts, sizes pairwise different, few of them even.

    Under 8-way FSDP some ranks get no rows of a norm; 4 shards are more than the 2 KV heads;
    layer 11 has 4 experts, fewer than 8 ranks, so FSDP shards them on dimension 1.
    """
    dim, q, kv, ffn, vocab, narrow = 24, 20, 10, 28, 38, 8
    table = {
        "tok_embeddings.weight": Leaf((vocab, dim)),
        "norm.weight": Leaf((dim,)),
        "lm_head.weight": Leaf((vocab, dim)),
    }
    for layer in range(12):
        at = f"layers.{layer}"
        table |= {
            f"{at}.attention.wo.weight": Leaf((dim, q)),
            f"{at}.attention.q_norm.weight": Leaf((5,)),
        }
        if layer in (10, 11):
            experts = 12 if layer == 10 else 4
            inner = f"{at}.moe.routed_experts.inner_experts"
            table |= {
                f"{at}.moe.router.gate.weight": Leaf((experts, dim)),
                f"{at}.moe.expert_bias_E": Leaf((experts,)),
                f"{inner}.w1_EFD": Leaf((experts, narrow, dim)),
                f"{inner}.w2_EDF": Leaf((experts, dim, narrow)),
                f"{at}.moe.shared_experts.w2.weight": Leaf((dim, 18)),
            }
        elif layer == 1:
            table |= {
                f"{at}.attention.wkv_a.weight": Leaf((1, 17)),  # one rank has all of it
                ALIKE: Leaf((dim,)),
            }
        elif layer == 0:
            table |= {
                f"{at}.attention.qkv_linear.wq.weight": Leaf((q, dim)),
                f"{at}.attention.qkv_linear.wk.weight": Leaf((kv, dim)),
                f"{at}.attention.qkv_linear.wk.bias": Leaf((kv,)),
                f"{at}.attention.sinks": Leaf((7,)),
                f"{at}.feed_forward.w1.weight": Leaf((ffn, dim)),
                f"{at}.feed_forward.w2.weight": Leaf((dim, ffn)),
                f"{at}.tid2eid": Leaf((vocab, 3), "int64"),
                f"{at}.hc_attn_scale": Leaf((3,)),
            }
    return table


def value_of(key: str, leaf: Leaf, salt: int = 0) -> Tensor:
    """The whole first value of a tensor: dyadic numbers that differ from place to place."""
    numbers = _numbers(f"{key}/{salt}", leaf.shape)
    return numbers.to(getattr(torch, leaf.dtype), copy=True)


def poison(_: str, leaf: Leaf) -> Tensor:
    """NaN, the least integer or False: what a load must overwrite."""
    dtype = getattr(torch, leaf.dtype)
    if dtype.is_floating_point:
        return torch.full(leaf.shape, float("nan")).to(dtype)
    bad = 0 if dtype is torch.bool else torch.iinfo(dtype).min
    return torch.full(leaf.shape, bad, dtype=dtype)


@lru_cache(maxsize=4096)
def _numbers(seed: str, shape: tuple[int, ...]) -> Tensor:
    if seed.startswith(ALIKE):
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    steps = torch.randint(-512, 513, shape, generator=generator)
    return steps.to(torch.float32) / 64


@dataclass
class Job:
    """A running job. `step` counts finished steps; `position` is the dataloader's."""

    table: Table
    degrees: ParallelDegrees
    meshes: Meshes | None
    parts: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[torch.optim.lr_scheduler.LRScheduler]
    kind: Kind
    step: int = 0
    position: int = 0
    notes: list[str] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        table: Table,
        degrees: ParallelDegrees,
        *,
        chunks: int = 1,
        empty: bool = False,
        kind: str = "adamw",
    ) -> Job:
        """A fresh job on these ranks; `empty` fills it with NaN, as the target of a load.

        It lies on the device that the environment variable names, else on the CPU.

        `kind` names the optimizers, as `kind_of` knows them; the table is the caller's affair.
        """
        device = current(os.environ.get(ENV) or "cpu")
        where = device.select(int(os.environ.get("LOCAL_RANK", "0")))
        alone = degrees.world_size == 1
        meshes = None if alone else build_meshes(degrees, device.kind.value)

        def fill(key: str, leaf: Leaf) -> Tensor:
            return (poison if empty else value_of)(key, leaf).to(where)

        parts = build(table, degrees, meshes, fill, chunks=chunks)
        chosen = kind_of(kind)
        named = [dict(part.named_parameters()) for part in parts]
        optimizers = [made for own in named for made in chosen.optimizers(own)]
        schedulers: list[torch.optim.lr_scheduler.LRScheduler] = [
            torch.optim.lr_scheduler.LambdaLR(o, _halved) for o in optimizers
        ]
        return cls(table, degrees, meshes, parts, optimizers, schedulers, chosen)

    @property
    def dp_rank(self) -> int:
        """Which share of the data this rank reads: context parallel ranks share theirs."""
        if self.meshes is None:
            return 0
        at = self.meshes.dense.get_local_rank
        shard = at("fsdp") // self.degrees.cp
        return at("dp_replicate") * self.degrees.dp_shard + shard

    @property
    def dp_size(self) -> int:
        return self.degrees.dp_replicate * self.degrees.dp_shard

    def train(self, steps: int = 1) -> None:
        """Forward, backward through FSDP's reductions, optimizer, scheduler, buffers, data."""
        for _ in range(steps):
            self.backward()
            for part in self.parts:
                self._move_buffers(part)
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            self.step += 1
            self.position += 3 + self.dp_rank

    def backward(self) -> None:
        """The gradients of the next step, in the place of those that are there."""
        for part in self.parts:
            part.zero_grad()
            part(self._weigh).backward()

    def _weigh(self, key: str, parameter: Tensor) -> Tensor:
        """<weights, parameter>, whose gradient is the weights; FSDP's average leaves them so."""
        if not self.kind.trained(key, self.step):
            return torch.zeros(())
        weights = _numbers(f"{key}/gradient{self.step}", self.table[key].shape)
        if parameter.dtype.itemsize < 4:
            weights = weights.round()  # sums over eight ranks must fit the dtype's eight digits
        if isinstance(parameter, DTensor):
            placed = distribute_tensor(
                weights, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            local = parameter.to_local(grad_placements=parameter.placements)
            return (local * placed.to_local()).sum()
        return (parameter * weights.to(parameter.device)).sum()

    def _move_buffers(self, part: nn.Module) -> None:
        for name, value in part.named_buffers():
            if value.dtype.itemsize == 1:  # no dtype of one byte but integers can be added to
                value.view(torch.uint8).bitwise_xor_(1)
            else:
                value.add_(self.step + 1 + len(name))

    def state(self, *names: str) -> dict[str, Any]:
        """The live state, flat, under the keys that lie on disk; all five without `names`."""
        names = names or STATES
        flat: dict[str, Any] = {}
        if "model" in names:
            flat |= model_state_dict(self.parts)
        if "optimizer" in names:
            inner = optimizer_state_dict(self.optimizers, self.parts)
            flat |= {f"optimizer.{key}": value for key, value in inner.items()}
        if "lr_scheduler" in names:
            inner = scheduler_state_dict(self.schedulers, self.parts)
            flat |= {f"lr_scheduler.{key}": value for key, value in inner.items()}
        if "dataloader" in names:
            flat[f"dataloader.dp_rank_{self.dp_rank}"] = {"position": self.position}
            flat["dataloader.world_size"] = self.dp_size
        if "train_state" in names:
            flat["train_state.step"] = torch.tensor(self.step, dtype=torch.int64)
        return flat

    def manager(
        self,
        dump_folder: str,
        *,
        sd_adapter: Any = None,
        states: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> CheckpointManager:
        """A checkpoint manager over this job's parts; `options` are its config's fields."""
        return CheckpointManager(
            CheckpointManager.Config(enable=True, sync_files=False, **options),
            **self.for_manager(dump_folder, sd_adapter=sd_adapter, states=states),
        )

    def for_manager(
        self, dump_folder: str, *, sd_adapter: Any = None, states: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What a manager with torchtitan's constructor is given besides its config."""
        return {
            "model_parts": self.parts,
            "optimizers": self.optimizers,
            "lr_schedulers": self.schedulers,
            "dataloader": _Loader(self),
            "states": {"train_state": _Counter(self), **(states or {})},
            "sd_adapter": sd_adapter,
            "base_folder": dump_folder,
        }

    def take(self, flat: Mapping[str, Any]) -> None:
        """Take over what was loaded; states whose keys are absent keep their own values."""
        model = {key: value for key, value in flat.items() if not _is_other(key)}
        if model:
            load_model_state_dict(self.parts, model)
        if inner := _under("optimizer.", flat):
            self.notes += load_optimizer_state_dict(self.optimizers, self.parts, inner)
        if inner := _under("lr_scheduler.", flat):
            load_scheduler_state(self.schedulers, inner, self.parts)
        own = f"dataloader.dp_rank_{self.dp_rank}"
        if own in flat:
            self.position = flat[own]["position"]
        if "train_state.step" in flat:
            self.step = int(flat["train_state.step"])

    def differences(self, expected: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
        """Keys whose local part is not bit for bit that of the unsplit job's value."""
        state = self.state()
        out = []
        for key in keys:
            if key not in state:
                out.append(f"{key}: absent")
            elif not _same(state[key], expected[key]):
                out.append(key)
        return out


class _Loader:
    """The data loader's position, under the name of its data-parallel rank, as torchtitan's.

    As that one, it refuses the positions of another data-parallel degree when they reach it.
    """

    def __init__(self, job: Job) -> None:
        self.job = job

    def state_dict(self) -> dict[str, Any]:
        entry = {"position": self.job.position}
        return {f"dp_rank_{self.job.dp_rank}": entry, "world_size": self.job.dp_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["world_size"] != self.job.dp_size:
            raise ValueError(f"saved by {state['world_size']} ranks, loaded by {self.job.dp_size}")
        self.job.position = state[f"dp_rank_{self.job.dp_rank}"]["position"]


class _Counter:
    """The number of finished steps."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.job.step, dtype=torch.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.job.step = int(state["step"])


def _halved(step: int) -> float:
    return 0.5**step


def _under(prefix: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): v for key, v in flat.items() if key.startswith(prefix)}


def _is_other(key: str) -> bool:
    return key.partition(".")[0] in STATES


def _same(live: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor):
        return bool(type(live) is type(expected) and live == expected)
    if not isinstance(live, Tensor) or live.dtype != expected.dtype or live.shape != expected.shape:
        return False
    if isinstance(live, DTensor):
        placed = distribute_tensor(expected, live.device_mesh, live.placements, src_data_rank=None)
        live, expected = live.to_local(), placed.to_local()
    return _bytes(live) == _bytes(expected)


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@lru_cache(maxsize=2 * len(MIXED) + 2)
def _truth(table: tuple[tuple[str, Leaf], ...], steps: int, kind: str) -> dict[str, Any]:
    job = Job.start(dict(table), ParallelDegrees(), kind=kind)
    job.train(steps)
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in job.state().items()}


def truth(table: Table, steps: int, kind: str = "adamw") -> dict[str, Any]:
    """The full state of a job on one rank after `steps` steps; remembered by the process."""
    return _truth(tuple(table.items()), steps, kind)


def comparable(expected: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """The truth's keys that this rank should hold: its stage's, and not the dataloader's.

    How states lie on ranks (`@layout`) is not the unsplit job's to know.
    """
    own = (key for key in expected if not key.startswith("dataloader."))
    return [key for key in own if key in mine and not key.endswith(".@layout")]


__all__ = ["STATES", "Job", "comparable", "poison", "small_table", "truth", "value_of"]
