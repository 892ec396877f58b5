"""`diff` of many small tensors: whole stretches of both files at once, and the same verdicts."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import save_file

from tests.files.dcp_lab import GOLDEN, edit
from torchtitan_ckpt.diff import Options, bulk, diff
from torchtitan_ckpt.diff.pairs import Side, align
from torchtitan_ckpt.errors import DamagedError
from torchtitan_ckpt.formats import dcp, read_manifest
from torchtitan_ckpt.formats.dcp_stream_read import DcpReader
from torchtitan_ckpt.formats.hf_reader import HfReader

COUNT = 300


def state():
    out = {f"layers.{i}.w": torch.arange(33 * 7.0).reshape(33, 7) + i for i in range(COUNT)}
    return out | {"wide": torch.arange(200_000.0), "empty": torch.empty(0, 3), "n": torch.tensor(3)}


def write(kind, path, values):
    if kind == "dcp":
        dcp.save(values, path, sync_files=False)
    else:
        path.mkdir()
        save_file(values, path / "model.safetensors")
    return str(path)


def compare(a, b):
    return diff(Options(a=a, b=b, threads=2))


@pytest.mark.parametrize("kind", ["dcp", "hf"])
def test_equal_ones_are_not_read_one_by_one(kind, tmp_path, monkeypatch):
    """Two saves: of DCP, the ids in their archives differ."""
    a, b = (write(kind, tmp_path / name, state()) for name in "ab")
    reader = DcpReader if kind == "dcp" else HfReader
    old, asked = reader.fill, set()

    def fill(self, key, offsets, out):
        asked.add(key)
        return old(self, key, offsets, out)

    monkeypatch.setattr(reader, "fill", fill)
    found = compare(a, b)
    assert asked == {"wide"}
    assert found.count("equal") == found.compared == COUNT + 3
    layers = next(group for group in found.groups if group.name.startswith("layers"))
    assert (layers.count, layers.elements) == (COUNT, COUNT * 33 * 7)
    nbytes = sum(t.nbytes for t in state().values())
    assert found.bytes_read == 2 * nbytes


@pytest.mark.parametrize("kind", ["dcp", "hf"])
def test_one_bit_among_many(kind, tmp_path):
    a = write(kind, tmp_path / "a", state())
    changed = state()
    changed["layers.151.w"].view(torch.int32)[17, 3] ^= 1
    b = write(kind, tmp_path / "b", changed)
    found = compare(a, b)
    assert found.count("equal") == COUNT + 2
    (group,) = [g for g in found.groups if g.verdict != "equal"]
    assert group.keys == ("layers.151.w",)
    assert group.first[1].at == (17, 3)
    assert group.differing == 1


def test_another_order_in_the_file(tmp_path):
    a = write("dcp", tmp_path / "a", state())
    b = write("dcp", tmp_path / "b", dict(reversed(state().items())))
    assert compare(a, b).count("equal") == COUNT + 3


def test_the_same_bytes_under_another_dtype_are_no_equal_tensors(tmp_path):
    a = write("hf", tmp_path / "a", state())
    ints = {k: v.view(torch.int32) if v.is_floating_point() else v for k, v in state().items()}
    b = write("hf", tmp_path / "b", ints)
    found = compare(a, b)
    assert found.count("equal") == 1  # n
    assert found.count("different") == COUNT + 1  # other values; `empty` has none
    assert found.count("dtype") == 1


def equal_keys(a, b):
    sides = [DcpReader(path) for path in (a, b)]
    pairs = align(
        *(Side(s.manifest.path, "dcp", s, tuple(s.manifest.tensors)) for s in sides)
    ).pairs
    return {pair.key for pair in bulk.equal_pairs(pairs, sides[1].manifest, 1)}


def test_every_shard_of_a_tensor_counts(tmp_path):
    a, b = GOLDEN / "torch-2.13-4ranks", tmp_path / "b"
    shutil.copytree(a, b)
    assert equal_keys(a, b) == set(read_manifest(a).tensors)
    last = read_manifest(b).tensors["rows"].shards[-1]
    values = DcpReader(b).read("rows", last.offsets, last.sizes).numpy().tobytes()
    data = bytearray((b / last.file).read_bytes())
    data[data.index(values, last.byte_offset)] ^= 0xFF
    (b / last.file).write_bytes(data)
    assert equal_keys(a, b) == set(read_manifest(a).tensors) - {"rows"}


def test_the_same_bytes_at_other_places_are_no_equal_tensor(tmp_path):
    a, b = GOLDEN / "torch-2.13-4ranks", tmp_path / "b"
    shutil.copytree(a, b)

    def exchange(metadata):
        """Two shards of one size change places, in the list of shards too."""
        chunks = metadata.state_dict_metadata["rows"].chunks
        first = chunks[0]
        second = next(c for c in chunks[1:] if c.sizes == first.sizes)
        one, two = (
            next(i for i in metadata.storage_data if (i.fqn, i.offset) == ("rows", c.offsets))
            for c in (first, second)
        )
        stored = metadata.storage_data
        stored[one], stored[two] = stored[two], stored[one]
        at, other = chunks.index(first), chunks.index(second)
        chunks[at], chunks[other] = second, first

    edit(b, exchange)
    assert equal_keys(a, b) == set(read_manifest(a).tensors) - {"rows"}
    assert compare(str(a), str(b)).count("different") == 1


def test_dcps_of_two_serializations_are_equal_where_both_have_a_tensor():
    found = compare(str(GOLDEN / "torch-2.13.0-safetensors"), str(GOLDEN / "torch-2.8.0-2ranks"))
    assert found.count("equal") == found.compared > 20
    assert (found.only_a, found.only_b) == ([], ["transposed"])
    assert equal_keys(*[GOLDEN / "torch-2.13.0-safetensors"] * 2) >= {"rows", "columns", "mask"}


def test_items_of_another_dtype_than_their_metadata_are_not_taken_for_equal(tmp_path):
    """The payload's bytes are those of the other side; what they are is said by the archive."""
    values = {"w": torch.arange(6.0).reshape(2, 3), "x": torch.ones(5)}
    a = write("dcp", tmp_path / "a", values)
    b = write("dcp", tmp_path / "b", values | {"w": values["w"].view(torch.int32)})

    def lie(metadata):
        metadata.state_dict_metadata["w"].properties.dtype = torch.float32

    edit(tmp_path / "b", lie)
    assert equal_keys(a, b) == {"x"}
    with pytest.raises(DamagedError) as caught:
        compare(a, b)
    assert caught.value.problems[0].code == "dcp.item-differs"


def test_a_damaged_item_is_told(tmp_path):
    a = write("dcp", tmp_path / "a", state())
    shutil.copytree(a, tmp_path / "b")
    shard = read_manifest(a).tensors["layers.7.w"].shards[0]
    path = tmp_path / "b" / shard.file
    data = bytearray(path.read_bytes())
    data[shard.byte_offset + shard.byte_length // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError) as caught:
        compare(a, str(tmp_path / "b"))
    assert caught.value.problems[0].code == "dcp.checksum"
