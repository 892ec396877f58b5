"""Dequantizing loads against torch's reader and against plain dequantization in memory.

    python tests/benchmarks/dequant.py [--runs 5] [--cold]

"in memory" is the plain vectorised formula on codes and scales that are already tensors; it reads
nothing. torch's reader is timed where it fills the whole target. Ratios of medians of one run,
with warm page cache unless `--cold`. A script, not a test.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from hf_load import timed
from safetensors.torch import save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from torchtitan_ckpt.formats import hf
from torchtitan_ckpt.formats.quantized_math import E2M1

Tensors = dict[str, torch.Tensor]


def write(root: Path, tensors: Tensors) -> None:
    root.mkdir()
    save_file(tensors, root / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def plain_fp8(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    grown = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (codes.float() * grown[: codes.shape[0], : codes.shape[1]]).to(dtype)


def plain_fp4(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    table = torch.tensor(E2M1, dtype=torch.float32)
    low, high = codes.bitwise_and(15).int(), codes.bitwise_right_shift(4).int()
    values = torch.stack([table[low], table[high]], -1).flatten(-2)
    return torch.ldexp(values, scale.int().unsqueeze(-1) - 127).to(dtype)


def compare(title: str, calls: dict[str, Callable[[], object]], root: Path, args) -> None:
    medians = timed(calls, args.runs, root if args.cold else None)
    print(f"{title} ({'cold' if args.cold else 'warm'} cache, median of {args.runs})")
    for name, seconds in medians.items():
        print(f"  {name:<12}{seconds:8.3f} s")
    print(f"  ours / in memory = {medians['ours'] / medians['in memory']:.2f}")
    if "torch" in medians:
        print(f"  torch / ours     = {medians['torch'] / medians['ours']:.2f}")


def filled(target: Tensors, load: Callable[[], object]) -> float:
    """The share of a target that a load writes at all."""
    for value in target.values():
        value.fill_(torch.nan)
    load()
    return 1 - sum(v.isnan().sum().item() for v in target.values()) / sum(
        v.numel() for v in target.values()
    )


def fp8(root: Path, dtype: torch.dtype, shapes: list[tuple[int, int]], args) -> None:
    tensors: Tensors = {}
    pairs = []
    for number, (rows, columns) in enumerate(shapes):
        codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
        tensors[f"layers.{number}.weight"] = codes
        tensors[f"layers.{number}.weight_scale_inv"] = scale
        pairs.append((codes, scale))
    write(root, tensors)
    target = {k: torch.full(v.shape, 7, dtype=dtype) for k, v in tensors.items() if k[-1] == "t"}
    reader = lambda: QuantizedHuggingFaceStorageReader(str(root), target_dtype=dtype)  # noqa: E731

    def in_memory() -> None:
        for (codes, scale), out in zip(pairs, target.values(), strict=True):
            out.copy_(plain_fp8(codes, scale, dtype))

    calls = {
        "in memory": in_memory,
        "torch": lambda: dcp.load(target, storage_reader=reader(), no_dist=True),
        "ours": lambda: hf.load(root, target, dequantize=True),
    }
    assert filled(target, calls["torch"]) == filled(target, calls["ours"]) == 1
    size = sum(codes.numel() for codes, _ in pairs) / 2**20
    compare(f"fp8 blocks to {dtype}, {len(shapes)} tensors, {size:.0f} MiB", calls, root, args)


def mxfp4(root: Path, dtype: torch.dtype, args) -> None:
    tensors: Tensors = {}
    for number in range(4):
        blocks = torch.randint(0, 256, (8, 1440, 45, 16), dtype=torch.uint8)
        tensors[f"layers.{number}.gate_up_proj_blocks"] = blocks
        scales = torch.randint(115, 130, (8, 1440, 45), dtype=torch.uint8)
        tensors[f"layers.{number}.gate_up_proj_scales"] = scales
    write(root, tensors)
    target = {k: torch.full((8, 1440, 1440), 7, dtype=dtype) for k in tensors if k[-1] == "s"}
    target = {k: v for k, v in target.items() if k.endswith("_blocks")}
    flat = {k.removesuffix("_blocks"): torch.empty(8, 1440, 1440, dtype=dtype) for k in target}

    def in_memory(out: Tensors, transposed: bool) -> None:
        for key in target:
            scale = tensors[key.replace("_blocks", "_scales")]
            values = plain_fp4(tensors[key], scale, dtype).flatten(-2)
            name = key.removesuffix("_blocks") if transposed else key
            out[name].copy_(values.transpose(-1, -2) if transposed else values)

    reader = lambda: QuantizedHuggingFaceStorageReader(str(root), target_dtype=dtype)  # noqa: E731
    calls: dict[str, Callable[[], object]] = {
        "in memory": lambda: in_memory(target, False),
        "torch": lambda: dcp.load(target, storage_reader=reader(), no_dist=True),
        "ours": lambda: hf.load(root, target, dequantize=True),
    }
    # torch 2.13 reads a chunk of [experts, out, in/32] elements of the unpacked tensor and leaves
    # the rest as it was, without a word: a time for that compares with nothing.
    share = filled(target, calls["torch"])
    if share < 1:
        print(f"torch fills {share:.1%} of an mxfp4 tensor; its time is left out")
        del calls["torch"]
    compare(f"mxfp4 to {dtype}, as stored", calls, root, args)
    calls = {
        "in memory": lambda: in_memory(flat, True),
        "ours": lambda: hf.load(root, flat, dequantize=True),
    }
    compare(f"mxfp4 to {dtype}, transposed as gpt-oss's plain layout", calls, root, args)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    large = [(2048 + 64 * (i % 3), 7168) for i in range(12)]
    small = [(576, 512 + 8 * (i % 5)) for i in range(400)]
    with tempfile.TemporaryDirectory() as name:
        fp8(Path(name) / "a", torch.bfloat16, large, args)
        fp8(Path(name) / "b", torch.float32, large, args)
        fp8(Path(name) / "c", torch.bfloat16, small, args)
        mxfp4(Path(name) / "d", torch.bfloat16, args)
        mxfp4(Path(name) / "e", torch.float32, args)


if __name__ == "__main__":
    main()
