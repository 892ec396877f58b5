"""Loading from DCP: the right bits, only the needed bytes, and every difference before any byte."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.files.dcp_lab import (
    GOLDEN,
    digest,
    edit,
    expected,
    nan_like,
    same,
    some_state,
    stored,
    torch_save,
)
from torchtitan_ckpt.errors import DamagedError, MismatchError, RefusedError
from torchtitan_ckpt.formats import box_reads, dcp_load, folders
from torchtitan_ckpt.formats.box_reads import pieces
from torchtitan_ckpt.formats.dcp import load, read_manifest


@pytest.fixture
def folder(tmp_path):
    return torch_save(some_state(), tmp_path / "step")


def blank(state):
    return {k: nan_like(v) if isinstance(v, torch.Tensor) else None for k, v in state.items()}


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir()))
@pytest.mark.parametrize("threads", [1, 4])
def test_golden_folders_bit_for_bit(name, threads):
    wanted = expected(GOLDEN / name)
    target = {
        key: torch.full(row["shape"], 1).to(getattr(torch, row["dtype"]))
        for key, row in wanted["tensors"].items()
    }
    loaded = load(GOLDEN / name, target | dict.fromkeys(wanted["objects"], 0), threads=threads)
    for key, row in wanted["tensors"].items():
        assert loaded[key] is target[key]
        assert digest(loaded[key]) == row["xxh3_128"], key
    assert {k: repr(loaded[k]) for k in wanted["objects"]} == wanted["objects"]


def test_equals_torch_on_the_same_folder(folder):
    mine, theirs = blank(some_state()), some_state()
    for value in theirs.values():
        if isinstance(value, torch.Tensor):
            value.view(-1).view(torch.uint8).zero_() if value.numel() else None
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(theirs, checkpoint_id=str(folder), planner=planner, no_dist=True)
    mine = load(folder, mine)
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert same(mine[key], value), key
        else:
            assert mine[key] == value


def test_a_part_of_the_keys_leaves_the_rest_alone(folder):
    state = some_state()
    target = nan_like(state["layers.3.w"])
    loaded = load(folder, {"layers.3.w": target, "lr": None})
    assert same(target, state["layers.3.w"])
    assert loaded == {"layers.3.w": target, "lr": 0.1}


def test_targets_of_every_layout(folder):
    state = some_state()
    whole = torch.full((12, 20), 7.0)
    target = {
        "layers.0.w": whole[2:7, 3:10],
        "layers.1.w": torch.empty(7, 6).t(),
        "layers.2.w": torch.nn.Parameter(torch.empty(7, 7)),
        "step": whole[0, 0],
    }
    load(folder, target)
    for key, value in target.items():
        assert same(value.detach().contiguous(), state[key]), key
    assert float(whole[1].sum()) == 7.0 * 20
    assert float(whole[2, :3].sum()) == 21.0


# Strictness


def problems(error):
    return {problem.code: problem for problem in error.value.problems}


def test_all_differences_at_once_and_nothing_touched(folder):
    state = blank(some_state())
    for i in range(10):
        state[f"layers.{i}.w"] = torch.zeros(5, 8)
    state["half"] = torch.zeros(9, 4)
    state["mask"] = 3
    state["lr"] = torch.zeros(())
    state["layers.99.v"] = torch.zeros(1)
    state["stepp"] = torch.zeros(())
    state["count"] = torch.zeros(11, dtype=torch.int64, device="meta")
    before = digest(state["codes"])
    with pytest.raises(MismatchError) as caught:
        load(folder, state)
    found = problems(caught)
    assert set(found) == {"dcp.shape", "dcp.dtype", "dcp.kind", "dcp.missing", "dcp.target"}
    assert "layers.{0..9}.w (10)" in found["dcp.shape"].what
    assert found["dcp.dtype"].expected == "float32 (target)"
    assert found["dcp.dtype"].actual == "bfloat16 (checkpoint)"
    assert digest(state["codes"]) == before
    with pytest.raises(MismatchError) as caught:
        load(folder, {"stepp": torch.zeros(())})
    assert "step" in problems(caught)["dcp.missing"].cause


def test_widening_is_asked_for_and_only_widens(folder):
    state = some_state()
    target = torch.full((9, 4), float("nan"))
    load(folder, {"half": target}, widen=True)
    assert torch.equal(target, state["half"].float())
    wide = torch.full((5, 7), float("nan"), dtype=torch.float64)
    load(folder, {"layers.0.w": wide}, widen=True)
    assert torch.equal(wide, state["layers.0.w"].double())
    for key, dtype in [
        ("layers.0.w", torch.bfloat16),
        ("half", torch.float16),
        ("count", torch.float64),
        ("count", torch.int32),
        ("codes", torch.float32),
        ("mask", torch.uint8),
    ]:
        with pytest.raises(MismatchError) as caught:
            load(folder, {key: torch.zeros(state[key].shape).to(dtype)}, widen=True)
        assert set(problems(caught)) == {"dcp.dtype"}


def test_emptied_storage_is_refused_by_name(folder):
    target = torch.zeros(9, 4, dtype=torch.bfloat16)
    target.untyped_storage().resize_(0)
    with pytest.raises(MismatchError, match="emptied"):
        load(folder, {"half": target})


def test_none_and_absent(tmp_path):
    step = torch_save({"w": torch.ones(2), "max": None, "lr": 1.0}, tmp_path / "s")
    assert load(step, {"max": None, "lr": None, "other": None}) == {
        "max": None,
        "lr": 1.0,
        "other": None,
    }
    healthy = torch.full((3,), 5.0)
    with pytest.raises(MismatchError, match="pickled None") as caught:
        load(step, {"max": healthy})
    assert set(problems(caught)) == {"dcp.missing"}
    assert torch.equal(healthy, torch.full((3,), 5.0))
    with pytest.raises(MismatchError) as caught:
        load(step, {"w": None})
    assert set(problems(caught)) == {"dcp.kind"}


def test_flattened_keys_are_hinted_at(tmp_path):
    dcp.save({"a": [{"x": 1}, {"x": 2}]}, checkpoint_id=tmp_path / "s", no_dist=True)
    with pytest.raises(MismatchError, match=r"as a\.\*"):
        load(tmp_path / "s", {"a": [{}]})


# Only the needed bytes


class Counting:
    """A file that counts what is read of it."""

    def __init__(self, inner) -> None:
        self.inner, self.size = inner, inner.size
        self.reads: list[tuple[int, int]] = []

    def read(self, offset, length):
        self.reads.append((offset, length))
        return self.inner.read(offset, length)

    def read_into(self, offset, target):
        self.reads.append((offset, len(target)))
        self.inner.read_into(offset, target)

    def close(self):
        self.inner.close()


@pytest.fixture
def counted(monkeypatch):
    opened = []

    class Folder(folders._LocalFolder):
        def open(self, relative, **options):
            opened.append(Counting(super().open(relative, **options)))
            return opened[-1]

    monkeypatch.setattr(dcp_load, "open_folder", lambda path: Folder(path))
    return opened


def job_for(manifest, key, offsets, sizes, target):
    from torchtitan_ckpt.formats.dcp_plan import Job

    entry = manifest.tensors[key]
    return Job(key, entry.dtype, entry.shards[0], offsets, sizes, target)


@pytest.mark.parametrize(
    ("offsets", "sizes", "share"),
    [
        ((0, 0), (1500, 700), 1.001),
        ((100, 0), (37, 700), 0.03),
        ((1499, 699), (1, 1), 0.01),
        ((0, 350), (1500, 350), 1.001),
        ((3, 10), (1000, 1), 0.7),
    ],
)
def test_boxes_of_a_large_shard_read_their_rows_only(tmp_path, counted, offsets, sizes, share):
    value = torch.arange(1500 * 700, dtype=torch.float32).reshape(1500, 700)
    step = torch_save({"w": value}, tmp_path / "s")
    manifest = read_manifest(step)
    target = torch.full(sizes, float("nan"))
    loader = dcp_load._Loader(dcp_load.open_folder(step), 2)
    loader.run([job_for(manifest, "w", offsets, sizes, target)])
    box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    assert same(target, value[box].contiguous())
    data = sum(length for file in counted for _, length in file.reads)
    assert data <= share * value.nbytes + 20_000
    assert max(length for file in counted for _, length in file.reads) <= box_reads.WINDOW


def test_small_items_are_read_together(folder, counted):
    state = blank(some_state())
    load(folder, state)
    assert len(counted[0].reads) == 1


def test_large_items_of_every_kind(tmp_path):
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(3_000, 400, generator=generator)
    state = {
        "plain": base,
        "transposed": torch.randn(900, 1100, generator=generator).t(),
        "half": torch.randn(2_000, 600, generator=generator).bfloat16(),
        "flat": torch.arange(700_000),
        "deep": torch.randn(7, 5, 11, 13, 400, generator=generator),
    }
    step = torch_save(state, tmp_path / "s")
    target = blank(state)
    load(step, target)
    for key, value in state.items():
        assert same(target[key], value.contiguous()), key
    strided = {k: torch.zeros(*v.shape, 2, dtype=v.dtype)[..., 0] for k, v in state.items()}
    load(step, strided)
    for key, value in state.items():
        assert same(strided[key].contiguous(), value.contiguous()), key
    wide = {"half": torch.zeros(2_000, 600)}
    load(step, wide, widen=True)
    assert torch.equal(wide["half"], state["half"].float())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pieces_tile_every_box(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    window, gap = box_reads.WINDOW, box_reads.GAP
    box_reads.WINDOW = data.draw(st.integers(8, 400))
    box_reads.GAP = data.draw(st.integers(1, 50))
    try:
        seen = torch.zeros(shape, dtype=torch.int64)
        for at, size in pieces(shape, offsets, sizes, 4):
            seen[tuple(slice(o, o + n) for o, n in zip(at, size, strict=True))] += 1
            assert box_reads._span(shape, at, size)[1] * 4 <= max(box_reads.WINDOW, 4 * shape[-1])
    finally:
        box_reads.WINDOW, box_reads.GAP = window, gap
    wanted = torch.zeros(shape, dtype=torch.int64)
    wanted[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = 1
    assert torch.equal(seen, wanted)


# Items that are not what the metadata says


def replace_item(folder, key, value):
    """Put another archive of the same length where an item lies."""
    manifest = read_manifest(folder)
    shard = manifest.tensors[key].shards[0]
    out = io.BytesIO()
    torch.save(value, out)
    data = out.getvalue()
    assert len(data) <= shard.byte_length
    path = folder / shard.file
    whole = bytearray(path.read_bytes())
    whole[shard.byte_offset : shard.byte_offset + len(data)] = data
    path.write_bytes(whole)
    edit(folder, lambda metadata: setattr(stored(metadata, key), "length", len(data)))


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(7, 5),
        torch.zeros(35),
        torch.zeros(5, 7, dtype=torch.int32),
        torch.zeros(1),
        torch.zeros(7, 5).t(),
        5,
    ],
    ids=["swapped", "flat", "int32", "short", "strided", "object"],
)
def test_an_item_of_another_form(folder, value):
    try:
        replace_item(folder, "layers.3.w", value)
    except AssertionError:
        pytest.skip("longer than the item it replaces")
    target = blank({f"layers.{i}.w": some_state()[f"layers.{i}.w"] for i in range(12)})
    if isinstance(value, torch.Tensor) and value.shape == (5, 7) and value.dtype == torch.float32:
        load(folder, target)
        assert torch.equal(target["layers.3.w"], value)
        return
    with pytest.raises(DamagedError) as caught:
        load(folder, target)
    assert "layers.3.w" in str(caught.value)


def test_an_object_that_runs_code_is_refused(tmp_path):
    import os

    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    step = torch_save({"bad": Runs(), "good": 1}, tmp_path / "s")
    assert load(step, {"good": None}) == {"good": 1}
    with pytest.raises(RefusedError, match=r"posix\.mkdir"):
        load(step, {"bad": None, "good": None})
    assert not (tmp_path / "ran").exists()
    load(step, {"bad": None}, trust=True)
    assert (tmp_path / "ran").exists()


def test_a_file_that_shrinks_while_it_is_read(folder):
    manifest = read_manifest(folder)
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(DamagedError) as caught:
        load(folder, blank(some_state()), manifest=manifest)
    assert {p.code for p in caught.value.problems} == {"file.cut"}


def test_several_damaged_items_are_one_error(folder):
    manifest = read_manifest(folder)
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    for key in ("layers.2.w", "half"):
        shard = manifest.tensors[key].shards[0]
        data[shard.byte_offset + shard.byte_length - 22] ^= 0xFF
    path.write_bytes(data)
    monkey = dcp_load._SMALL
    dcp_load._SMALL = 0  # every item on its own
    try:
        with pytest.raises(DamagedError) as caught:
            load(folder, blank(some_state()))
    finally:
        dcp_load._SMALL = monkey
    text = str(caught.value)
    assert "layers.2.w" in text
    assert "half" in text


def test_fsspec_urls(tmp_path):
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    state = some_state()
    url = f"memory://load-{tmp_path.name}/step-5"
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(
        state, storage_writer=FsspecWriter(url, sync_files=False), planner=planner, no_dist=True
    )
    loaded = load(url, blank(state))
    for key, value in state.items():
        assert same(loaded[key], value) if isinstance(value, torch.Tensor) else loaded[key] == value
