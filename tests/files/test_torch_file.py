"""`.pt` files: described without their data, loaded by ranges, written so that torch reads them."""

from __future__ import annotations

import collections
import io
import os
import zipfile

import pytest
import torch

from tests.files.dcp_lab import nan_like, same
from torchtitan_ckpt.errors import (
    CheckpointError,
    DamagedError,
    MismatchError,
    NotFoundError,
    RefusedError,
    SaveError,
)
from torchtitan_ckpt.formats import torch_file
from torchtitan_ckpt.formats.torch_file import TorchFileWriter, load, read_manifest

TENSORS = {
    "a": torch.arange(15.0).reshape(3, 5),
    "long": torch.arange(7),
    "zero_d": torch.tensor(2.5, dtype=torch.bfloat16),
    "fp8": torch.arange(24, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(4, 6),
    "e8m0": torch.arange(6, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "mask": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
    "u16": torch.tensor([1, 2, 65535], dtype=torch.uint16),
    "complex": torch.arange(3.0).to(torch.complex64) * 1j,
    "large": torch.arange(600_000).reshape(600, 1000).float(),
}


def blank(state):
    return {k: nan_like(v) if isinstance(v, torch.Tensor) else 0 for k, v in state.items()}


def assert_equal(loaded, state):
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert same(loaded[key], value.contiguous()), key
        else:
            assert loaded[key] == value, key


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "m.pt"
    with TorchFileWriter(path) as out:
        for key, value in TENSORS.items():
            out.add(key, value)
        out.alias("tied", of="a")
        out.value("step", 7)
        out.value("nested", {"betas": (0.9, 0.95), "moments": [torch.ones(2), None]})
    return path


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"map_location": "cpu"}])
def test_torch_reads_what_is_written(written, options):
    loaded = torch.load(written, weights_only=True, **options)
    assert_equal(loaded, TENSORS)
    assert loaded["tied"].data_ptr() == loaded["a"].data_ptr()
    assert loaded["step"] == 7
    assert torch.equal(loaded["nested"]["moments"][0], torch.ones(2))


def test_it_is_a_sound_zip_with_aligned_storages(written):
    with zipfile.ZipFile(written) as archive:
        assert archive.testzip() is None
    for entry in read_manifest(written).tensors.values():
        assert all(shard.byte_offset % 64 == 0 for shard in entry.shards)


def test_it_is_read_back(written):
    state = TENSORS | {"tied": TENSORS["a"], "step": 7, "nested.moments.0": torch.ones(2)}
    assert_equal(load(written, blank(state)), state)


def test_pieces_make_the_same_file_as_whole_tensors(tmp_path):
    value = torch.arange(3000.0).reshape(30, 100)
    with TorchFileWriter(tmp_path / "a.pt") as out:
        out.add("w", value)
    with TorchFileWriter(tmp_path / "b.pt") as out, out.tensor("w", (30, 100), "float32") as sink:
        for row in value:
            sink(row.numpy().tobytes())
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_it_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "m.pt"
    path.write_bytes(b"old")

    def stopped():
        with TorchFileWriter(path) as out:
            out.add("a", torch.ones(3))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stopped()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["m.pt"]


@pytest.mark.parametrize("count", [0, 11, 13, 24])
def test_missing_and_spare_bytes_are_refused(tmp_path, count):
    with (
        pytest.raises(SaveError) as caught,
        TorchFileWriter(tmp_path / "m.pt") as out,
        out.tensor("w", (3,), "float32") as sink,
    ):
        sink(bytes(count))
    assert caught.value.problems[0].code == "torch.bytes"
    assert os.listdir(tmp_path) == []


def test_a_key_twice_and_a_missing_folder(tmp_path):
    with TorchFileWriter(tmp_path / "m.pt") as out:
        out.add("a", torch.ones(1))
        with pytest.raises(SaveError):
            out.add("a", torch.ones(1))
    with pytest.raises(SaveError):
        TorchFileWriter(tmp_path / "none" / "m.pt")


def test_sizes_beyond_32_bits(tmp_path, monkeypatch):
    """The wide form of headers, forced on a small file by lowering where it starts."""
    import torchtitan_ckpt.formats.torch_file_write as module

    monkeypatch.setattr(module, "_WIDE", 1000)
    with TorchFileWriter(tmp_path / "m.pt") as out:
        out.add("a", TENSORS["a"])
        out.add("large", TENSORS["large"])
        out.add("after", TENSORS["long"])
    state = {"a": TENSORS["a"], "large": TENSORS["large"], "after": TENSORS["long"]}
    for options in ({}, {"mmap": True}):
        assert_equal(torch.load(tmp_path / "m.pt", weights_only=True, **options), state)
    assert_equal(load(tmp_path / "m.pt", blank(state)), state)
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert archive.testzip() is None


# What torch.save writes


def test_nested_and_strided_and_shared(tmp_path):
    base = torch.arange(40.0)
    value = {
        "model": {"w": base.reshape(8, 5).t(), "v": base[10:20], "n": {"x": torch.ones(2)}},
        "list": [torch.zeros(3), {"b": 1}],
        "steps": 5,
        "absent": None,
        "lr": {"last": 0.5},
    }
    path = tmp_path / "m.pt"
    torch.save(value, path)
    manifest = read_manifest(path)
    assert set(manifest.tensors) == {"model.w", "model.v", "model.n.x", "list.0"}
    assert set(manifest.objects) == {"steps", "lr", "list.1"}
    assert manifest.info == {"strided": "model.w", "none_keys": "absent"}
    state = {"model.w": value["model"]["w"], "model.v": base[10:20], "steps": 5}
    assert_equal(load(path, blank(state)), state)


