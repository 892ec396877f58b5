"""Save under one split of a job, load under another, for pairs of splits: what holds, and how fast.

Each source is trained two steps and saved once: as DCP with every state, and as Hugging Face
safetensors. Each target starts filled with NaN, loads, is compared with the job that never was
split, trains one step more, and is compared again; then the safetensors. Every comparison is bit
for bit. `python -m conformance.matrix` prints the table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from conformance.degrees import CASES, Case
from conformance.jobs import Job, comparable, small_table, truth
from conformance.kinds import KINDS, MIXED, kind_of
from conformance.ranks import RankPool, RanksFailed
from conformance.reference import Leaf
from torchtitan_ckpt.agree import agree
from torchtitan_ckpt.formats import dcp, hf
from torchtitan_ckpt.manifest import Manifest
from torchtitan_ckpt.state.leaves import UNREAD
from torchtitan_ckpt.state.optimizer import optimizer_template

Table = dict[str, Leaf]
STEPS = 2


@dataclass(slots=True)
class Row:
    """One pair: seconds it took, and what differed (nothing, as it should be)."""

    source: str
    target: str
    ranks: int = 0
    load_seconds: float = 0.0
    hf_seconds: float = 0.0
    total_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def save_on_ranks(
    case: Case, table: Table, folder: str, ownership: Literal["tensor", "bytes"], kind: str
) -> list[str]:
    """On every rank: train, compare with the truth, save both formats."""
    job = Job.start(table, case.degrees, chunks=case.chunks, kind=kind)
    job.train(STEPS)
    flat = job.state()
    expected = truth(table, STEPS, kind)
    wrong = job.differences(expected, comparable(expected, flat))
    agree(flat)
    dcp.save(flat, f"{folder}/dcp", sync_files=False)
    hf.save(
        untied(job, table),
        f"{folder}/hf",
        max_shard_size="4KB",
        ownership=ownership,
        sync_files=False,
    )
    return wrong


def untied(job: Job, table: Table) -> dict[str, Any]:
    """The live model as safetensors hold it: a tied pair once."""
    return {key: value for key, value in job.state("model").items() if not table[key].tied}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one rank found: keys that differ, keys that it does not hold, and seconds."""

    wrong: list[str]
    lacking: set[str]
    seconds: float
    hf_seconds: float


def load_on_ranks(case: Case, table: Table, folder: str, kind: str) -> Loaded:
    """On every rank: load both formats and compare with the job that never was split."""
    start = time.monotonic()
    job = Job.start(table, case.degrees, chunks=case.chunks, empty=True, kind=kind)
    if kind_of(kind).trained is not kind_of("adamw").trained:
        job.backward()  # a load into a job that has gradients, of parameters that will have none
    manifest = dcp.read_manifest(f"{folder}/dcp")
    job.take(dcp.load(f"{folder}/dcp", targets(job, manifest), manifest=manifest, threads=1))
    loaded = time.monotonic() - start
    expected = truth(table, STEPS, kind)
    mine = job.state()
    wrong = job.differences(expected, comparable(expected, mine))
    lacking = set(comparable(expected, expected)) - mine.keys()
    # A rank with two stages has the groups without parameters of both.
    more = [key for key in comparable(mine, mine) if key not in expected and "@empty." not in key]
    wrong += [f"invented: {key}" for key in sorted(more)]
    later = truth(table, STEPS + 1, kind)
    position = job.position
    job.train()
    mine = job.state()
    wrong += [f"after a step: {key}" for key in job.differences(later, comparable(later, mine))]
    if job.position != position + 3 + job.dp_rank:
        wrong.append("the data loader's position")
    start = time.monotonic()
    fresh = Job.start(table, case.degrees, chunks=case.chunks, empty=True)
    model = untied(fresh, table)
    hf.load(f"{folder}/hf", model, expected_keys={k for k, v in table.items() if not v.tied})
    fresh.take(model)
    wrong += [f"hf: {key}" for key in fresh.differences(expected, model)]
    return Loaded(wrong, lacking, loaded, time.monotonic() - start)


def targets(job: Job, manifest: Manifest) -> dict[str, Any]:
    """What `job` wants of a checkpoint: live model tensors, room for the rest.

    The data loader's entry only where the data-parallel degree is the one that saved; otherwise
    positions of other ranks would be taken for this one's.
    """
    flat: dict[str, Any] = job.state("model")
    inner = optimizer_template(job.optimizers, job.parts, manifest)
    flat |= {f"optimizer.{key}": value for key, value in inner.items()}
    flat |= job.state("train_state")
    flat["lr_scheduler.last_epoch"] = UNREAD
    loaders = sum(key.startswith("dataloader.dp_rank_") for key in manifest.keys)
    if loaders == job.dp_size:
        flat[f"dataloader.dp_rank_{job.dp_rank}"] = UNREAD
    return flat


