"""Peak memory of convert, verify --deep and diff against the size of the model.

    python -m tests.benchmarks.flat_memory [--layers 7]

Qwen3-0.6B's layers with a small vocabulary, four times as many of them, and as many of four times
the bytes; a later peak over the first is to be at most 1.1, but for what is kept of each tensor,
which the last one leaves out. The kernel counts, see `tests/files/memory_lab.py`. A script, not a
test.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.benchmarks.convert import CONFIG
from tests.files.memory_lab import peaks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=7)
    args = parser.parse_args()
    config = CONFIG | {"vocab_size": 1000}
    cases = ((args.layers, 1), (4 * args.layers, 1), (args.layers, 2))
    with tempfile.TemporaryDirectory() as folder:
        for tool, (small, deep, wide) in peaks(Path(folder), config, cases).items():
            print(
                f"{tool}: {small / 2**20:.1f} MiB with {args.layers} layers; with four times as "
                f"many {deep / 2**20:.1f} MiB, {deep / small:.2f} times; with as many, each of "
                f"four times the bytes, {wide / 2**20:.1f} MiB, {wide / small:.2f} times"
            )


if __name__ == "__main__":
    main()
