"""Fuzz the readers with atheris, coverage-guided, each format in a process of its own.

    pip install atheris
    python -m tests.fuzz [--runs 100000] [--formats metadata hf_index] [--finds FOLDER]

Exit code 1 when an input did anything but be read or be refused; such inputs are kept in --finds,
and `python -m tests.fuzz --formats NAME --again FILE` repeats one. A long mode, not a test of every
day: its small siblings are the Hypothesis tests of `tests/files`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SECONDS = 10  # for one input
_MEBIBYTES = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--formats", nargs="*", default=None)
    parser.add_argument("--finds", type=Path, default=Path("fuzz-finds"))
    parser.add_argument("--again", type=Path)
    args = parser.parse_args()
    from tests.fuzz.targets import FORMATS, target_of

    names = args.formats or list(FORMATS)
    if args.again is not None:
        with tempfile.TemporaryDirectory() as scratch:
            target_of(names[0], Path(scratch))[0](args.again.read_bytes())
        return 0
    return max(_one(name, args.runs, args.finds) for name in names)


def _one(name: str, runs: int, finds: Path) -> int:
    finds.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=_memory()) as scratch:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.fuzz.engine", name, scratch),
                *(f"-runs={runs}", f"-timeout={_SECONDS}", f"-rss_limit_mb={_MEBIBYTES}"),
                *(f"-artifact_prefix={finds}/{name}-", "-print_final_stats=1", "-seed=1"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
    units = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    seconds = time.monotonic() - start
    print(f"{name}: {units[1] if units else 'no'} inputs in {seconds:.0f} s, ", end="")
    print("nothing found" if not done.returncode else f"FOUND (exit code {done.returncode})")
    if done.returncode:
        print(done.stderr[-4000:])
    return int(bool(done.returncode))


def _memory() -> str | None:
    """Scratch files in memory, where there is such a place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
