"""Saving as DCP: torch reads it, the marker is last, failures are words, checksums find flips."""

from __future__ import annotations

import errno
import io
import os
import pickle
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.files.dcp_lab import nan_like, same, some_state
from torchtitan_ckpt.errors import DamagedError, SaveError
from torchtitan_ckpt.formats import dcp_save
from torchtitan_ckpt.formats.dcp import check_file, load, read_checksums, read_manifest, save
from torchtitan_ckpt.formats.dcp_checksums import CHECKSUMS
from torchtitan_ckpt.formats.folders import open_folder


def blank(state):
    return {k: nan_like(v) if isinstance(v, torch.Tensor) else None for k, v in state.items()}


def assert_equal(loaded, state):
    assert loaded.keys() == state.keys()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert same(loaded[key], value.detach().contiguous()), key
        else:
            assert loaded[key] == value, key


def odd_state():
    base = torch.arange(60.0).reshape(6, 10)
    complex_base = torch.arange(6.0).to(torch.complex64) * (1 + 2j)
    return some_state() | {
        "view": base[1:4, 2:7],
        "transposed": base.t(),
        "alias": base,
        "same": base,
        "expanded": base[:1, :1].expand(4, 5),
        "conjugate": complex_base.conj(),
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "zero": torch.tensor(-0.0),
        "nan": torch.tensor([float("nan"), float("inf")]),
        "large": torch.arange(400_000).reshape(800, 500),
        "large_view": torch.arange(800_000.0).reshape(800, 1000)[:, 100:600],
        "nested": {"a": [{"b": 1}, {"c": (2, 3)}], "d": torch.arange(3).tolist()},
        "list": [{"x": 1}],
        "text": "größe",
    }


def test_round_trip(tmp_path):
    state = odd_state()
    save(state, tmp_path / "s")
    assert_equal(load(tmp_path / "s", blank(state)), state)


def test_torch_reads_it(tmp_path):
    state = {k: v for k, v in odd_state().items() if k not in ("nested", "list")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, tmp_path / "s", checksums=True)
        target = blank(state)
        dcp.load(target, checkpoint_id=tmp_path / "s", no_dist=True)
        assert_equal(target, state)
        dcp_to_torch_save(tmp_path / "s", tmp_path / "whole.pt")
    assert_equal(torch.load(tmp_path / "whole.pt"), state)


def test_metadata_is_what_torch_would_write(tmp_path):
    state = some_state()
    save(state, tmp_path / "mine")
    dcp.save(state, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    mine, theirs = (
        pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("mine", "theirs")
    )
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert mine.planner_data == theirs.planner_data
    assert mine.version == theirs.version
    assert mine.storage_data.keys() == theirs.storage_data.keys()
    assert {i.relative_path for i in mine.storage_data.values()} == {"__0_0.distcp"}


def test_every_item_is_a_sound_archive(tmp_path):
    state = odd_state()
    save(state, tmp_path / "s")
    manifest = read_manifest(tmp_path / "s")
    data = (tmp_path / "s" / "__0_0.distcp").read_bytes()
    for key, entry in manifest.tensors.items():
        for shard in entry.shards:
            item = data[shard.byte_offset : shard.byte_offset + shard.byte_length]
            assert zipfile.ZipFile(io.BytesIO(item)).testzip() is None, key
            tensor = torch.load(io.BytesIO(item), weights_only=True)
            assert same(tensor.contiguous(), state[key].detach().contiguous()), key


def test_none_is_left_out(tmp_path):
    save({"a": torch.ones(2), "b": None, "c": 3}, tmp_path / "s")
    manifest = read_manifest(tmp_path / "s")
    assert manifest.keys == {"a", "c"}
    assert "none_keys" not in manifest.info


def test_containers_keep_their_keys_when_they_grow(tmp_path):
    save({"k": [{"a": 1}]}, tmp_path / "s")
    assert set(read_manifest(tmp_path / "s").objects) == {"k"}
    assert load(tmp_path / "s", {"k": []}) == {"k": [{"a": 1}]}


def test_a_second_save_replaces_the_first(tmp_path):
    save({"a": torch.ones(3), "gone": 1}, tmp_path / "s", checksums=True)
    save({"a": torch.zeros(4)}, tmp_path / "s")
    assert read_manifest(tmp_path / "s").keys == {"a"}
    assert read_checksums(tmp_path / "s") is None


def test_urls(tmp_path):
    state = some_state()
    url = f"memory://save-{tmp_path.name}/step-7"
    save(state, url, checksums=True)
    assert_equal(load(url, blank(state)), state)
    assert set(read_checksums(url)) == {"__0_0.distcp", ".metadata"}
    save(state, f"file://{tmp_path}/local")
    assert_equal(load(tmp_path / "local", blank(state)), state)


def test_dropping_the_page_cache_leaves_the_bytes(tmp_path):
    state = some_state()
    save(state, tmp_path / "s", drop_page_cache=True)
    assert_equal(load(tmp_path / "s", blank(state)), state)


def test_sync_is_asked_for_once_a_file_and_not_without(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_mode), real(fd)))
    save({"a": torch.ones(2)}, tmp_path / "s")
    assert len(synced) >= 3  # data, metadata, folder
    synced.clear()
    save({"a": torch.ones(2)}, tmp_path / "t", sync_files=False)
    assert synced == []


