"""Hugging Face saves and loads on real ranks, against the unsharded truth, byte for byte."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import Replicate, Shard

from conformance.ranks import RankPool
from tests.ranks import hf_cases as cases
from torchtitan_ckpt.formats import hf
from torchtitan_ckpt.formats.quantized_math import dequantize, quantize_fp4, quantize_fp8

SPLITS = {
    "one": ((1,), [Shard(0)]),
    "rows2": ((2,), [Shard(0)]),
    "rows4": ((4,), [Shard(0)]),
    "columns3": ((3,), [Shard(1)]),
    "replicas2": ((2,), [Replicate()]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "rows-columns": ((2, 2), [Shard(0), Shard(1)]),
    "last": ((2, 2), [Shard(2), Shard(0)]),
    "rows-rows": ((2, 2), [Shard(0), Shard(0)]),
}


def content(folder: Path) -> dict[str, torch.Tensor]:
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                assert key not in out
                out[key] = file.get_tensor(key)
    return out


def assert_truth(folder: Path) -> None:
    truth, found = cases.truth(), hf.read_manifest(folder)
    assert set(found.tensors) == set(truth)
    scale = truth.pop("scale")  # the library cannot hand out E8M0 under torch 2.13
    again = {"scale": torch.zeros(scale.shape, dtype=torch.uint8).view(scale.dtype)}
    hf.load(folder, again, expected_keys=set(found.tensors), raw=True)
    assert cases.same_bytes(again["scale"], scale)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in set(file.keys()) - {"scale"}:
                assert cases.same_bytes(file.get_tensor(key), truth[key]), key


@pytest.mark.parametrize("ownership", ["tensor", "bytes"])
@pytest.mark.parametrize("name", SPLITS)
def test_saved_and_loaded_under_one_split(
    pool: RankPool, tmp_path: Path, name: str, ownership: str
) -> None:
    mesh, placements = SPLITS[name]
    ranks = torch.Size(mesh).numel()
    options = {"ownership": ownership, "max_shard_size": 3000, "window": 200}
    wrong = pool.run(cases.round_trip, ranks, str(tmp_path / "out"), mesh, placements, options)
    assert wrong == [[]] * ranks
    assert_truth(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert all(n.startswith("model") for n in names), names


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.permutations(["rows4", "columns3", "hsdp", "one"], 2))
)
def test_saved_under_one_split_loaded_under_another(
    pool: RankPool, tmp_path: Path, source: str, target: str
) -> None:
    mesh, placements = SPLITS[source]
    pool.run(cases.round_trip, torch.Size(mesh).numel(), str(tmp_path / "x"), mesh, placements, {})
    mesh, placements = SPLITS[target]
    ranks = torch.Size(mesh).numel()
    assert pool.run(cases.load_under, ranks, str(tmp_path / "x"), mesh, placements) == [[]] * ranks


@pytest.mark.parametrize("ownership", ["tensor", "bytes"])
@pytest.mark.parametrize(("rows", "inner"), [(6, 12), (5, 7), (9, 5)])
def test_strided_shards_of_fsdp_over_tp(
    pool: RankPool, tmp_path: Path, ownership: str, rows: int, inner: int
) -> None:
    results = pool.run(cases.fsdp_over_tp, 4, str(tmp_path / "x"), ownership, rows, inner)
    assert [r["wrong"] for r in results] == [[]] * 4
    assert "_StridedShard" in results[0]["placements"]["up.weight"]


@pytest.mark.parametrize("ownership", ["tensor", "bytes"])
def test_stages_that_hold_different_keys(pool: RankPool, tmp_path: Path, ownership: str) -> None:
    assert pool.run(cases.stages, 2, str(tmp_path / "x"), ownership) == [[], []]
    found = content(tmp_path / "x")
    assert len(found) == 13
    for i in range(12):
        assert torch.equal(found[f"layers.{i}.w"], torch.full((3 + i, 5), float(i)))
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(found)
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for t in found.values()
    )


def test_every_writer_has_a_file(pool: RankPool, tmp_path: Path) -> None:
    made = pool.run(cases.who_writes, 4, str(tmp_path / "x"), (4,))
    assert all(made), made
    flat = [name for names in made for name in names]
    assert len(flat) == len(set(flat)), "a file has one owner"
    assert_truth(tmp_path / "x")


@pytest.mark.parametrize(
    ("kind", "code", "named"),
    [
        ("values", "ranks.copies-differ", "experts.local"),
        ("shape", "ranks.disagree", "one"),
        ("dtype", "ranks.disagree", "bfloat16"),
        ("missing", "ranks.coverage", "embed.weight"),
        ("object", "hf.not-savable", "config"),
        ("alias", "hf.alias", "tied"),
        ("disk", "hf.write", "disk is full"),
        ("verify", "hf.verify", "reads back differently"),
    ],
)
@pytest.mark.parametrize("ownership", ["tensor", "bytes"])
def test_a_failure_is_every_ranks_failure(
    pool: RankPool, tmp_path: Path, kind: str, code: str, named: str, ownership: str
) -> None:
    results = pool.run(cases.failure, 3, str(tmp_path / "x"), kind, ownership)
    for result in results:
        assert code in result["codes"], result
        assert named in result["text"]
        assert result["seconds"] < 30
        assert kind != "disk" or result["steps"] < 5, "all stop together, at once"
    assert not [n for n in results[0]["left"] if not n.startswith(".")]
    assert not list((tmp_path / "x").glob("*")), "nothing is left"


@pytest.mark.parametrize("action", ["save", "load"])
def test_memory_is_the_shards_and_a_window(pool: RankPool, tmp_path: Path, action: str) -> None:
    """Four times the data take no more memory above the shards."""
    window = 4 << 20
    above = {}
    for megabytes in (32, 128):
        folder = str(tmp_path / f"{action}{megabytes}")
        results = pool.run(cases.peak_memory, 2, folder, megabytes, action, window)
        above[megabytes] = max(r["peak"] - r["before"] for r in results)
    assert above[128] < 60, above
    assert above[128] - above[32] < 24, above


def test_a_load_by_rows_reads_no_more_than_its_rows(pool: RankPool, tmp_path: Path) -> None:
    pool.run(cases.round_trip, 1, str(tmp_path / "x"), (1,), [Shard(0)], {})
    for read, needed in pool.run(cases.bytes_needed, 4, str(tmp_path / "x"), (4,), [Shard(0)]):
        assert needed <= read <= needed + 4096 * len(cases.SHAPES)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((3,), [Shard(0)]), ((3,), [Shard(1)]), ((2, 2), [Shard(1), Shard(0)]), ((2,), [Replicate()])],
)
def test_dequantizing_counts_blocks_from_the_whole(
    pool: RankPool, tmp_path: Path, mesh: tuple[int, ...], placements: list
) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(5)
    stored, whole = {}, {}
    for number, shape in enumerate([(300, 200), (576, 130), (100, 50)]):
        codes, scale = quantize_fp8(torch.randn(shape, generator=generator) * (1 + number))
        scale = scale * (1 + torch.arange(scale.numel()).view(scale.shape) / 8)
        stored[f"layers.{number}.weight"], stored[f"layers.{number}.weight_scale_inv"] = (
            codes,
            scale,
        )
        whole[f"layers.{number}.weight"] = dequantize(codes, scale, dtype=torch.float32)
    codes, scale = quantize_fp4(torch.randn(37, 160, generator=generator))
    stored["experts.0.weight"], stored["experts.0.scale"] = codes, scale
    whole["experts.0.weight"] = dequantize(codes, scale, "fp4", dtype=torch.float32)
    blocks = torch.randint(0, 256, (5, 33, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 134, (5, 33, 3), dtype=torch.uint8, generator=generator)
    stored["mlp.gate_up_proj_blocks"], stored["mlp.gate_up_proj_scales"] = blocks, scales
    values = dequantize(blocks, scales, "mxfp4", dtype=torch.float32)
    whole["mlp.gate_up_proj"] = values.transpose(1, 2).contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    torch.save(whole, tmp_path / "whole.pt")
    ranks = torch.Size(mesh).numel()
    wrong = pool.run(
        cases.dequantized, ranks, str(tmp_path), mesh, placements, str(tmp_path / "whole.pt")
    )
    assert wrong == [[]] * ranks