def test_a_module_state_dict_with_parameters(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    state = dict(model.state_dict())
    assert_equal(load(tmp_path / "m.pt", blank(state)), state)
    torch.save(collections.OrderedDict(model.named_parameters()), tmp_path / "p.pt")
    assert set(read_manifest(tmp_path / "p.pt").tensors) == {n for n, _ in model.named_parameters()}


def test_the_manifest_reads_no_data(tmp_path, monkeypatch):
    torch.save({"w": torch.zeros(1_000_000)}, tmp_path / "m.pt")
    read = []
    original = torch_file.OpenedFile._read
    monkeypatch.setattr(
        torch_file.OpenedFile, "_read", lambda s, o, n: (read.append(n), original(s, o, n))[1]
    )
    read_manifest(tmp_path / "m.pt")
    assert sum(read) < 20_000


def test_mismatches_are_one_error(tmp_path):
    torch.save({"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": 1}, tmp_path / "m.pt")
    with pytest.raises(MismatchError) as caught:
        load(tmp_path / "m.pt", {"a": torch.zeros(4), "b": 1, "d": torch.zeros(1)})
    assert {p.code for p in caught.value.problems} == {"dcp.shape", "dcp.kind", "dcp.missing"}


# Bad input


@pytest.mark.parametrize(
    ("data", "kind", "code"),
    [
        (b"", DamagedError, "torch.empty"),
        (b"hello", DamagedError, "torch.not-an-archive"),
        (b"PK\x03\x04" + bytes(100), DamagedError, "zip.damaged"),
    ],
)
def test_files_that_are_none(tmp_path, data, kind, code):
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.raises(kind) as caught:
        read_manifest(tmp_path / "m.pt")
    assert caught.value.problems[0].code == code


def test_missing_old_compressed_and_not_a_dict(tmp_path):
    with pytest.raises(NotFoundError):
        read_manifest(tmp_path / "none.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(RefusedError) as caught:
        read_manifest(tmp_path / "old.pt")
    assert caught.value.problems[0].code == "torch.old-format"
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(RefusedError) as caught:
        read_manifest(tmp_path / "list.pt")
    assert caught.value.problems[0].code == "torch.no-dict"
    torch.save({"a": torch.ones(100)}, tmp_path / "good.pt")
    with (
        zipfile.ZipFile(tmp_path / "good.pt") as source,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(RefusedError) as caught:
        read_manifest(tmp_path / "packed.pt")
    assert caught.value.problems[0].code == "zip.refused"


def test_code_does_not_run(tmp_path):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"a": torch.ones(1), "b": Runs()}, tmp_path / "m.pt")
    with pytest.raises(RefusedError, match=r"posix\.mkdir"):
        read_manifest(tmp_path / "m.pt")
    assert not (tmp_path / "ran").exists()


def rebuilt(change) -> bytes:
    """An archive of one tensor with one entry changed, through Python's own zip writer."""
    out, new = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.arange(12.0)}, out)
    with zipfile.ZipFile(out) as source, zipfile.ZipFile(new, "w") as target:
        for name in source.namelist():
            data = change(name, source.read(name))
            if data is not None:
                target.writestr(zipfile.ZipInfo(name), data)
    return new.getvalue()


@pytest.mark.parametrize(
    "change",
    [
        lambda n, d: d[:-4] if n.endswith("data/0") else d,
        lambda n, d: None if n.endswith("data/0") else d,
        lambda n, d: None if n.endswith("data.pkl") else d,
        lambda n, d: d.replace(b"K\x0c", b"K\xff") if n.endswith("data.pkl") else d,
        lambda n, d: d.replace(b"K\x0c\x85", b"K\x0d\x85") if n.endswith("data.pkl") else d,
        lambda n, d: b"big" if n.endswith("byteorder") else d,
    ],
    ids=["short", "no-storage", "no-pickle", "numel", "reaches-out", "big-endian"],
)
def test_archives_that_lie(tmp_path, change):
    (tmp_path / "m.pt").write_bytes(rebuilt(change))
    with pytest.raises(CheckpointError):
        load(tmp_path / "m.pt", {"a": torch.zeros(12)})


def test_an_archive_rebuilt_unchanged_is_read(tmp_path):
    (tmp_path / "m.pt").write_bytes(rebuilt(lambda n, d: d))
    target = torch.zeros(12)
    load(tmp_path / "m.pt", {"a": target})
    assert torch.equal(target, torch.arange(12.0))


def test_an_entry_twice_is_refused(tmp_path):
    out = io.BytesIO()
    torch.save({"a": torch.arange(12.0)}, out)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(out, "a") as target:
        target.writestr("archive/data/0", bytes(48))
    (tmp_path / "m.pt").write_bytes(out.getvalue())
    with pytest.raises(DamagedError):
        read_manifest(tmp_path / "m.pt")
