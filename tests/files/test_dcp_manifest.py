"""The manifest of DCP folders: golden ones in full, damaged ones with every fault and its code."""

from __future__ import annotations

import os
import pickle
import shutil
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as md

from tests.files.dcp_lab import GOLDEN, edit, expected, some_state, stored, torch_save
from torchtitan_ckpt.errors import CheckpointError, DamagedError, NotFoundError, RefusedError
from torchtitan_ckpt.formats.coverage import explain_cover
from torchtitan_ckpt.formats.dcp import load, read_manifest
from torchtitan_ckpt.manifest import Shard


@pytest.fixture
def folder(tmp_path):
    return torch_save(some_state(), tmp_path / "step")


def codes(error: CheckpointError) -> set[str]:
    return {problem.code for problem in error.problems}


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir()))
def test_golden_folders(name):
    manifest = read_manifest(GOLDEN / name)
    wanted = expected(GOLDEN / name)
    assert {k: [list(e.shape), e.dtype] for k, e in manifest.tensors.items()} == {
        k: [row["shape"], row["dtype"]] for k, row in wanted["tensors"].items()
    }
    assert set(manifest.objects) == set(wanted["objects"])
    assert manifest.info.get("none_keys", "").split() == wanted["none_keys"]
    for file, size in manifest.files.items():
        assert (GOLDEN / name / file).stat().st_size == size


def test_shards_say_where_they_lie():
    manifest = read_manifest(GOLDEN / "torch-2.13-4ranks")
    rows = manifest.tensors["rows"].shards
    assert [(s.offsets, s.sizes, s.file) for s in rows] == [
        ((0, 0), (3, 3), "__0_0.distcp"),
        ((3, 0), (3, 3), "__1_0.distcp"),
        ((6, 0), (3, 3), "__2_0.distcp"),
        ((9, 0), (1, 3), "__3_0.distcp"),
    ]
    for shard in rows:
        data = (GOLDEN / "torch-2.13-4ranks" / shard.file).read_bytes()
        item = data[shard.byte_offset : shard.byte_offset + shard.byte_length]
        assert item[:2] == b"PK"
        assert item[-22:-18] == b"PK\x05\x06"


def test_strings_and_urls(folder):
    assert read_manifest(str(folder)).tensors == read_manifest(f"file://{folder}").tensors


# What is not there, or is something else


def test_missing_folder(tmp_path):
    with pytest.raises(NotFoundError) as caught:
        read_manifest(tmp_path / "none")
    assert codes(caught.value) == {"folder.missing"}


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(RefusedError) as caught:
        read_manifest(tmp_path / "f")
    assert codes(caught.value) == {"folder.is-file"}


@pytest.mark.parametrize(
    ("names", "kind", "code"),
    [
        ([], NotFoundError, "dcp.no-metadata"),
        (["notes.txt"], NotFoundError, "dcp.no-metadata"),
        (["__0_0.distcp"], NotFoundError, "dcp.unfinished"),
        ([".metadata.tmp"], NotFoundError, "dcp.unfinished"),
        (["__0.metadata", "__1.metadata", "__0_0.distcp"], RefusedError, "dcp.rank-local"),
        (["__0_1.metadata"], RefusedError, "dcp.rank-local"),
    ],
)
def test_no_metadata(tmp_path, names, kind, code):
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(kind) as caught:
        read_manifest(tmp_path)
    assert codes(caught.value) == {code}


def test_rank_local_metadata_as_torch_writes_it(tmp_path):
    dcp.save(
        {"a": torch.ones(2)}, checkpoint_id=tmp_path / "s", no_dist=True, use_collectives=False
    )
    with pytest.raises(RefusedError, match="use_collectives=False"):
        read_manifest(tmp_path / "s")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "pickle.empty"),
        (b"not a pickle", "pickle.not-a-pickle"),
        (pickle.dumps({"a": 1}), "pickle.malformed"),
        (pickle.dumps(md.Metadata({}, None, None)), "pickle.malformed"),
        (pickle.dumps(md.Metadata({"a": 3}, None, {})), "dcp.metadata-form"),
        (pickle.dumps(md.Metadata({3: md.BytesStorageMetadata()}, None, {})), "dcp.metadata-form"),
        (pickle.dumps(md.Metadata({}, None, {"a": 1})), "dcp.metadata-form"),
    ],
)
def test_metadata_that_is_none(folder, data, code):
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(DamagedError) as caught:
        read_manifest(folder)
    assert codes(caught.value) == {code}


SAFETENSORS = GOLDEN / "torch-2.13.0-safetensors"


def test_safetensors_serialization_has_a_place_for_every_tensor():
    manifest = read_manifest(SAFETENSORS)
    assert manifest.info["serialization"] == "safetensors"
    places = [(s.file, s.byte_offset) for e in manifest.tensors.values() for s in e.shards]
    assert len(set(places)) == len(places) > len(manifest.tensors)


