"""`diff` of equal files against `cmp`, and its memory.

    python -m tests.benchmarks.diff [--runs 5] [--layers 28] [--cold]

Ratios of medians of one run; the calls take turns. A script, not a test.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.benchmarks.verify import Anonymous, drop, shapes, timed
from torchtitan_ckpt.diff import Options, diff
from torchtitan_ckpt.formats import dcp


def compared(a: Path, b: Path) -> None:
    for path in a.iterdir():
        subprocess.run(["cmp", path, b / path.name], check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        state = {k: torch.randn(s).mul_(0.02).bfloat16() for k, s in shapes(args.layers).items()}
        (root / "hf").mkdir()
        save_file(state, root / "hf" / "model.safetensors")
        dcp.save(state, root / "dcp", sync_files=False)
        small = {f"layers.{i}.w": torch.randn(31, 33) for i in range(20_000)}
        dcp.save(small, root / "dcp of 20,000 small", sync_files=False)
        del state, small
        for kind in ("hf", "dcp", "dcp of 20,000 small"):
            a, b = root / kind, root / f"{kind} copy"
            shutil.copytree(a, b)
            options = Options(a=str(a), b=str(b), threads=args.threads)
            with Anonymous() as memory:
                found = diff(options)
            assert found.compared == found.count("equal") > 0

            def cold(a: Path = a, b: Path = b) -> None:
                if args.cold:
                    drop(a)
                    drop(b)

            medians = timed(
                {
                    "drop": cold,
                    "cmp": lambda a=a, b=b: compared(a, b),
                    "drop again": cold,
                    "diff": lambda o=options: diff(o),
                },
                args.runs,
                None,
            )
            size = sum(path.stat().st_size for path in a.iterdir()) / 1e9
            print(
                f"{kind}, twice {size:.2f} GB ({'cold' if args.cold else 'warm'} cache, median of "
                f"{args.runs}): diff {medians['diff']:.2f} s, cmp {medians['cmp']:.2f} s: "
                f"{medians['cmp'] / medians['diff']:.2f} of its rate (at least 0.5); "
                f"{memory.above:.0f} MiB"
            )


if __name__ == "__main__":
    main()
