"""Hugging Face folders: the index is the authority, and what contradicts is said, all at once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torchtitan_ckpt.errors import DamagedError, NotFoundError, RefusedError
from torchtitan_ckpt.formats import hf

INDEX = "model.safetensors.index.json"


def write(
    root: Path,
    files: dict[str, dict[str, torch.Tensor]],
    index: dict | None = None,
    **extra: object,
) -> Path:
    root.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, root / name, metadata={"format": "pt"})
    weight_map = {k: name for name, tensors in files.items() for k in tensors}
    total = sum(t.numel() * t.element_size() for ts in files.values() for t in ts.values())
    tree = {"metadata": {"total_size": total}, "weight_map": index or weight_map, **extra}
    (root / INDEX).write_text(json.dumps(tree))
    return root


def two_files(root: Path) -> Path:
    return write(
        root,
        {
            "model-00001-of-00002.safetensors": {
                f"layers.{i}.w": torch.full((2, 3), i * 1.0) for i in range(12)
            },
            "model-00002-of-00002.safetensors": {"norm": torch.arange(4.0), "ids": torch.arange(3)},
        },
    )


def codes(path: Path, error: type[Exception] = DamagedError) -> list[str]:
    with pytest.raises(error) as caught:
        hf.read_manifest(path)
    for problem in caught.value.problems:
        assert problem.fix, problem
        assert problem.where or problem.what
    return [problem.code for problem in caught.value.problems]


def test_a_sound_folder_is_described_without_its_data(tmp_path: Path) -> None:
    found = hf.read_manifest(two_files(tmp_path / "m"))
    assert found.format == "hf"
    assert found.info["layout"] == "index"
    assert len(found.tensors) == 14
    norm = found.tensors["norm"]
    assert (norm.shape, norm.dtype, norm.shards[0].file) == (
        (4,),
        "float32",
        "model-00002-of-00002.safetensors",
    )
    raw = (tmp_path / "m" / norm.shards[0].file).read_bytes()
    at = norm.shards[0].byte_offset
    assert raw[at : at + norm.shards[0].byte_length] == torch.arange(4.0).numpy().tobytes()
    assert hf.survey(tmp_path / "m").notes == ()


def test_one_file_by_folder_or_by_path_and_under_any_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    for path in (tmp_path, tmp_path / "consolidated.safetensors"):
        out = {"a": torch.zeros(2)}
        hf.load(path, out)
        assert torch.equal(out["a"], torch.ones(2))


def test_any_file_names_will_do(tmp_path: Path) -> None:
    names = ["consolidated-00003.safetensors", "model-a.safetensors", "ü x.safetensors"]
    root = write(
        tmp_path / "m", {n: {f"k{i}": torch.full((2,), i * 1.0)} for i, n in enumerate(names)}
    )
    out = {f"k{i}": torch.zeros(2) for i in range(3)}
    hf.load(root, out)
    assert [out[f"k{i}"][0].item() for i in range(3)] == [0, 1, 2]


def test_the_index_decides_against_a_stray_file(tmp_path: Path) -> None:
    root = two_files(tmp_path / "m")
    for stray in ("a-stray.safetensors", "zz-stray.safetensors"):
        save_file({"norm": torch.full((4,), -1.0), "more": torch.ones(1)}, root / stray)
    out = {
        k: torch.zeros(e.shape, dtype=getattr(torch, e.dtype))
        for k, e in hf.read_manifest(root).tensors.items()
    }
    hf.load(root, out)
    assert torch.equal(out["norm"], torch.arange(4.0))
    survey = hf.survey(root)
    assert [n.code for n in survey.notes] == ["hf.stray-file"]
    assert "a-stray" in survey.notes[0].actual
    assert "ignored" in survey.manifest.info["notes"]


def test_a_copy_that_the_index_places_elsewhere_is_ignored_and_said(tmp_path: Path) -> None:
    root = write(
        tmp_path / "m",
        {
            "a.safetensors": {"x": torch.ones(2), "y": torch.ones(2)},
            "b.safetensors": {"y": torch.zeros(2)},
        },
        index={"x": "a.safetensors", "y": "b.safetensors"},
    )
    out = {"x": torch.zeros(2), "y": torch.ones(2)}
    hf.load(root, out)
    assert torch.equal(out["y"], torch.zeros(2))
    notes = {note.code: note for note in hf.survey(root).notes}
    assert "y" in notes["hf.repeated-key"].actual


def test_everything_that_contradicts_comes_at_once(tmp_path: Path) -> None:
    root = two_files(tmp_path / "m")
    weight_map = json.loads((root / INDEX).read_text())["weight_map"]
    weight_map |= {
        "layers.0.w2": "model-00001-of-00002.safetensors",
        "head": "model-00009-of-00009.safetensors",
    }
    weight_map |= {"up": "../secret.safetensors"}
    del weight_map["ids"]
    (root / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    found = codes(root)
    assert sorted(found) == ["hf.file-key", "hf.index-key", "hf.shard-absent", "hf.unsafe-name"]
    with pytest.raises(DamagedError, match=r"layers\.0\.w2") as caught:
        hf.read_manifest(root)
    assert "nearest in the file: layers.0.w" in str(caught.value)
    assert "None" not in str(caught.value)  # nothing in the index is like `ids`


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    root = two_files(tmp_path / "m")
    (root / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DamagedError, match="model-00002-of-00002") as caught:
        hf.load(root, {"norm": torch.full((4,), 7.0)})
    assert [p.code for p in caught.value.problems] == ["hf.shard-absent"]


def test_shards_without_an_index(tmp_path: Path) -> None:
    root = two_files(tmp_path / "m")
    (root / INDEX).unlink()
    assert codes(root) == ["hf.index-absent"]
    (root / "model-00001-of-00002.safetensors").unlink()
    assert codes(root) == ["hf.index-absent"], "one of two files is no checkpoint"


def test_an_old_index_beside_a_new_single_file_is_refused(tmp_path: Path) -> None:
    """HFS-01: readers differ in which of the two they take."""
    root = two_files(tmp_path / "m")
    save_file({"norm": torch.zeros(4)}, root / "model.safetensors")
    assert codes(root) == ["hf.two-checkpoints"]


def test_a_lying_total_size_is_a_note(tmp_path: Path) -> None:
    root = write(
        tmp_path / "m", {"a.safetensors": {"x": torch.ones(2)}}, metadata={"total_size": 99}
    )
    note = hf.survey(root).notes[0]
    assert (note.code, note.expected, note.actual) == ("hf.total-size", "8", "99")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"metadata": {}}',
        '{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}',
        "[" * 100_000,
    ],
)
def test_a_bad_index_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    assert codes(tmp_path) == ["hf.index-json"]


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "",
        ".",
        "x",
        "a//b.safetensors",
        "x.safetensors\0",
        "link.safetensors",
        "pipe.safetensors",
        "sub/x.safetensors",
    ],
)
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "m"
    (root / "sub").mkdir(parents=True)
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    save_file({"a": torch.ones(1)}, root / "sub" / "x.safetensors")
    (root / "link.safetensors").symlink_to(tmp_path / "x.safetensors")
    os.mkfifo(root / "pipe.safetensors")
    (root / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    if name == "sub/x.safetensors":
        assert hf.read_manifest(root).tensors["a"].shards[0].file == name
    else:
        assert "hf.unsafe-name" in codes(root)


def test_links_as_the_hub_cache_makes_them(tmp_path: Path) -> None:
    blobs, root = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    blobs.mkdir()
    root.mkdir(parents=True)
    save_file({"a": torch.ones(1)}, blobs / "9f3c")
    (root / "model.safetensors").symlink_to("../../blobs/9f3c")
    assert list(hf.read_manifest(root).tensors) == ["a"]


def test_nothing_there(tmp_path: Path) -> None:
    assert codes(tmp_path, NotFoundError) == ["hf.empty-folder"]
    assert codes(tmp_path / "no", NotFoundError) == ["hf.folder-missing"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir(mode=0)
    assert codes(tmp_path / "m") == ["hf.folder-unreadable"]


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.layers.0.q_proj.lora_A.weight",
        "layers.0.lora_B.default.weight",
        "layers.0.lora_embedding_A",
        "layers.0.q.lora_magnitude_vector",
    ],
)
def test_adapter_weights_are_refused_by_name(tmp_path: Path, key: str) -> None:
    save_file({key: torch.ones(2), "layers.0.w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(RefusedError) as caught:
        hf.read_manifest(tmp_path)
    assert caught.value.problems[0].code == "hf.adapter-keys"
    assert key.split(".")[-1].split("_")[0] in str(caught.value)


def test_an_adapter_folder_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert codes(tmp_path, RefusedError) == ["hf.adapter-keys"]


def test_a_layer_named_like_an_adapter_is_none(tmp_path: Path) -> None:
    save_file(
        {"explora_A.w": torch.ones(2), "flora.weight": torch.ones(2)},
        tmp_path / "model.safetensors",
    )
    assert len(hf.read_manifest(tmp_path).tensors) == 2


# --- sharded files of DCP -----------------------------------------------------------------------


def shard_file(root: Path, number: int, parts: dict[str, tuple[torch.Tensor, list[int]]]) -> None:
    info = {key: {"saved_offsets": offsets} for key, (_, offsets) in parts.items()}
    save_file(
        {key: tensor for key, (tensor, _) in parts.items()},
        root / f"shard-{number:05d}-model-00001-of-00001.safetensors",
        metadata={"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)},
    )


def sharded(root: Path) -> torch.Tensor:
    whole = torch.arange(60.0).view(10, 6)
    for number, rows in enumerate([(0, 4), (4, 8), (8, 10)], 1):
        shard_file(root, number, {"w": (whole[rows[0] : rows[1]].contiguous(), [rows[0], 0])})
    return whole


def test_sharded_files_are_read_as_one_tensor(tmp_path: Path) -> None:
    whole = sharded(tmp_path)
    found = hf.read_manifest(tmp_path)
    assert found.info["layout"] == "sharded"
    assert (found.tensors["w"].shape, len(found.tensors["w"].shards)) == ((10, 6), 3)
    out = {"w": torch.full((10, 6), torch.nan)}
    hf.load(tmp_path, out)
    assert torch.equal(out["w"], whole)
    wide = {"w": torch.full((10, 6), torch.nan, dtype=torch.float64)}
    hf.load(tmp_path, wide, widen=True)
    assert torch.equal(wide["w"], whole.double())


@pytest.mark.parametrize("gone", [1, 2])
def test_a_gap_between_shards_is_an_error(tmp_path: Path, gone: int) -> None:
    """GEO-05: torch fills the rest and says nothing."""
    sharded(tmp_path)
    (tmp_path / f"shard-{gone:05d}-model-00001-of-00001.safetensors").unlink()
    found = codes(tmp_path)
    assert set(found) == {"hf.shard-absent", "hf.shards-cover"}


def test_a_missing_tail_shows_against_the_target(tmp_path: Path) -> None:
    from torchtitan_ckpt.errors import MismatchError

    sharded(tmp_path)
    (tmp_path / "shard-00003-model-00001-of-00001.safetensors").unlink()
    out = {"w": torch.full((10, 6), 7.0)}
    with pytest.raises(MismatchError, match="lost its last part"):
        hf.load(tmp_path, out)
    assert torch.equal(out["w"], torch.full((10, 6), 7.0))


def test_shards_that_overlap_or_disagree(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard_file(tmp_path, 4, {"w": (torch.zeros(2, 6), [7, 0])})
    with pytest.raises(DamagedError, match="overlap at"):
        hf.read_manifest(tmp_path)
    shard_file(tmp_path, 4, {"w": (torch.zeros(2, 6, dtype=torch.float16), [10, 0])})
    assert codes(tmp_path) == ["hf.shards-disagree"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"w": {}}',
        '{"w": {"saved_offsets": [0]}}',
        '{"w": {"saved_offsets": [-1, 0]}}',
        '{"w": {"saved_offsets": [0.5, 0]}}',
        '{"x": {"saved_offsets": [0, 0]}}',
        '{"w": {"saved_offsets": [9e9999, 0]}}',
    ],
)
def test_offsets_that_lie(tmp_path: Path, text: str) -> None:
    name = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.zeros(2, 2)}, name, metadata={"DCP_SHARDING_INFO": text})
    assert codes(tmp_path) == ["hf.sharding-info"]


def test_a_part_renamed_to_a_model_file_is_not_taken_for_a_whole(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").rename(
        tmp_path / "model.safetensors"
    )
    assert codes(tmp_path) == ["hf.partial-tensor"]


def test_torchs_own_writer_is_read(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    state = {"a": torch.randn(5, 7), "b.c": torch.arange(9), "s": torch.tensor(2.5)}
    for name, options in {
        "plain": {},
        "mapped": {"fqn_to_index_mapping": {"a": 1, "b.c": 2, "s": 2}},
        "sharded": {"save_distributed": True},
    }.items():
        dcp.save(
            state,
            storage_writer=HuggingFaceStorageWriter(str(tmp_path / name), **options),
            no_dist=True,
        )
        out = {k: torch.full_like(v, 7) for k, v in state.items()}
        hf.load(tmp_path / name, out)
        assert all(torch.equal(out[k], state[k]) for k in state), name


def test_a_million_shards_that_go_in_circles_are_refused_in_time(tmp_path: Path) -> None:
    """Many parts of one tensor, all at one place: bounded work, one answer."""
    from torchtitan_ckpt.formats.hf_boxes import find_gap_or_overlap

    start = time.monotonic()
    assert find_gap_or_overlap(
        (300, 300),
        [((0, 0), (3, 300))] * 100
        + [((i, j), (1, 3)) for i in range(300) for j in range(0, 300, 3)],
    )
    assert not find_gap_or_overlap(
        (300, 300), [((i, j), (1, 1)) for i in range(300) for j in range(300)]
    )
    assert time.monotonic() - start < 10
