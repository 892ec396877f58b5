"""`verify` against what it is measured by: unpickling the same metadata, and plain hashing.

    python tests/benchmarks/verify.py [--runs 5] [--tensors 100000] [--layers 28] [--cold]

Ratios of medians of one run; the calls take turns. Files are in the page cache unless `--cold`,
which asks the kernel to drop each file's pages before every call. A script, not a test: times
depend on the machine and on what else runs on it.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorProperties

from torchtitan_ckpt.formats import dcp, read_manifest
from torchtitan_ckpt.formats.hf_header import build_header
from torchtitan_ckpt.verify import check_structure
from torchtitan_ckpt.verify.deep import read_deep


def timed(calls: dict[str, Callable[[], object]], runs: int, cold: Path | None) -> dict[str, float]:
    """Median seconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            if cold is not None:
                drop(cold)
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def drop(folder: Path) -> None:
    """Ask the kernel to forget the pages of every file."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Anonymous:
    """Peak anonymous memory above that at the start, in MiB, by a thread that looks every 5 ms."""

    def __enter__(self) -> Anonymous:
        self.start = self.peak = rss()
        self.stop = False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.stop:
            self.peak = max(self.peak, rss())
            time.sleep(0.005)

    def __exit__(self, *_: object) -> None:
        self.stop = True
        self.thread.join()

    @property
    def above(self) -> float:
        return (self.peak - self.start) / 1024


def rss() -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon"))


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Qwen3-0.6B's shapes with this many layers."""
    out: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (151936, 1024)}
    for i in range(layers):
        head = f"layers.{i}."
        out |= {
            head + "attention.wq.weight": (2048, 1024),
            head + "attention.wk.weight": (1024, 1024),
            head + "attention.wv.weight": (1024, 1024),
            head + "attention.wo.weight": (1024, 2048),
            head + "feed_forward.w1.weight": (3072, 1024),
            head + "feed_forward.w2.weight": (1024, 3072),
            head + "feed_forward.w3.weight": (3072, 1024),
            head + "attention_norm.weight": (1024,),
            head + "ffn_norm.weight": (1024,),
        }
    return out | {"norm.weight": (1024,)}


def many_dcp(folder: Path, count: int) -> None:
    """A step of `count` tensors in 8 files of zeros, as far as `.metadata` can tell."""
    folder.mkdir()
    state: dict[str, object] = {}
    storage = {}
    length = 2048
    for i in range(count):
        key, rank = f"layers.{i // 100}.block.{i % 100}.weight", i % 8
        size = torch.Size((8, 8))
        chunk = md.ChunkStorageMetadata(offsets=torch.Size((0, 0)), sizes=size)
        state[key] = md.TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk])
        index = md.MetadataIndex(key, torch.Size((0, 0)), 0)
        storage[index] = _StorageInfo(f"__{rank}_0.distcp", i // 8 * length, length)
    for rank in range(8):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate((count // 8 + 1) * length)
    metadata = md.Metadata(state, storage_data=storage)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def many_hf(folder: Path, count: int) -> None:
    """Eight files with an index and `count` tensors of zeros."""
    folder.mkdir()
    index = {}
    for number in range(8):
        name = f"model-{number + 1:05}-of-00008.safetensors"
        keys = [f"model.layers.{i // 100}.block.{i % 100}.w" for i in range(number, count, 8)]
        header, items = build_header([(key, "float32", (8, 8)) for key in keys], {})
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(max(item.start + item.length for item in items.values()))
        index |= dict.fromkeys(keys, name)
    text = json.dumps({"metadata": {"total_size": count * 256}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def hashed(folder: Path) -> None:
    """Every file through xxh3 in a buffer that is used again."""
    buffer = memoryview(bytearray(2**20))
    for path in folder.iterdir():
        state = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                state.update(buffer[:count])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    cache = "cold" if args.cold else "warm"
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        many_dcp(root / "many-dcp", args.tensors)
        many_hf(root / "many-hf", args.tensors)
        raw = root / "many-dcp" / ".metadata"
        medians = timed(
            {
                "unpickle": lambda: pickle.loads(raw.read_bytes()),
                "dcp": lambda: check_structure(root / "many-dcp"),
                "hf": lambda: check_structure(root / "many-hf"),
            },
            args.runs,
            None,
        )
        print(f"structure of {args.tensors} tensors (warm cache, median of {args.runs})")
        print(f"  unpickling .metadata {medians['unpickle']:.2f} s, verify {medians['dcp']:.2f} s: "
              f"{medians['dcp'] / medians['unpickle']:.2f} times (at most 1.5)")  # fmt: skip
        start = time.process_time()
        check_structure(root / "many-hf")
        own = time.process_time() - start
        print(f"  Hugging Face {medians['hf']:.2f} s, {own:.2f} s of them on a core (under 1)")

        state = {key: torch.randn(shape) * 0.02 for key, shape in shapes(args.layers).items()}
        folders = {}
        for kind in ("dcp, xxh3 sidecar", "dcp, CRC-32", "safetensors bf16"):
            folder = folders[kind] = root / str(len(folders))
            if kind.startswith("dcp"):
                dcp.save(state, folder, checksums="sidecar" in kind, sync_files=False)
            else:
                folder.mkdir()
                half = {key: value.bfloat16() for key, value in state.items()}
                save_file(half, folder / "model.safetensors")
                del half
        del state
        for kind, folder in folders.items():
            size = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
            manifest = read_manifest(folder)
            with Anonymous() as memory:
                read_deep(manifest, threads=args.threads)
            medians = timed(
                {
                    "xxh3": lambda f=folder: hashed(f),
                    "deep": lambda m=manifest: read_deep(m, threads=args.threads),
                },
                args.runs,
                folder if args.cold else None,
            )
            print(
                f"--deep, {kind}, {size:.2f} GB ({cache} cache): {size / medians['deep']:.2f} GB/s,"
                f" xxh3 {size / medians['xxh3']:.2f} GB/s: "
                f"{medians['xxh3'] / medians['deep']:.2f} of its rate (at least 0.7); "
                f"{memory.above:.0f} MiB"
            )


if __name__ == "__main__":
    main()
