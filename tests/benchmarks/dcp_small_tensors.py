"""A DCP step of many small tensors: our load and save beside torch's, in one run.

    python tests/benchmarks/dcp_small_tensors.py [--tensors 20000] [--rounds 5] [--metadata 100000]

Prints medians and the ratios that matter, with a warm page cache:

- load: `dcp.load` over ours, at least 5 wanted; the results are compared bit for bit;
- save: `dcp.save` over ours, at least 1 wanted; what checksums add to ours, at most 15 %;
- manifest: ours over `pickle.load` of the same `.metadata` of 100,000 tensors, at most 1.5 wanted.

Rounds alternate between the two sides, so that what else the machine does meets both. Wall and CPU
seconds are given: on a busy machine the second is the steadier. Exits 1 when both miss a ratio.
"""

from __future__ import annotations

import argparse
import logging
import pickle
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.filesystem import _StorageInfo

from torchtitan_ckpt.formats import dcp

Times = dict[str, list[tuple[float, float]]]


def clock(times: Times, name: str, work: Callable[[], object]) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    times.setdefault(name, []).append((time.perf_counter() - wall, time.process_time() - cpu))


def median(times: Times, name: str, which: int) -> float:
    return statistics.median(row[which] for row in times[name])


def state_of(count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"optimizer.state.layers.{i}.weight.exp_avg": torch.randn(33, 125, generator=generator)
        for i in range(count)
    }


def big_metadata(folder: Path, count: int) -> None:
    """A `.metadata` of many tensors over a data file that is all hole."""
    described: dict[str, object] = {}
    stored: dict[object, object] = {}
    for i in range(count):
        key = f"optimizer.state.layers.{i}.moe.experts.w1.exp_avg"
        size = torch.Size((7 + i % 5, 64))
        chunk = md.ChunkStorageMetadata(torch.Size((0, 0)), size)
        described[key] = md.TensorStorageMetadata(
            md.TensorProperties(dtype=torch.float32), size, [chunk]
        )
        index = md.MetadataIndex(key, chunk.offsets, 0)
        stored[index] = _StorageInfo("__0_0.distcp", i * 4000, 4000)
    whole = md.Metadata(described, {key: (key,) for key in described}, stored, version="1.0.0")
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(whole, 4))
    with (folder / "__0_0.distcp").open("wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(count * 4000)


def main() -> int:
    parser = argparse.ArgumentParser(description="DCP with many small tensors, ours and torch's")
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--metadata", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    times: Times = {}
    state = state_of(options.tensors)
    target = {key: torch.empty_like(value) for key, value in state.items()}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        root = Path(scratch)
        saves: dict[str, Callable[[Path], object]] = {
            "save torch": lambda p: torch_dcp.save(state, checkpoint_id=str(p)),
            "save ours": lambda p: dcp.save(state, p),
            "save ours, checksums": lambda p: dcp.save(state, p, checksums=True),
        }
        loads: dict[str, Callable[[Path], object]] = {
            "load torch": lambda p: torch_dcp.load(target, checkpoint_id=str(p)),
            "load ours": lambda p: dcp.load(p, target),
        }
        for _ in range(options.rounds):
            for name, save in saves.items():
                shutil.rmtree(root / name, ignore_errors=True)
                clock(times, name, lambda: save(root / name))  # noqa: B023
            for name, load in loads.items():
                for value in target.values():
                    value.fill_(float("nan"))
                clock(times, name, lambda: load(root / "save torch"))  # noqa: B023
                assert all(torch.equal(target[key], value) for key, value in state.items()), name
        big_metadata(root / "big", options.metadata)
        data = (root / "big" / ".metadata").read_bytes()
        for _ in range(options.rounds):
            clock(times, "unpickle torch", lambda: pickle.loads(data))
            clock(times, "manifest ours", lambda: dcp.read_manifest(root / "big"))
    for name, rows in times.items():
        wall, cpu = median(times, name, 0), median(times, name, 1)
        print(f"{name:<22} wall {wall:7.3f} s   cpu {cpu:7.3f} s   (median of {len(rows)})")
    ok = True
    for label, over, under, bound, least in (
        ("load: torch / ours", "load torch", "load ours", 5.0, True),
        ("save: torch / ours", "save torch", "save ours", 1.0, True),
        ("save: with / without checksums", "save ours, checksums", "save ours", 1.15, False),
        ("manifest / unpickle", "manifest ours", "unpickle torch", 1.5, False),
    ):
        ratios = [median(times, over, i) / median(times, under, i) for i in (0, 1)]
        good = [r >= bound if least else r <= bound for r in ratios]
        ok &= any(good)
        sign = ">=" if least else "<="
        print(f"{label:<32} wall {ratios[0]:5.2f}   cpu {ratios[1]:5.2f}   wanted {sign} {bound}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
