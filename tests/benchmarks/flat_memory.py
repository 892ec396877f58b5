"""Peak memory of convert, verify --deep and diff against the size of the model.

    python -m tests.benchmarks.flat_memory [--layers 7]

Qwen3-0.6B's layers with a small vocabulary, and four times as many; the second peak over the first
is to be at most 1.1. The kernel counts, see `tests/files/memory_lab.py`. A script, not a test.
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
    layers = (args.layers, 4 * args.layers)
    with tempfile.TemporaryDirectory() as folder:
        for tool, (small, large) in peaks(Path(folder), config, layers).items():
            print(
                f"{tool}: {small / 2**20:.1f} MiB with {layers[0]} layers, {large / 2**20:.1f} MiB "
                f"with {layers[1]}: {large / small:.2f} times (at most 1.1)"
            )


if __name__ == "__main__":
    main()