class Matrix:
    """Pairs of splits over one model, on one pool. Sources are saved once and kept in `folder`.

    `kind` is one of `KINDS`, or "mixed": all of them, each source arranged in another way.
    """

    def __init__(
        self, pool: RankPool, folder: Path, table: Table | None = None, kind: str = "adamw"
    ) -> None:
        self.pool = pool
        self.folder = folder
        self.kind = kind
        self.table = small_table() if table is None else table
        self.rows: list[Row] = []
        self._saved: dict[str, Path] = {}
        self._tries = 0

    def kind_at(self, source: Case) -> str:
        """The kind of the job that `source` saves."""
        return list(MIXED)[CASES.index(source) % len(MIXED)] if self.kind == "mixed" else self.kind

    def saved(self, case: Case) -> Path:
        """The folder of the checkpoint that `case` saved; RanksFailed or AssertionError if not."""
        if case.name not in self._saved:
            number = self._tries = self._tries + 1
            path = self.folder / f"source{number}"
            path.mkdir(parents=True)
            ownership = "bytes" if number % 2 else "tensor"
            kind = self.kind_at(case)
            wrong = self.pool.run(
                save_on_ranks,
                case.ranks,
                case,
                kind_of(kind).table(self.table),
                str(path),
                ownership,
                kind,
                timeout=180,
            )
            different = sorted({key for rank in wrong for key in rank})
            assert not different, f"{case.name} trained differently: {different[:5]}"
            self._saved[case.name] = path
        return self._saved[case.name]

    def pair(self, source: Case, target: Case) -> Row:
        """Run one pair and remember its row."""
        start = time.monotonic()
        row = Row(source.name, target.name, target.ranks)
        kind = self.kind_at(source)
        self.rows.append(row)
        try:
            outcomes = self.pool.run(
                load_on_ranks,
                target.ranks,
                target,
                kind_of(kind).table(self.table),
                str(self.saved(source)),
                kind,
                timeout=180,
            )
        except (RanksFailed, AssertionError) as error:
            row.wrong.append(str(error))
        else:
            row.wrong += sorted({key for found in outcomes for key in found.wrong})
            # A pipeline stage lacks what others hold; what all lack is lost.
            lost = set.intersection(*(found.lacking for found in outcomes))
            row.wrong += [f"lost: {key}" for key in sorted(lost)]
            row.load_seconds = max(found.seconds for found in outcomes)
            row.hf_seconds = max(found.hf_seconds for found in outcomes)
        row.total_seconds = time.monotonic() - start
        return row


def cycle(cases: Sequence[Case] = CASES, step: int = 7) -> list[tuple[Case, Case]]:
    """Every case once as a source and once as a target; `step` shares no factor with the number."""
    return [(case, cases[(n + step) % len(cases)]) for n, case in enumerate(cases)]


def every_pair(cases: Sequence[Case] = CASES) -> list[tuple[Case, Case]]:
    """All ordered pairs."""
    return [(source, target) for source in cases for target in cases]


HEAD = f"{'saved under':<25}{'loaded under':<25}{'ranks':>5}{'DCP s':>8}{'HF s':>8}  verdict"


def line_of(row: Row) -> str:
    """One pair, as a line of the table; what was wrong stands in full below it."""
    verdict = "equal" if not row.wrong else f"{len(row.wrong)} wrong: {row.wrong[0][:60]!r}"
    return (
        f"{row.source:<25}{row.target:<25}{row.ranks:>5}{row.load_seconds:>8.2f}"
        f"{row.hf_seconds:>8.2f}  {verdict}"
    )


def sum_of(rows: Sequence[Row]) -> str:
    """The last line of the table."""
    bad = sum(bool(row.wrong) for row in rows)
    return f"{len(rows)} pairs, {len(rows) - bad} equal bit for bit, {bad} not"


def table_of(rows: Sequence[Row]) -> str:
    """The pairs and their times, as text."""
    return "\n".join([HEAD, *map(line_of, rows), sum_of(rows)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.matrix", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every ordered pair, not one cycle")
    parser.add_argument(
        "--kind",
        default="adamw",
        choices=[*KINDS, "mixed", "every"],
        help="what is moved; mixed: all kinds in one job, every: one job after the other",
    )
    options = parser.parse_args()
    rows: list[Row] = []
    for kind in KINDS if options.kind == "every" else (options.kind,):
        with RankPool(8) as pool, tempfile.TemporaryDirectory() as folder:
            matrix = Matrix(pool, Path(folder), kind=kind)
            print(f"{kind}\n{HEAD}")
            for source, target in every_pair() if options.all else cycle():
                print(line_of(matrix.pair(source, target)), flush=True)
            print(sum_of(matrix.rows))
            for row in matrix.rows:
                for text in row.wrong:
                    print(f"{row.source} > {row.target}: {text}")
            rows += matrix.rows
    return 1 if not rows or any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
