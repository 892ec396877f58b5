"""What writes and reads the files of the chapter `files`.

`Own` is this project's writer; `write` and `read_indexed` go through safetensors alone and are the
independent side of every comparison. Nothing here judges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from conformance.fingerprint import State

INDEX = "model.safetensors.index.json"


class Own:
    """`torchtitan_ckpt.formats.hf`."""

    name = "torchtitan_ckpt.formats.hf"

    def save(self, state_dict: dict[str, Any], folder: str, files: Mapping[str, int]) -> None:
        from torchtitan_ckpt.formats import hf

        hf.save(state_dict, folder, file_map=dict(files))

    def load(self, folder: str, targets: dict[str, Any]) -> None:
        from torchtitan_ckpt.formats import hf

        hf.load(folder, targets, raw=True)


def file_name(number: int, count: int) -> str:
    """The usual name of one of several files."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write(state: State, folder: str | Path, files: Mapping[str, int]) -> None:
    """Write files and their index with safetensors alone."""
    from safetensors.torch import save_file

    count = max(files.values(), default=1)
    for number in sorted(set(files.values())):
        part = {k: state[k].contiguous() for k in state if files[k] == number}
        save_file(part, Path(folder, file_name(number, count)), metadata={"format": "pt"})
    size = sum(v.numel() * v.element_size() for v in state.values())
    write_index(folder, {k: files[k] for k in state}, size)


def write_index(folder: str | Path, files: Mapping[str, int], size: int = 0) -> None:
    """Write the index of files that need not be there."""
    count = max(files.values(), default=1)
    content = {
        "metadata": {"total_size": size},
        "weight_map": {key: file_name(number, count) for key, number in files.items()},
    }
    Path(folder, INDEX).write_text(json.dumps(content))


def headers(path: Path) -> dict[str, dict[str, Any]]:
    """Key -> dtype, shape and offsets of one file, after safetensors has accepted it."""
    from safetensors import safe_open

    with safe_open(path, "pt"):
        pass
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        content = json.loads(stream.read(length))
    return {key: value for key, value in content.items() if key != "__metadata__"}


def read_indexed(folder: str | Path) -> State:
    """All tensors of a folder, each from the file that the index names."""
    from safetensors import safe_open

    index = Path(folder, INDEX)
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
    else:
        weight_map = {
            key: path.name for path in Path(folder).glob("*.safetensors") for key in headers(path)
        }
    out: State = {}
    for name in sorted(set(weight_map.values())):
        with safe_open(Path(folder, name), "pt") as handle:
            for key in handle.keys():  # noqa: SIM118
                if weight_map.get(key) == name:
                    out[key] = handle.get_tensor(key)
    return out


def blocks_of(value: torch.Tensor, block: int = 128) -> torch.Tensor:
    """Scales, distinct for each block, of a 2-D weight quantized in square blocks."""
    rows, columns = (-(-size // block) for size in value.shape)
    return (2.0 ** -(torch.arange(rows * columns) % 7 + 2)).reshape(rows, columns).float()


def dequantized(codes: torch.Tensor, scales: torch.Tensor, block: int = 128) -> torch.Tensor:
    """The values that block-scaled codes stand for."""
    grid = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return codes.float() * grid[: codes.shape[0], : codes.shape[1]]


# What the codes of E2M1 are worth; the upper eight are the negatives.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def unpacked(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The values of mxfp4, [..., rows, groups, 16] bytes: two codes a byte, the low one first.

    A group of 32 has one exponent, a byte n that means 2^(n - 127).
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    values = torch.cat((_E2M1, -_E2M1))[codes]
    return torch.ldexp(values, exponents[..., None].int() - 127).flatten(-2)