# Failures


def failing(monkeypatch, number, name_part="distcp", partial=b""):
    """Make opening a file for writing fail at the first byte."""
    real = dcp_save.FileSystemWriter

    class Broken(io.BytesIO):
        def __init__(self, name):
            super().__init__()
            self.file = name

        def write(self, data):
            raise OSError(number, os.strerror(number), self.file)

    from contextlib import contextmanager

    from torch.distributed.checkpoint.filesystem import FileSystem

    original = FileSystem.create_stream

    @contextmanager
    def create_stream(self, path, mode):
        if "w" in mode and name_part in str(path):
            yield Broken(str(path))
        else:
            with original(self, path, mode) as stream:
                yield stream

    monkeypatch.setattr(FileSystem, "create_stream", create_stream)
    return real


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "permission"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "storage"),
        (errno.ENOENT, "removed"),
        (errno.EBUSY, "busy"),
    ],
)
@pytest.mark.parametrize("part", ["distcp", "metadata"])
def test_failures_of_the_file_system_are_words(tmp_path, monkeypatch, number, words, part):
    failing(monkeypatch, number, part)
    with pytest.raises(SaveError) as caught:
        save(some_state(), tmp_path / "s")
    assert words in str(caught.value)
    assert part in caught.value.problems[0].where
    assert not (tmp_path / "s" / ".metadata").exists()


def test_a_failed_second_save_leaves_nothing_that_looks_valid(tmp_path, monkeypatch):
    save({"a": torch.ones(3)}, tmp_path / "s")
    failing(monkeypatch, errno.ENOSPC)
    with pytest.raises(SaveError):
        save({"a": torch.zeros(3)}, tmp_path / "s")
    assert not (tmp_path / "s" / ".metadata").exists()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(SaveError):
        save({"a": torch.ones(1)}, tmp_path / "f" / "step")


def test_what_cannot_be_pickled_is_a_save_error(tmp_path):
    with pytest.raises(SaveError):
        save({"a": torch.ones(1), "b": lambda: 1}, tmp_path / "s")
    assert not (tmp_path / "s" / ".metadata").exists()


def test_tensors_without_memory_are_named(tmp_path):
    swapped = torch.ones(4, 3)
    swapped.untyped_storage().resize_(0)
    state = {"ok": torch.ones(1), "swapped": swapped, "meta": torch.ones(2, device="meta")}
    with pytest.raises(SaveError, match="swapped, meta") as caught:
        save(state, tmp_path / "s")
    assert caught.value.problems[0].code == "dcp.emptied"


# Checksums


def problems_of(folder):
    opened = open_folder(folder)
    found = []
    for name, digest in read_checksums(folder).items():
        file = opened.open(name)
        found += check_file(file, digest, where=name)
        file.close()
    return found


def test_checksums_hold_and_find_every_flip(tmp_path):
    state = some_state()
    save(state, tmp_path / "s", checksums=True)
    assert problems_of(tmp_path / "s") == []
    manifest = read_manifest(tmp_path / "s")
    items = read_checksums(tmp_path / "s")["__0_0.distcp"].items
    spans = {(e.byte_offset, e.byte_length) for e in manifest.objects.values()} | {
        (s.byte_offset, s.byte_length) for e in manifest.tensors.values() for s in e.shards
    }
    assert spans <= {(at, n) for at, n, _ in items}
    for name in ("__0_0.distcp", ".metadata"):
        path = tmp_path / "s" / name
        good = path.read_bytes()
        for at in range(0, len(good), max(1, len(good) // 40)):
            bad = bytearray(good)
            bad[at] ^= 1 << (at % 8)
            path.write_bytes(bad)
            (problem,) = problems_of(tmp_path / "s")
            assert (problem.code, problem.where) == ("checksum.differs", name)
            if name != ".metadata":
                (span,) = [(a, n) for a, n, _ in items if a <= at < a + n]
                assert f"bytes {span[0]} to {sum(span)}" in problem.actual
        path.write_bytes(good[:-1])
        assert problems_of(tmp_path / "s")[0].code == "checksum.size"
        path.write_bytes(good)
    assert problems_of(tmp_path / "s") == []


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-3],
        lambda text: b"",
        lambda text: b"\xff" + text,
        lambda text: text.replace(b"xxh3_128", b"md5"),
        lambda text: text.replace(b'"bytes":', b'"bytes":-'),
        lambda text: text + b"[" * 100_000 + b"\n",
        lambda text: text + b"{}\n",
    ],
)
def test_a_damaged_sidecar_is_said(tmp_path, change):
    save({"a": torch.ones(3)}, tmp_path / "s", checksums=True)
    path = tmp_path / "s" / CHECKSUMS
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DamagedError) as caught:
        read_checksums(tmp_path / "s")
    assert caught.value.problems[0].code == "checksum.sidecar"


def test_a_rewritten_file_invalidates_its_own_line_only(tmp_path):
    save({"a": torch.ones(3)}, tmp_path / "s", checksums=True)
    lines = (tmp_path / "s" / CHECKSUMS).read_text().splitlines()
    assert len(lines) == 3
    assert [line.split('"')[3] for line in lines[1:]] == [".metadata", "__0_0.distcp"]
