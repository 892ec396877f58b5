"""Plain Hugging Face loading against torch's reader and a plain `safe_open` copy.

    python tests/benchmarks/hf_load.py [--runs 5] [--small 20000] [--cold]

Ratios of medians of one run, all with the files in the page cache unless `--cold` (which asks the
kernel to drop each file's pages before a run). A script, not a test: times depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from torchtitan_ckpt.formats import hf


def timed(calls: dict[str, Callable[[], None]], runs: int, root: Path | None) -> dict[str, float]:
    """Median seconds of each call; the calls take turns, so that drift hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            if root is not None:
                for path in root.glob("*.safetensors"):
                    descriptor = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(title: str, root: Path, shapes: dict[str, tuple[int, ...]], args) -> None:
    dtype = torch.bfloat16 if "GiB" in title else torch.float32
    target = {key: torch.full(shape, 7, dtype=dtype) for key, shape in shapes.items()}

    def plain() -> None:
        for path in sorted(root.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    target[key].copy_(file.get_tensor(key))

    def torchs() -> None:
        dcp.load(target, storage_reader=HuggingFaceStorageReader(str(root)), no_dist=True)

    calls = {"safe_open copy": plain, "torch": torchs, "ours": lambda: hf.load(root, target)}
    medians = timed(calls, args.runs, root if args.cold else None)
    print(f"{title} ({'cold' if args.cold else 'warm'} cache, median of {args.runs})")
    for name, seconds in medians.items():
        print(f"  {name:<16}{seconds:8.3f} s")
    print(f"  ours / safe_open copy = {medians['ours'] / medians['safe_open copy']:.2f}")
    print(f"  torch / ours          = {medians['torch'] / medians['ours']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--small", type=int, default=20000)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "large"
        root.mkdir()
        shapes = {f"layers.{i}.weight": (1801, 1024 + i % 7) for i in range(310)}
        tensors = {k: torch.randn(s).to(torch.bfloat16) for k, s in shapes.items()}
        save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
        del tensors
        size = (root / "model.safetensors").stat().st_size / 2**30
        compare(f"one file of {size:.2f} GiB, 310 tensors", root, shapes, args)
        root = Path(name) / "small"
        root.mkdir()
        files = 10
        weight_map = {}
        all_shapes = {}
        for number in range(files):
            file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
            keys = [f"layers.{number}.experts.{i}.weight" for i in range(args.small // files)]
            save_file({key: torch.randn(64, 64) for key in keys}, root / file)
            weight_map.update(dict.fromkeys(keys, file))
            all_shapes.update(dict.fromkeys(keys, (64, 64)))
        import json

        index = {"metadata": {"total_size": args.small * 16384}, "weight_map": weight_map}
        (root / "model.safetensors.index.json").write_text(json.dumps(index))
        compare(f"{args.small} tensors of 64x64 in {files} files", root, all_shapes, args)


if __name__ == "__main__":
    main()
