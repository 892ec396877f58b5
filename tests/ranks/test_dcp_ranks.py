"""DCP on real ranks: saved under one split, loaded under another, by us and by torch, bitwise."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from torch.distributed.tensor import Replicate, Shard

from conformance.ranks import RankPool
from tests.ranks import dcp_cases as cases
from torchtitan_ckpt.formats import dcp
from torchtitan_ckpt.formats.folders import open_folder


def rows(dims: int) -> list:
    return [Shard(0)]


def columns(dims: int) -> list:
    return [Shard(1)]


def replicas_rows(dims: int) -> list:
    return [Replicate(), Shard(0)]


def rows_columns(dims: int) -> list:
    return [Shard(0), Shard(1)]


def last_rows(dims: int) -> list:
    return [Shard(dims - 1), Shard(0)]


SPLITS = {
    "one": ((1,), rows),
    "rows4": ((4,), rows),
    "columns3": ((3,), columns),
    "hsdp": ((2, 2), replicas_rows),
    "rows-columns": ((2, 2), rows_columns),
    "last-rows": ((2, 2), last_rows),
}


def size(split) -> int:
    return functools.reduce(lambda a, b: a * b, split[0])


PAIRS = [
    ("rows4", "one"),
    ("one", "rows4"),
    ("rows4", "columns3"),
    ("columns3", "hsdp"),
    ("hsdp", "rows-columns"),
    ("rows-columns", "last-rows"),
    ("last-rows", "rows4"),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize(("writer", "reader"), [("us", "us"), ("us", "torch"), ("torch", "us")])
def test_resharding(pool: RankPool, tmp_path: Path, source, target, writer, reader) -> None:
    a, b = SPLITS[source], SPLITS[target]
    pool.run(cases.save, size(a), a, str(tmp_path / "s"), writer)
    manifest = dcp.read_manifest(tmp_path / "s")
    assert {k for k in manifest.objects if k.startswith("dataloader")} == {
        f"dataloader.{r}" for r in range(size(a))
    }
    pool.run(cases.load, size(b), b, str(tmp_path / "s"), reader)
    digests = dcp.read_checksums(tmp_path / "s")
    if writer == "us":
        assert set(digests) == set(manifest.files) - {".checksums.jsonl"}
        folder = open_folder(tmp_path / "s")
        for name, digest in digests.items():
            file = folder.open(name)
            assert dcp.check_file(file, digest, where=name) == []
            file.close()


@pytest.mark.parametrize("row_count", [8, 10, 9, 5, 3])
def test_fsdp_over_tensor_parallel(pool: RankPool, tmp_path: Path, row_count) -> None:
    results = pool.run(cases.strided, 4, str(tmp_path / "s"), row_count)
    assert set(results) in ({"loaded"}, {"dcp.placement"})
    if row_count % 4 == 0 or row_count == 10:
        assert set(results) == {"loaded"}


@pytest.mark.parametrize(
    ("how", "words"), [("emptied", "tensors without memory: b"), ("full", "the disk is full")]
)
def test_one_rank_that_fails_fails_all_with_its_cause(
    pool: RankPool, tmp_path: Path, how, words
) -> None:
    results = pool.run(cases.fail_on, 3, 1, str(tmp_path / "s"), how)
    assert {kind for kind, _ in results} == {"SaveError"}
    assert all(words in text for _, text in results)
    if how == "full":
        assert all("(rank 1)" in text for _, text in results)
    assert not (tmp_path / "s" / ".metadata").exists()


def test_a_shard_of_several_blocks_is_saved_as_those_blocks(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(cases.interleaved, 2, str(tmp_path / "s")) == [[4, 4], [4, 4]]
