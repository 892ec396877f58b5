"""What the ranks of test_hf_ranks.py run: saves and loads of known tensors under many splits."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.formats import hf

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "embed.weight": ((37, 10), "float32"),
    "layers.0.w": ((12, 20), "bfloat16"),
    "layers.1.w": ((7, 5), "float32"),
    "layers.2.w": ((2, 33), "float16"),
    "experts.w": ((6, 9, 11), "float32"),
    "ids": ((13, 3), "int64"),
    "mask": ((9,), "bool"),
    "scale": ((8, 3), "float8_e8m0fnu"),
    "codes": ((16, 8), "float8_e4m3fn"),
    "none": ((0, 4), "float32"),
    "one": ((), "float32"),
    "byte": ((1, 17), "uint8"),
}
# What DTensor itself refuses to scatter or shard stays plain in these cases.
PLAIN = {"one", "none", "scale", "codes"}


def truth() -> dict[str, torch.Tensor]:
    """Tensors whose values say where they belong, in every dtype, the same on every rank."""
    out = {}
    for number, (key, (shape, name)) in enumerate(SHAPES.items()):
        count = 1
        for size in shape:
            count *= size
        plain = torch.arange(count).reshape(shape) + 100 * number
        dtype = getattr(torch, name)
        if name.startswith("float8"):
            out[key] = (plain % 120).to(torch.uint8).view(dtype)
        else:
            out[key] = (plain % 2 == 0) if name == "bool" else plain.to(dtype)
    return out


def spread(
    tensors: dict[str, torch.Tensor], mesh_shape: tuple[int, ...], placements: list[Any]
) -> dict[str, torch.Tensor]:
    """DTensors made by torch; a shard dim that a tensor lacks becomes a replica."""
    mesh = init_device_mesh("cpu", mesh_shape)
    out = {}
    for key, tensor in tensors.items():
        if key in PLAIN:
            out[key] = tensor.clone()
            continue
        fitting = [
            p if not isinstance(p, Shard) or p.dim < tensor.dim() else Replicate()
            for p in placements
        ]
        out[key] = distribute_tensor(tensor, mesh, fitting)
    return out


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same layout with other bytes in it."""
    out = {}
    for key, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        fresh = (
            torch.full(local.shape, 0x5A, dtype=torch.uint8).to(torch.bool)
            if local.dtype == torch.bool
            else raw_fill(local)
        )
        if isinstance(value, DTensor):
            fresh = DTensor.from_local(
                fresh,
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        out[key] = fresh
    return out


def raw_fill(like: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty_like(like, memory_format=torch.contiguous_format)
    fresh.view(-1).view(torch.uint8).fill_(0x5A) if like.dim() else fresh.reshape(1).view(
        torch.uint8
    ).fill_(0x5A)
    return fresh


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)


def local_of(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def round_trip(
    folder: str,
    mesh_shape: tuple[int, ...],
    placements: list[Any],
    options: dict[str, Any],
) -> list[str]:
    """Save under one split, load back into blank tensors of the same; the keys that differ."""
    state = spread(truth(), mesh_shape, placements)
    hf.save(state, folder, **options)
    again = blank(state)
    hf.load(folder, again, raw=True)
    return [k for k in state if not same_bytes(local_of(state[k]), local_of(again[k]))]


def load_under(folder: str, mesh_shape: tuple[int, ...], placements: list[Any]) -> list[str]:
    state = spread(truth(), mesh_shape, placements)
    again = blank(state)
    hf.load(folder, again, raw=True)
    return [k for k in state if not same_bytes(local_of(state[k]), local_of(again[k]))]


class Block(torch.nn.Module):
    """Rows that do not divide by the ranks, and a buffer."""

    def __init__(self, rows: int, inner: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(10, inner, bias=False)
        self.down = torch.nn.Linear(inner, rows, bias=True)
        self.register_buffer("table", torch.arange(7))


def fsdp_over_tp(folder: str, ownership: str, rows: int, inner: int) -> dict[str, Any]:
    """FSDP2 over tensor parallelism on 2 x 2 ranks: strided shards as torch makes them."""
    torch.manual_seed(3)
    model = Block(rows, inner)
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    state = model.state_dict()
    placements = {k: str(v.placements) for k, v in state.items() if isinstance(v, DTensor)}
    hf.save(state, folder, ownership=ownership)
    again = blank(state)
    hf.load(folder, again, raw=True)
    wrong = [k for k in state if not same_bytes(local_of(state[k]), local_of(again[k]))]
    with safe_open(Path(folder) / "model.safetensors", framework="pt") as file:
        wrong += [f"file:{k}" for k in whole if not same_bytes(file.get_tensor(k), whole[k])]
    return {"wrong": wrong, "placements": placements}


def stages(folder: str, ownership: str) -> list[str]:
    """Each rank holds its own layers and nobody holds all; a shared plain tensor on both."""
    rank = dist.get_rank()
    mine = {f"layers.{i}.w": torch.full((3 + i, 5), float(i)) for i in range(12) if i % 2 == rank}
    mine["shared"] = torch.arange(6)
    hf.save(mine, folder, ownership=ownership, max_shard_size=200)
    again = {key: torch.full_like(value, 77) for key, value in mine.items()}
    expected = {f"layers.{i}.w" for i in range(12)} | {"shared"}
    hf.load(folder, again, expected_keys=expected)
    return [key for key in mine if not torch.equal(mine[key], again[key])]


def who_writes(folder: str, mesh_shape: tuple[int, ...]) -> list[str]:
    """The files that this rank creates, when every writer can have one."""
    from torchtitan_ckpt.formats import hf_file, hf_layout

    hf_layout.SMALLEST_FILE = 100
    made = []
    original = hf_file.FileWriter.__init__

    def spy(self, folder, name, *args, **kwargs):
        made.append(name)
        original(self, folder, name, *args, **kwargs)

    hf_file.FileWriter.__init__ = spy
    try:
        hf.save(spread(truth(), mesh_shape, [Shard(0)]), folder)
    finally:
        hf_file.FileWriter.__init__ = original
        hf_layout.SMALLEST_FILE = 32 * 10**6
    return made


def failure(folder: str, kind: str, ownership: str = "tensor") -> dict[str, Any]:
    """One rank goes wrong in one of several ways; what every rank then raises."""
    rank, size = dist.get_rank(), dist.get_world_size()
    state = spread(truth(), (size,), [Shard(0)])
    if kind == "values":
        state["experts.local"] = torch.full((4,), float(rank))
    if kind == "shape":
        state["one"] = torch.zeros(rank + 1)
    if kind == "dtype":
        state["one"] = torch.zeros((), dtype=torch.float32 if rank else torch.bfloat16)
    if kind == "missing" and rank == 1:
        state.pop("embed.weight")
    if kind == "object" and rank == 1:
        state["config"] = {"a": 1}
    if kind == "alias":
        state["tied"] = state["embed.weight"]
    if kind == "disk" and rank == 1:
        _break_writes(after=1)
    if kind == "verify" and rank == 1:
        _break_reads()
    window = 64 if kind in ("disk", "verify") else 32 << 20
    from torchtitan_ckpt.formats import hf_exchange, hf_file, hf_layout

    hf_layout.SMALLEST_FILE, hf_file._GATHER = 100, 8
    steps = [0]
    original = hf_exchange.Exchange.step

    def counted(self: Any, todo: Any) -> bool:
        steps[0] += 1
        return original(self, todo)

    hf_exchange.Exchange.step = counted
    start = time.monotonic()
    try:
        hf.save(state, folder, ownership=ownership, window=window)
    except CheckpointError as error:
        return {
            "class": type(error).__name__,
            "codes": [p.code for p in error.problems],
            "text": str(error),
            "seconds": time.monotonic() - start,
            "steps": steps[0],
            "left": sorted(os.listdir(folder)) if os.path.isdir(folder) else [],
        }
    finally:
        hf_exchange.Exchange.step = original
        hf_layout.SMALLEST_FILE, hf_file._GATHER = 32 * 10**6, 1 << 20
        _restore()
    return {"class": None, "codes": [], "text": "", "seconds": 0, "left": []}


_saved: dict[tuple[Any, str], Any] = {}


def _break_writes(after: int) -> None:
    import errno

    original = _saved[os, "pwrite"] = os.pwrite
    count = [0]

    def full(*args):
        count[0] += 1
        if count[0] > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    os.pwrite = full


def _break_reads() -> None:
    original = _saved[os, "preadv"] = os.preadv

    def wrong(fd, buffers, offset):
        got = original(fd, buffers, offset)
        buffers[0][0] ^= 1
        return got

    os.preadv = wrong


def _restore() -> None:
    for (place, name), function in _saved.items():
        setattr(place, name, function)
    _saved.clear()


def peak_memory(folder: str, megabytes: int, action: str, window: int) -> dict[str, float]:
    """Anonymous memory above what the shards take, while saving or loading, in MiB."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    rows = 8
    state = {}
    for number in range(rows):
        local = torch.full((megabytes * (1 << 20) // rows // 4 // 256, 256), 7.0)
        shape = (local.shape[0] * size, 256)
        state[f"layers.{number}.w"] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(256, 1)
        )
    if action == "load":
        hf.save(state, folder, window=window)
    dist.barrier()
    with _Watch() as watch:
        if action == "load":
            hf.load(folder, state)
        else:
            hf.save(state, folder, window=window)
    return {"before": watch.before, "peak": watch.peak}


class _Watch:
    """The highest anonymous memory of this process while a block runs, in MiB."""

    def __enter__(self) -> _Watch:
        self.before = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> float:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
        return 0.0


def read_index(folder: str) -> dict[str, str]:
    return json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]


def bytes_needed(folder: str, mesh_shape: tuple[int, ...], placements: list[Any]) -> list[int]:
    """(bytes read from files, bytes of the local tensors) of a load under a split."""
    state = spread(truth(), mesh_shape, placements)
    again = blank(state)
    read: list[int] = []
    hf.load(folder, again, progress=read.append, raw=True)
    return [
        sum(read),
        sum(local_of(v).numel() * local_of(v).element_size() for v in again.values()),
    ]


def dequantized(
    folder: str, mesh_shape: tuple[int, ...], placements: list[Any], whole: str
) -> list[str]:
    """Sharded dequantizing loads against the unsharded values in the file `whole`."""
    mesh = init_device_mesh("cpu", mesh_shape)
    expected = torch.load(whole, weights_only=True)
    wrong = []
    state = {}
    for key, value in expected.items():
        state[key] = distribute_tensor(torch.full_like(value, 7), mesh, placements)
    hf.load(folder, state, dequantize=True)
    for key, value in expected.items():
        want = distribute_tensor(value, mesh, placements).to_local()
        if not same_bytes(state[key].to_local(), want):
            wrong.append(key)
    return wrong
