"""Planned reads against bytes that real loads fetch, counted in both readers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from conformance.degrees import Case
from conformance.jobs import Job
from conformance.ranks import RankPool
from conformance.reference import Leaf
from torchtitan_ckpt.formats import dcp
from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.parallel import ParallelDegrees
from torchtitan_ckpt.plan import plan_load, plan_save

# Large enough that items are not read together, with rows that two and four ranks cut unevenly.
TABLE = {
    "layers.0.feed_forward.w1.weight": Leaf((2052, 1500)),
    "layers.0.feed_forward.w2.weight": Leaf((1500, 2052)),
    "tok_embeddings.weight": Leaf((3076, 900)),
}
# torch's reader looks for the end of an archive, then at its directory, and then reads it.
_TWICE = 8192


def case_of(text: str) -> Case:
    return Case(ParallelDegrees.parse(text))


def save(case: Case, folder: str) -> None:
    dcp.save(Job.start(TABLE, case.degrees).state("model"), folder, sync_files=False)


class _Counted:
    """A stream that adds up what is read of it."""

    def __init__(self, stream: Any, total: list[int]) -> None:
        self._stream, self._total = stream, total

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size)
        self._total[0] += len(data)
        return data

    def readinto(self, target: Any) -> int:
        count: int = self._stream.readinto(target)
        self._total[0] += count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def load_both(case: Case, folder: str) -> tuple[int, int]:
    """Bytes that DCP's reader fetches of the data files, and that ours does."""
    job = Job.start(TABLE, case.degrees, empty=True)
    by_dcp, by_ours = [0], [0]

    class Counting(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            with super().create_stream(path, mode) as stream:
                yield _Counted(stream, by_dcp)

    reader = torch_dcp.FileSystemReader(folder)
    reader.fs = Counting()
    torch_dcp.load(job.state("model"), storage_reader=reader)

    def add(count: int) -> None:
        by_ours[0] += count

    dcp.load(folder, job.state("model"), progress=add, threads=1)
    return by_dcp[0], by_ours[0]


@pytest.mark.parametrize(
    ("source", "target"), [("fsdp4", "tp2"), ("fsdp2", "fsdp4"), ("tp2", "fsdp2 x tp2")]
)
def test_planned_reads_are_what_is_fetched(
    pool: RankPool, tmp_path: Path, source: str, target: str
) -> None:
    a, b = case_of(source), case_of(target)
    pool.run(save, a.ranks, a, str(tmp_path))
    found = pool.run(load_both, b.ranks, b, str(tmp_path))
    native = {key: TensorEntry(key, leaf.shape, leaf.dtype) for key, leaf in TABLE.items()}
    saved = plan_save(native, a.degrees, optimizer=False)
    readers = plan_load(saved, native, b.degrees, optimizer=False).readers
    for planned, (by_dcp, by_ours) in zip(readers, found, strict=True):
        assert planned.by_ours == by_ours
        assert planned.by_dcp <= by_dcp <= planned.by_dcp + planned.parts * _TWICE
