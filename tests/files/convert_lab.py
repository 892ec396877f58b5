"""Small checkpoints for the tests of `convert`, and how to read what it wrote with other eyes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.files.dcp_lab import bits
from torchtitan_ckpt.adapter import MappingAdapter
from torchtitan_ckpt.convert import Result, convert
from torchtitan_ckpt.convert.options import Options

FIXTURES = Path(__file__).parents[2] / "fixtures" / "qwen3"


def go(src: Path, dst: Path, **options: Any) -> Result:
    dry_run = options.pop("dry_run", False)
    options.setdefault("no_sync", True)
    return convert(Options(src=str(src), dst=str(dst), **options), dry_run=dry_run)


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """By safetensors itself, every file of the folder; the index, where there is one, agrees."""
    out: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not set(part) & set(out)
        out |= part
        where |= dict.fromkeys(part, path.name)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        assert json.loads(index.read_text())["weight_map"] == where
    else:
        assert set(where.values()) == {"model.safetensors"}
    return out


def dcp_tensors(folder: Path, into: Path) -> dict[str, Any]:
    """By torch's own dcp_to_torch."""
    dcp_to_torch_save(folder, into)
    return torch.load(into, weights_only=False)


def same_dict(a: dict[str, Any], b: dict[str, Any]) -> bool:
    assert set(a) == set(b)
    for key in a:
        assert same(a[key], b[key]), key
    return True


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and list(map(str, a)) == list(map(str, b))
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    return type(a) is type(b) and a == b


def native_of(name: str, **options: Any) -> dict[str, torch.Tensor]:
    """A fixture in native names, through the adapter in memory."""
    return MappingAdapter(FIXTURES / name, **options).from_hf(hf_tensors(FIXTURES / name))


def save_dcp(state: dict[str, Any], folder: Path) -> Path:
    """By torch's own writer, nested dicts flattened by it."""
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def full_step(name: str = "dense-tied") -> dict[str, Any]:
    """A training step as torchtitan 0.3.0 nests it before DCP flattens it."""
    model = {k: v.float() for k, v in native_of(name).items()}
    optimizer: dict[str, Any] = {}
    for number, (key, value) in enumerate(model.items()):
        optimizer[f"state.{key}.step"] = torch.tensor(float(number))
        optimizer[f"state.{key}.exp_avg"] = value * 0.5
        optimizer[f"param_groups.{key}.lr"] = 0.001 * number
        optimizer[f"param_groups.{key}.betas"] = (0.9, 0.95)
    return {
        **model,
        "optimizer": optimizer,
        "lr_scheduler": {"last_epoch": 7},
        "train_state": {"step": torch.tensor(7), "ntokens": 12345},
        "dataloader": {"dp_rank_0": b"opaque", "world_size": 1},
    }


def write_hf(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