def test_safetensors_serialization_of_one_tensor(tmp_path):
    form = dcp.filesystem.SerializationFormat.SAFETENSORS
    writer = dcp.FileSystemWriter(tmp_path / "s", serialization_format=form)
    state = {"a": torch.arange(6.0).reshape(2, 3)}
    dcp.save(state, storage_writer=writer, no_dist=True)
    target = {"a": torch.zeros(2, 3)}
    load(tmp_path / "s", target)
    assert torch.equal(target["a"], state["a"])


def test_files_of_two_serializations_in_one_folder_are_no_checkpoint(tmp_path):
    """The archives of the one kind would else be read as bare bytes of the other."""
    folder = tmp_path / "s"
    shutil.copytree(SAFETENSORS, folder)
    archives = GOLDEN / "torch-2.10.0-2ranks" / "__1_0.distcp"
    (folder / "__1_0.distcp").write_bytes(archives.read_bytes())
    with pytest.raises(DamagedError) as caught:
        read_manifest(folder)
    assert "dcp.not-stored" in codes(caught.value)


@pytest.mark.parametrize("what", ["cut", "renamed", "shape", "header"])
def test_damaged_safetensors_serialization(what, tmp_path):
    folder = tmp_path / "s"
    shutil.copytree(SAFETENSORS, folder)
    path = folder / "__1_0.distcp"
    data = path.read_bytes()
    old, new = {
        "cut": (data, data[:-1]),
        "renamed": (b'"uneven":{"dtype"', b'"unevem":{"dtype"'),
        "shape": (b'"shape":[3,4]', b'"shape":[4,3]'),
        "header": (b'{"__metadata__"', b'{{__metadata__"'),
    }[what]
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    with pytest.raises(DamagedError) as caught:
        read_manifest(folder)
    wanted = {"cut": "hf.", "header": "hf."}.get(what, "dcp.not-stored")
    assert all(code.startswith(wanted) for code in codes(caught.value))


def test_compressed_entries_are_named(folder):
    def change(metadata):
        stored(metadata, "half").transform_descriptors = ["stream.zstd"]

    edit(folder, change)
    with pytest.raises(RefusedError, match=r"stream\.zstd") as caught:
        read_manifest(folder)
    assert codes(caught.value) == {"dcp.compressed"}


# What contradicts itself


def _set(key, **values):
    def change(metadata):
        for name, value in values.items():
            setattr(stored(metadata, key), name, value)

    return change


def _drop_shard(metadata):
    entry = metadata.state_dict_metadata["layers.3.w"]
    entry.chunks[0].sizes = torch.Size([entry.size[0] - 1, entry.size[1]])


def _overlap(metadata):
    entry = metadata.state_dict_metadata["layers.3.w"]
    entry.chunks.append(md.ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([1, 7])))
    metadata.storage_data[md.MetadataIndex("layers.3.w", [1, 0])] = stored(metadata, "layers.4.w")


def _beyond_shape(metadata):
    metadata.state_dict_metadata["layers.3.w"].chunks[0].offsets = torch.Size([2, 0])
    info = stored(metadata, "layers.3.w")
    del metadata.storage_data[md.MetadataIndex("layers.3.w", [0, 0])]
    metadata.storage_data[md.MetadataIndex("layers.3.w", [2, 0])] = info


def _huge_shape(metadata):
    entry = metadata.state_dict_metadata["layers.3.w"]
    entry.size = entry.chunks[0].sizes = torch.Size([2**40, 2**40])


def _swap(metadata):
    a, b = stored(metadata, "layers.3.w"), stored(metadata, "layers.4.w")
    a.offset = b.offset


def _forget(metadata):
    del metadata.storage_data[md.MetadataIndex("lr")]
    del metadata.storage_data[md.MetadataIndex("layers.3.w", [0, 0])]


def _stranger(metadata):
    metadata.storage_data[md.MetadataIndex("stranger")] = stored(metadata, "lr")


def _no_chunks(metadata):
    metadata.state_dict_metadata["layers.3.w"].chunks = []
    del metadata.storage_data[md.MetadataIndex("layers.3.w", [0, 0])]


