"""Planning without the hardware: DCP's own planners, the shortcut, sizes, coverage, speed."""

from __future__ import annotations

import io
import math
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from conformance.degrees import CASES, Case
from conformance.jobs import small_table
from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.parallel import ParallelDegrees
from torchtitan_ckpt.plan.dcp import plan_reads_with_dcp, plan_with_dcp
from torchtitan_ckpt.plan.items import object_item_bytes, tensor_item_bytes
from torchtitan_ckpt.plan.read import plan_reads
from torchtitan_ckpt.plan.state import Entry, full_entries, layout_faults
from torchtitan_ckpt.plan.write import Written, plan_writes


def native() -> dict[str, TensorEntry]:
    return {k: TensorEntry(k, leaf.shape, leaf.dtype) for k, leaf in small_table().items()}


def given_out(plan: Written) -> list[set[tuple[str, tuple[int, ...]]]]:
    """For each rank the (key, offset) of what it writes."""
    out: list[set[tuple[str, tuple[int, ...]]]] = [set() for _ in plan.writers]
    for entry, kind, owners in zip(plan.entries, plan.kinds, plan.owners, strict=True):
        for (offsets, _), owner in zip(kind.boxes, owners, strict=True):
            out[owner].add((entry.key, offsets if entry.is_tensor else ()))
    return out


LARGER = (
    Case(ParallelDegrees.parse("hsdp2x4 x tp2 x ep4")),
    Case(ParallelDegrees.parse("fsdp4 x tp2 x pp2 x ep2"), chunks=2),
    Case(ParallelDegrees.parse("fsdp12 x cp2")),
)


@pytest.mark.parametrize(
    ("case", "lowest"),
    [*((case, False) for case in (*CASES, *LARGER)), (CASES[-1], True)],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_the_shortcut_is_dcps_plan(case: Case, lowest: bool) -> None:
    entries = full_entries(native(), case.degrees, chunks=case.chunks)
    plan = plan_writes(entries, case.degrees, lowest_rank=lowest)
    real = plan_with_dcp(entries, case.degrees, lowest_rank=lowest)
    assert not plan.problems
    expected = [
        {(item.index.fqn, tuple(item.index.offset or ())) for item in p.items} for p in real.plans
    ]
    assert given_out(plan) == expected
    for writer, dcp in zip(plan.writers, real.plans, strict=True):
        chunks = [item.tensor_data for item in dcp.items if item.tensor_data is not None]
        payload = sum(
            math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in chunks
        )
        assert (writer.items, writer.payload) == (len(dcp.items), payload)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 7, 64, 255, 256, 300]), max_size=5),
    st.sampled_from(["float32", "bfloat16", "float64", "int64", "bool", "uint8", "float8_e4m3fn"]),
)
def test_the_size_of_a_stored_tensor(shape: list[int], dtype: str) -> None:
    if math.prod(shape) > 10**6:
        shape = shape[:2]
    value = torch.zeros(shape, dtype=getattr(torch, dtype))
    buffer = io.BytesIO()
    torch.save(value, buffer)
    assert tensor_item_bytes(tuple(shape), dtype) == buffer.tell()


@pytest.mark.slow
def test_the_size_of_a_stored_tensor_beyond_4_gib() -> None:
    with tempfile.TemporaryFile() as file:
        torch.save(torch.zeros(2**32 + 3, dtype=torch.uint8), file)
        assert tensor_item_bytes((2**32 + 3,), "uint8") == file.tell()


def test_the_size_of_a_stored_object() -> None:
    buffer = io.BytesIO()
    torch.save({"a": (1, 2.5)}, buffer)
    assert object_item_bytes({"a": (1, 2.5)}) == buffer.tell()


def test_elements_that_no_rank_writes_are_found() -> None:
    degrees = ParallelDegrees(dp_shard=2)
    entries = full_entries(native(), degrees, optimizer=False)
    plan = plan_writes(entries, degrees)
    plan.kinds[0].boxes[1] = ((19, 0), (18, 24))
    from torchtitan_ckpt.plan.write import coverage_problems

    (problem,) = coverage_problems(plan)
    assert "24 elements that no rank writes" in problem.what
    assert "tok_embeddings.weight" in problem.what
    plan.kinds[0].boxes[1] = ((18, 0), (19, 24))
    assert "written twice" in coverage_problems(plan)[0].what


def test_what_torch_refuses_is_said_with_the_key() -> None:
    table = native() | {"layers.0.attention.wq.weight": TensorEntry("q", (17, 4), "float32")}
    codes = {p.code: p for p in layout_faults(table, ParallelDegrees(dp_shard=4, tp=2))}
    assert "layers.0.attention.wq.weight" in codes["parallel.strided-uneven"].what
    codes = {p.code: p for p in layout_faults(table, ParallelDegrees(dp_shard=16))}
    assert "layers.{10..11}.moe" in codes["parallel.uneven-dim"].what
    codes = {p.code: p for p in layout_faults(table, ParallelDegrees(dp_shard=8, ep=8))}
    assert "layers.11.moe" in codes["parallel.experts-uneven"].what


