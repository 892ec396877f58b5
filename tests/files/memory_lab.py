"""Peak memory of a piece of work, as the kernel counts it: a program to run as a process.

    python -m tests.files.memory_lab FOLDER CONFIG CASES

Each tool does the same work over a small checkpoint, over one with four times the layers, and over
one whose layers are as many and have four times the bytes; the peaks are printed as JSON. What a
peak grows by from the first to the second is kept for each tensor (the manifest, and what was found
of it), from the first to the third it is data. A run over the small one touches what is touched
once. The kernel keeps the peak itself, so nothing is sampled; blocks go back to it when they are
freed (MALLOC_ settings of glibc, see `peaks`), so that the peak is what was in use, not what the
allocator had kept.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = ((3, 1), (12, 1), (3, 2))  # layers, and how many times as wide
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
# glibc's: blocks go back to the system when they are freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
TOOLS = ("dcp to pt", "dcp to hf", "hf to dcp", "verify --deep", "diff")


def peaks(
    folder: Path,
    config: Mapping[str, object] = CONFIG,
    cases: Sequence[tuple[int, int]] = CASES,
) -> dict[str, list[int]]:
    """Bytes above the start at the peak, for each of `cases`, by tool."""
    words = (str(folder), json.dumps(config), json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-m", "tests.files.memory_lab", *words],
        cwd=ROOT,
        env=os.environ | ALLOCATOR,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def peak(work: Callable[[], object], runs: int = 1) -> int:
    """The highest of some runs: how many pieces are in flight at once is a matter of timing."""
    found = []
    for _ in range(runs):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak so far
        start = resident("VmRSS")
        work()
        found.append(resident("VmHWM") - start)
    return max(found)


def main() -> None:
    import torch

    from torchtitan_ckpt.adapter import MappingAdapter
    from torchtitan_ckpt.convert import convert
    from torchtitan_ckpt.convert.options import Options
    from torchtitan_ckpt.diff import Options as DiffOptions
    from torchtitan_ckpt.diff import diff
    from torchtitan_ckpt.formats import dcp, read_manifest
    from torchtitan_ckpt.verify.deep import read_deep

    torch.set_num_threads(1)
    root, shapes = Path(sys.argv[1]), json.loads(sys.argv[2])
    cases = {f"{layers}x{wide}": (layers, wide) for layers, wide in json.loads(sys.argv[3])}
    for case, (layers, wide) in cases.items():
        (root / case).mkdir()
        config = shapes | {"num_hidden_layers": layers}
        config |= {key: shapes[key] * wide for key in WIDTHS}
        (root / case / "config.json").write_text(json.dumps(config), encoding="utf-8")
        entries = MappingAdapter(root / case).native_entries()
        state = {k: torch.full(e.shape, i + 0.5) for i, (k, e) in enumerate(entries.items())}
        for name in ("dcp", "copy"):
            dcp.save(state, root / f"{name}{case}", sync_files=False)
        del state

    def converting(kind: str, to: str, keep: str = "") -> Callable[[str], object]:
        def work(case: str) -> None:
            out = root / (f"{keep}{case}" if keep else "out")
            if out.exists():
                shutil.rmtree(out)
            convert(
                Options(
                    src=str(root / f"{kind}{case}"),
                    dst=str(out),
                    to=to,
                    config=str(root / case),
                    window=8 * 2**20,
                    threads=1,
                    no_sync=True,
                )
            )
            if not keep:
                out.unlink() if out.is_file() else shutil.rmtree(out)

        return work

    def deep(case: str) -> None:
        read_deep(read_manifest(root / f"dcp{case}"), threads=1)

    def compare(case: str) -> None:
        pair = (str(root / f"{name}{case}") for name in ("dcp", "copy"))
        diff(DiffOptions(a=next(pair), b=next(pair), threads=1))

    works = (
        converting("dcp", "pt"),
        converting("dcp", "hf", keep="hf"),
        converting("hf", "dcp"),
        deep,
        compare,
    )
    found = {}
    for name, work in zip(TOOLS, works, strict=True):
        work(next(iter(cases)))
        found[name] = [peak(partial(work, case), runs=3) for case in cases]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
