"""Small DCP folders for tests, and ways to damage them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import metadata as md

GOLDEN = Path(__file__).parents[2] / "fixtures" / "dcp"


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's values as bytes: NaN equals NaN, and -0.0 is not 0.0."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(bits(tensor))


def expected(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text())


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    """A target of the same form, filled with a pattern that no test value has."""
    blank = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if blank.numel():
        blank.view(-1).view(torch.uint8).fill_(0xFF)
    return blank


def some_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    state: dict[str, Any] = {
        f"layers.{i}.w": torch.randn(5 + i % 3, 7, generator=generator) for i in range(12)
    }
    state["half"] = torch.randn(9, 4, generator=generator).bfloat16()
    state["count"] = torch.arange(11)
    state["mask"] = torch.tensor([[True, False, True]])
    state["codes"] = torch.arange(24, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(4, 6)
    state["step"] = torch.tensor(3.0)
    state["empty"] = torch.empty(0, 3)
    state["train_state.step"] = 3
    state["lr"] = 0.1
    state["betas"] = (0.9, 0.95)
    return state


def torch_save(state: dict[str, Any], folder: Path) -> Path:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=str(folder), planner=planner, no_dist=True)
    return folder


def edit(folder: Path, change: Callable[[md.Metadata], None]) -> None:
    """Change the `.metadata` of a folder through torch's own classes."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def stored(metadata: md.Metadata, key: str) -> Any:
    """Where the first shard of a key lies, as an object to be changed."""
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)