FAULTS = {
    "gap": (_drop_shard, {"dcp.coverage"}),
    "overlap": (_overlap, {"dcp.coverage", "dcp.bytes-overlap"}),
    "beyond-shape": (_beyond_shape, {"dcp.coverage"}),
    "huge-shape": (_huge_shape, {"dcp.item-too-small"}),
    "no-chunks": (_no_chunks, {"dcp.coverage"}),
    "beyond-file": (_set("half", length=10**9), {"dcp.beyond-file"}),
    "negative-offset": (_set("half", offset=-5), {"dcp.beyond-file"}),
    "negative-length": (_set("half", length=-5), {"dcp.beyond-file", "dcp.item-too-small"}),
    "short-item": (_set("half", length=40), {"dcp.item-too-small"}),
    "absent-file": (_set("half", relative_path="__9_0.distcp"), {"dcp.file-missing"}),
    "shared-bytes": (_swap, {"dcp.bytes-overlap"}),
    "not-stored": (_forget, {"dcp.not-stored", "dcp.coverage"}),
    "stored-unknown": (_stranger, {"dcp.stored-unknown"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_have_codes_and_name_the_key(folder, name):
    change, wanted = FAULTS[name]
    edit(folder, change)
    with pytest.raises(DamagedError) as caught:
        read_manifest(folder)
    assert codes(caught.value) == wanted
    assert any(key in str(caught.value) for key in ("layers.3.w", "half", "lr", "stranger"))
    assert str(folder) in str(caught.value)


def test_all_faults_at_once_and_keys_grouped(folder):
    def change(metadata):
        for i in range(12):
            stored(metadata, f"layers.{i}.w").length = 10**9
        del metadata.storage_data[md.MetadataIndex("lr")]

    edit(folder, change)
    with pytest.raises(DamagedError) as caught:
        read_manifest(folder)
    assert codes(caught.value) == {"dcp.beyond-file", "dcp.not-stored"}
    assert "layers.{0..11}.w (12)" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../other/__0_0.distcp", "/etc/hostname", "a/../../x", "C:\\x", "x\0y", "", "a\\b"]
)
def test_names_that_leave_the_folder(folder, name):
    edit(folder, _set("half", relative_path=name))
    with pytest.raises(RefusedError) as caught:
        read_manifest(folder)
    assert codes(caught.value) == {"dcp.unsafe-name"}


def test_links_that_leave_the_folder(folder, tmp_path):
    shutil.move(folder / "__0_0.distcp", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / "__0_0.distcp")
    with pytest.raises(RefusedError) as caught:
        read_manifest(folder)
    assert codes(caught.value) == {"dcp.unsafe-name"}


def test_links_inside_the_folder_are_fine(folder):
    shutil.move(folder / "__0_0.distcp", folder / "data")
    os.symlink("data", folder / "__0_0.distcp")
    assert "half" in read_manifest(folder).tensors


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_a_cut_data_file(folder, share):
    path = folder / "__0_0.distcp"
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))
    with pytest.raises(DamagedError) as caught:
        read_manifest(folder)
    assert codes(caught.value) == {"dcp.beyond-file"}


def test_fields_of_the_wrong_kind(folder):
    def change(metadata):
        metadata.state_dict_metadata["half"].size = torch.Size([9, 4, 1])

    edit(folder, change)
    with pytest.raises(DamagedError):
        read_manifest(folder)
    edit(folder, lambda m: setattr(m.state_dict_metadata["half"], "chunks", 5))
    with pytest.raises(DamagedError) as caught:
        read_manifest(folder)
    assert codes(caught.value) == {"dcp.metadata-form"}


def test_unreadable_metadata(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="EACCES"):
        read_manifest(folder)


# A pickled None


def test_a_pickled_none_is_absent_and_said(tmp_path):
    state = {f"state.{i}.max": None if i % 2 else True for i in range(14)} | {"n": 0, "s": "None"}
    manifest = read_manifest(torch_save(state, tmp_path / "s"))
    assert set(manifest.objects) == {k for k, v in state.items() if v is not None}
    assert manifest.info["none_keys"].split("\n") == sorted(
        k for k, v in state.items() if v is None
    )


# Coverage


@pytest.mark.parametrize(
    ("shape", "boxes", "fault"),
    [
        ((4, 6), [((0, 0), (4, 6))], ""),
        ((4, 6), [((0, 0), (1, 6)), ((1, 0), (3, 6))], ""),
        ((4, 6), [((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 4)), ((2, 4), (2, 2))], ""),
        ((), [((), ())], ""),
        ((0, 5), [], ""),
        ((5,), [((0,), (5,)), ((5,), (0,)), ((5,), (0,))], ""),
        ((4, 6), [], "0 of 24"),
        ((), [], "0 of 1"),
        ((4, 6), [((0, 0), (3, 6))], "nothing holds 3 to 3 of dimension 0"),
        ((4, 6), [((1, 0), (3, 6))], "nothing holds 0 to 0 of dimension 0"),
        ((4, 6), [((0, 0), (3, 6)), ((2, 0), (2, 6))], "overlap"),
        ((4, 6), [((0, 0), (4, 6)), ((0, 0), (4, 6))], "overlap"),
        ((4, 6), [((0, 0), (2, 6)), ((1, 0), (2, 6))], "overlap"),
        ((4, 6), [((0, 0), (4, 3)), ((0, 2), (4, 3))], "overlap"),
        ((4, 6), [((0, 0), (4, 7))], "beyond"),
        ((4, 6), [((0,), (4,))], "dimensions"),
    ],
)
def test_coverage(shape, boxes, fault):
    found = explain_cover(shape, boxes)
    assert (found == "") if not fault else (fault in found)


def test_coverage_of_many_shards_is_quick_when_right_and_when_wrong():
    grid = [((i, j), (1, 1)) for i in range(300) for j in range(300)]
    for boxes, good in ((grid, True), (grid[:-1], False), ([*grid[:-1], grid[0]], False)):
        start = time.process_time()
        assert (explain_cover((300, 300), boxes) == "") is good
        assert time.process_time() - start < 8


def test_shard_is_what_others_build_on():
    assert Shard.__slots__ == ("offsets", "sizes", "file", "byte_offset", "byte_length")