def test_stages_without_a_layer_are_refused() -> None:
    """12 layers, the embedding and the head: 14 stages hold something, a fifteenth would not."""
    assert not layout_faults(native(), ParallelDegrees(pp=7), chunks=2)
    for degrees, chunks in ((ParallelDegrees(pp=15), 1), (ParallelDegrees(pp=8), 2)):
        (problem,) = layout_faults(native(), degrees, chunks=chunks)
        assert problem.code == "parallel.empty-stage"
        assert "at most 14 stages" in problem.expected
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.AdamW([])


def test_a_rank_without_rows_under_fsdp_and_tensor_parallelism_is_refused() -> None:
    table = {"layers.0.attention.wq.weight": TensorEntry("q", (9, 4), "float32")}
    (problem,) = layout_faults(table, ParallelDegrees(dp_shard=2, tp=4))
    assert problem.code == "parallel.empty-part"
    assert "layers.0.attention.wq.weight" in problem.what
    assert not layout_faults(table, ParallelDegrees(tp=4))


def test_an_object_weighs_one_and_a_plain_tensor_goes_to_the_idlest() -> None:
    """The rule that the shortcut replays, on a case small enough to do by hand."""
    from torchtitan_ckpt.plan.state import PLAIN

    degrees = ParallelDegrees(dp_shard=2)
    entries = [
        Entry("a", (), "", PLAIN, nbytes=500),
        Entry("b", (3,), "float32", PLAIN),
        Entry("c", (2,), "float32", PLAIN),
        Entry("d", (), "", PLAIN, nbytes=500),
    ]
    assert plan_writes(entries, degrees).owners == [[0], [1], [0], [0]]


PAIRS = [(CASES[n], CASES[(n + 5) % len(CASES)]) for n in range(len(CASES))]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda c: c.name)
def test_planned_reads_are_dcps(source: Case, target: Case) -> None:
    saved = full_entries(native(), source.degrees, chunks=source.chunks)
    wanted = full_entries(native(), target.degrees, chunks=target.chunks)
    plan = plan_reads(plan_writes(saved, source.degrees), wanted, target.degrees)
    assert not plan.problems
    metadata = plan_with_dcp(saved, source.degrees).metadata
    real = plan_reads_with_dcp(metadata, wanted, target.degrees)
    sizes = {
        k: v.properties.dtype.itemsize
        for k, v in metadata.state_dict_metadata.items()
        if isinstance(v, TensorStorageMetadata)
    }
    for reader, dcp in zip(plan.readers, real, strict=True):
        tensors = [i for i in dcp.items if i.type is LoadItemType.TENSOR]
        needed = sum(math.prod(i.lengths) * sizes[i.dest_index.fqn] for i in tensors)
        objects = sum(e.nbytes for e in wanted if _reads(e, reader.rank, target.degrees, saved))
        assert reader.needed == needed + objects
        full = [i for i in tensors if math.prod(i.lengths)]
        assert reader.parts == len(full) + len(dcp.items) - len(tensors)


def _reads(entry: Entry, rank: int, degrees: ParallelDegrees, saved: list[Entry]) -> bool:
    if entry.is_tensor or entry.key not in {e.key for e in saved}:
        return False
    if entry.ranks is not None:
        return rank in entry.ranks
    return entry.stage in (None, degrees.coordinate(rank)["pp"])


def test_a_rank_reads_only_the_files_that_hold_its_rows() -> None:
    degrees = ParallelDegrees(dp_shard=8)
    table = {"tok_embeddings.weight": TensorEntry("w", (64, 3), "float32")}
    entries = full_entries(table, degrees, optimizer=False)
    half = ParallelDegrees(dp_shard=2)
    plan = plan_reads(
        plan_writes(entries, degrees), full_entries(table, half, optimizer=False), half
    )
    assert plan.reads_from.tolist() == [[True] * 4 + [False] * 4, [False] * 4 + [True] * 4]
    assert [(r.needed, r.parts, r.files) for r in plan.readers] == [(384, 4, 4)] * 2


def test_amplification_of_a_slice_out_of_large_chunks() -> None:
    """One writer, many readers of its columns: DCP fetches the whole item each time."""
    one, eight = ParallelDegrees(), ParallelDegrees(tp=8)
    table = {"layers.0.feed_forward.w2.weight": TensorEntry("w", (4096, 8192), "float32")}
    written = plan_writes(full_entries(table, one, optimizer=False), one)
    plan = plan_reads(written, full_entries(table, eight, optimizer=False), eight)
    whole = 4096 * 8192 * 4
    for reader in plan.readers:
        assert reader.needed == whole // 8
        assert whole < reader.by_dcp < whole + 4096
        assert reader.needed <= reader.by_ours <= whole + 2 * 4096


def test_keys_that_the_planned_checkpoint_lacks_are_named() -> None:
    degrees = ParallelDegrees(dp_shard=2)
    entries = full_entries(native(), degrees)
    written = plan_writes([e for e in entries if "wo" not in e.key], degrees)
    (problem,) = plan_reads(written, entries, degrees).problems
    assert problem.code == "plan.missing"
    assert "layers.{0..11}.attention.wo.weight (12)" in problem.what
