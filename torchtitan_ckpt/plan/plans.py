"""What a job would write and read under given parallel degrees, without the hardware.

`plan_save` and `plan_load` give, for each rank, files, items and bytes, prove that every element is
written exactly once, and say with the key what torch would refuse. Small jobs can be planned with
DCP's own planners on fake ranks (`method="dcp"`); larger ones by a shortcut that gives the same
plan (`method="repeat"`). How it is shown is `text`'s business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan_ckpt.errors import Problem
from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.parallel import ParallelDegrees
from torchtitan_ckpt.plan.metadata import metadata_bytes
from torchtitan_ckpt.plan.read import Reader, ReadPlan, plan_reads
from torchtitan_ckpt.plan.state import Entry, full_entries, layout_faults
from torchtitan_ckpt.plan.write import Writer, Written, coverage_problems, plan_writes

Method = Literal["auto", "dcp", "repeat"]
# Up to so many items over all ranks DCP's planners take a few seconds.
_DCP_ITEMS = 60_000


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A planned save. `nbytes` is the state's size, every element once; `metadata` is that of
    `.metadata`, but for a few bytes in ten thousand and the names of its folder."""

    degrees: ParallelDegrees
    writers: tuple[Writer, ...]
    tensors: int
    objects: int
    chunks: int
    nbytes: int
    metadata: int
    method: str
    seconds: float
    problems: tuple[Problem, ...]
    written: Written

    @property
    def held(self) -> int:
        """Bytes that all ranks hold together, replicas included."""
        return sum(writer.held for writer in self.writers)

    @property
    def duplicated(self) -> int:
        """Bytes that ranks hold and do not write, because another rank writes them."""
        return self.held - self.nbytes

    @property
    def stored(self) -> int:
        """Bytes of all data files."""
        return sum(writer.stored for writer in self.writers)

    @property
    def imbalance(self) -> float:
        """The busiest rank's bytes over the mean: 1.0 is even, and saves take that much longer."""
        mean = self.stored / len(self.writers)
        return max(writer.stored for writer in self.writers) / mean if mean else 1.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A planned load of a planned save, perhaps under other degrees."""

    degrees: ParallelDegrees
    readers: tuple[Reader, ...]
    seconds: float
    problems: tuple[Problem, ...]
    reads: ReadPlan

    def amplification(self, reader: Literal["by_dcp", "by_ours"]) -> float:
        """Bytes fetched over bytes needed, all ranks together."""
        needed = sum(r.needed for r in self.readers)
        return sum(getattr(r, reader) for r in self.readers) / needed if needed else 1.0


def plan_save(
    native: Mapping[str, TensorEntry] | Sequence[Entry],
    degrees: ParallelDegrees,
    *,
    chunks: int = 1,
    optimizer: bool = True,
    method: Method = "auto",
) -> SavePlan:
    """Plan a save of a model (its native tensors by name), or of a list of entries as it is.

    `degrees` must be resolved. `chunks` is the number of pipeline stages a rank; with `optimizer`
    AdamW's moments, scheduler, data loaders and counters are saved too.
    """
    start = time.monotonic()
    problems: list[Problem] = []
    entries: list[Entry]
    if isinstance(native, Mapping):
        problems = layout_faults(native, degrees, chunks=chunks)
        entries = full_entries(native, degrees, chunks=chunks, optimizer=optimizer)
    else:
        entries = list(native)
    written = plan_writes(entries, degrees)
    used = method
    if method == "auto":
        used = "dcp" if len(entries) * degrees.world_size <= _DCP_ITEMS else "repeat"
    if used == "dcp":
        from torchtitan_ckpt.plan.dcp import owners_from_dcp

        written = owners_from_dcp(written)
        problems += coverage_problems(written)
    else:
        problems += written.problems
    return SavePlan(
        degrees=degrees,
        writers=tuple(written.writers),
        tensors=sum(entry.is_tensor for entry in entries),
        objects=sum(not entry.is_tensor for entry in entries),
        chunks=sum(len(kind.boxes) for kind in written.kinds),
        nbytes=sum(_nbytes(entry) for entry in entries),
        metadata=metadata_bytes(written),
        method=used,
        seconds=time.monotonic() - start,
        problems=tuple(problems),
        written=written,
    )


def plan_load(
    saved: SavePlan,
    native: Mapping[str, TensorEntry] | Sequence[Entry],
    degrees: ParallelDegrees,
    *,
    chunks: int = 1,
    optimizer: bool = True,
) -> LoadPlan:
    """Plan the load of a planned save under `degrees`; arguments as for `plan_save`."""
    start = time.monotonic()
    problems: list[Problem] = []
    entries: Sequence[Entry]
    if isinstance(native, Mapping):
        problems = layout_faults(native, degrees, chunks=chunks)
        entries = full_entries(native, degrees, chunks=chunks, optimizer=optimizer)
    else:
        entries = native
    reads = plan_reads(saved.written, entries, degrees)
    return LoadPlan(
        degrees,
        tuple(reads.readers),
        time.monotonic() - start,
        (*problems, *reads.problems),
        reads,
    )


def _nbytes(entry: Entry) -> int:
    if not entry.is_tensor:
        return 0
    return TensorEntry(entry.key, entry.shape, entry.dtype).nbytes


def share(numbers: Sequence[int]) -> tuple[int, int, float]:
    """(least, most, mean) of a column, for tables."""
    return min(numbers), max(numbers), math.fsum(numbers) / len(numbers)
