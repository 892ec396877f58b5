"""Run lint, types and the test chapters, and hold each to its time budget.

The budgets below are the one place where they are written: wall-clock seconds on 2 cores. A run
prints what each chapter used and fails when one is overrun by half, for machines differ; the
simulated device's is a promise and has no slack.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Chapter:
    """A part of the suite. `workers` are xdist processes: ranks start processes of their own."""

    name: str
    budget: float
    paths: tuple[str, ...]
    workers: int = 2


CHAPTERS = (
    Chapter("unit", 120, ("tests/unit",)),
    Chapter("files", 360, ("tests/files",)),
    Chapter("ranks", 480, ("tests/ranks",), workers=1),
    Chapter("faults", 180, ("tests/faults",), workers=1),
    Chapter("gate", 300, ("tests/gate", "tests/specimens")),
    Chapter("families", 240, ("tests/families",)),
    Chapter("device", 60, ("tests/device",)),
)
SLACK = 1.5
# The simulated Ascend device has an environment and a script of its own.
DEVICE_SCRIPT = ROOT / "scripts" / "test_npu_sim.sh"
DEVICE_BUDGET = 480.0


@dataclass(frozen=True)
class Result:
    name: str
    seconds: float
    budget: float
    code: int
    counts: dict[str, int]
    slack: float = SLACK

    @property
    def overrun(self) -> bool:
        return self.seconds > self.slack * self.budget

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.overrun


def run(name: str, command: list[str], budget: float, slack: float = SLACK) -> Result:
    """Run one command, its output shown as it comes, and read the counts of pytest's last line."""
    print(f"\n=== {name}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        if re.search(r"\d+ (passed|failed|error|skipped)", line):
            last = line
    code = process.wait()
    words = r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed)"
    counts = {word.rstrip("s"): int(n) for n, word in re.findall(words, last)}
    return Result(name, time.monotonic() - start, budget, code, counts, slack)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*(chapter.name for chapter in CHAPTERS), "npu-sim"]
    parser.add_argument(
        "--only", action="append", choices=names, help="run only this chapter (repeatable)"
    )
    parser.add_argument("--slow", action="store_true", help="run the long mode too")
    parser.add_argument("pytest_args", nargs="*", help="handed to pytest")
    options = parser.parse_args()
    wanted = options.only

    results: list[Result] = []
    python = sys.executable
    if not wanted:
        lint = ["-m", "ruff", "check", "."]
        results.append(run("ruff check", [python, *lint], 30))
        results.append(run("ruff format", [python, "-m", "ruff", "format", "--check", "."], 30))
        results.append(run("mypy", [python, "-m", "mypy"], 180))
    for chapter in CHAPTERS:
        paths = [path for path in chapter.paths if (ROOT / path).is_dir()]
        if (wanted and chapter.name not in wanted) or not paths:
            continue
        marks = [] if options.slow else ["-m", "not slow"]
        spread = ["-n", str(chapter.workers), "--dist", "worksteal"] if chapter.workers > 1 else []
        command = [python, "-m", "pytest", *paths, *marks, *spread, "-ra", *options.pytest_args]
        result = run(chapter.name, command, chapter.budget)
        # pytest's 5 is "no tests": a chapter that is empty says so in the table instead.
        if result.code == 5:
            result = Result(result.name, result.seconds, result.budget, 0, {})
        results.append(result)
    if DEVICE_SCRIPT.exists() and (not wanted or "npu-sim" in wanted):
        results.append(run("npu-sim", ["bash", str(DEVICE_SCRIPT)], DEVICE_BUDGET, slack=1.0))

    print("\nchapter          used    budget   passed  failed  skipped")
    for r in results:
        failed = r.counts.get("failed", 0) + r.counts.get("error", 0)
        note = "  OVERRUN" if r.overrun else "" if r.code == 0 else f"  exit {r.code}"
        print(
            f"{r.name:<14} {r.seconds:6.1f}s  {r.budget:6.0f}s  {r.counts.get('passed', 0):7}"
            f" {failed:7} {r.counts.get('skipped', 0):8}{note}"
        )
    passed = sum(r.counts.get("passed", 0) for r in results)
    failed = sum(r.counts.get("failed", 0) + r.counts.get("error", 0) for r in results)
    failed += sum(r.failed and not r.counts.get("failed") for r in results)
    skipped = sum(r.counts.get("skipped", 0) for r in results)
    print(f"total {sum(r.seconds for r in results):.0f} s on {os.cpu_count()} cores")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if any(r.failed for r in results) or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
