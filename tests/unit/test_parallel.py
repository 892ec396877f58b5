"""Parallel degrees: names, products, all problems at once, coordinates."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from conformance.jobs import small_table
from torchtitan_ckpt.errors import ConfigError
from torchtitan_ckpt.parallel import DENSE_AXES, OPTIONS, SPARSE_AXES, ParallelDegrees
from torchtitan_ckpt.placement import SPLITS, Split, layout_of, layout_problems, stage_of_keys

degree = st.sampled_from([1, 2, 3, 4])


@st.composite
def valid(draw: st.DrawFn) -> ParallelDegrees:
    base = ParallelDegrees(
        dp_replicate=draw(degree), dp_shard=draw(degree), cp=draw(degree), tp=draw(degree),
        pp=draw(degree),
    )  # fmt: skip
    shared = base.fsdp * base.tp
    ep = draw(st.sampled_from([n for n in range(1, shared + 1) if shared % n == 0]))
    etp = base.tp if ep > 1 and base.fsdp % ep == 0 and draw(st.booleans()) else 1
    return ParallelDegrees(
        dp_replicate=base.dp_replicate, dp_shard=base.dp_shard, cp=base.cp, tp=base.tp,
        pp=base.pp, ep=ep, etp=etp,
    )  # fmt: skip


def test_the_guides_option_names() -> None:
    options = dict.fromkeys(OPTIONS, 2)
    options["expert_parallel_degree"] = 4
    degrees = ParallelDegrees.from_options(options)
    assert (degrees.dp_shard, degrees.ep, degrees.etp) == (2, 4, 2)
    assert degrees.options == options


def test_an_unknown_option_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="tensor_paralel_degree") as caught:
        ParallelDegrees.from_options({"tensor_paralel_degree": 2, "rows": 1})
    assert len(caught.value.problems) == 2
    assert "tensor_parallel_degree" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", ParallelDegrees()),
        ("fsdp2 x tp2 x pp2", ParallelDegrees(dp_shard=2, tp=2, pp=2)),
        ("hsdp2x4", ParallelDegrees(dp_replicate=2, dp_shard=4)),
        ("hsdp2x2 x ep2", ParallelDegrees(dp_replicate=2, dp_shard=2, ep=2)),
        ("cp2xfsdp2", ParallelDegrees(cp=2, dp_shard=2)),
        ("fsdp=-1,tp=4", ParallelDegrees(dp_shard=-1, tp=4)),
        ("tensor_parallel_degree 4 expert_parallel_degree=64",
         ParallelDegrees(tp=4, ep=64)),
    ],
)  # fmt: skip
def test_reading_degrees_from_words(text: str, expected: ParallelDegrees) -> None:
    assert ParallelDegrees.parse(text) == expected


@pytest.mark.parametrize("text", ["two", "fsdp", "fsdp2 and 3", "tq2"])
def test_words_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        ParallelDegrees.parse(text)


@settings(deadline=None)
@given(valid())
def test_labels_read_back(degrees: ParallelDegrees) -> None:
    assert ParallelDegrees.parse(degrees.label) == degrees


@settings(deadline=None)
@given(valid())
def test_the_two_meshes_cover_the_same_ranks(degrees: ParallelDegrees) -> None:
    degrees.resolve(degrees.world_size)
    sizes = degrees.sizes
    for axes in (DENSE_AXES, SPARSE_AXES):
        assert math.prod(sizes[axis] for axis in axes) == degrees.world_size
        seen = [
            tuple(degrees.coordinate(rank)[axis] for axis in axes)
            for rank in range(degrees.world_size)
        ]
        assert seen == list(itertools.product(*(range(sizes[axis]) for axis in axes)))
    for stage in range(degrees.pp):
        for rank in degrees.ranks_of_stage(stage):
            assert degrees.coordinate(rank)["pp"] == stage


def test_minus_one_takes_the_rest() -> None:
    degrees = ParallelDegrees(dp_shard=-1, tp=4, pp=2, ep=8)
    assert degrees.resolve(64).dp_shard == 8
    assert degrees.resolve(64).efsdp == 4


@pytest.mark.parametrize(
    ("degrees", "world", "codes"),
    [
        (ParallelDegrees(tp=0, pp=-3), None, ["parallel.degree"] * 2),
        (ParallelDegrees(dp_shard=0), None, ["parallel.degree"]),
        (ParallelDegrees(dp_shard=-1, tp=3), 8, ["parallel.rest"]),
        (ParallelDegrees(dp_shard=-1), None, ["parallel.rest"]),
        (ParallelDegrees(dp_shard=2), 4, ["parallel.product"]),
        (ParallelDegrees(dp_shard=4, tp=4, ep=4, etp=2), 16, ["parallel.etp"]),
        (ParallelDegrees(tp=2, etp=2), 2, ["parallel.etp"]),
        (ParallelDegrees(dp_shard=4, ep=3), 4, ["parallel.experts"]),
        (ParallelDegrees(dp_shard=2, ep=3), 4, ["parallel.product", "parallel.experts"]),
    ],
)
def test_everything_wrong_is_said_at_once(
    degrees: ParallelDegrees, world: int | None, codes: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        degrees.resolve(world)
    found = [problem.code for problem in caught.value.problems]
    assert found == codes


def test_context_parallelism_is_folded_into_fsdp() -> None:
    assert ParallelDegrees(cp=2, dp_shard=3).fsdp == 6


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 60), st.integers(2, 5), st.integers(1, 6), st.integers(0, 5), st.integers(0, 4)
)
def test_boxes_of_strided_shards_are_torchs(
    rows: int, tp: int, fsdp: int, shard: int, part: int
) -> None:
    """The shortcut must agree with torch wherever it is taken, empty parts included."""
    degrees = ParallelDegrees(dp_shard=fsdp, tp=tp)
    layout = layout_of(Split.COLUMN, (rows, 3), degrees)
    if not layout.axes or "fsdp" not in layout.axes:
        return
    at = {"fsdp": shard % fsdp, "tp": part % tp}
    sizes, offsets = _compute_local_shape_and_global_offset(
        (rows, 3), layout.mesh_shape, [at[axis] for axis in layout.axes], layout.placements
    )
    assert layout.box((rows, 3), at) == (tuple(offsets), tuple(sizes))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(2, 5), st.integers(2, 6))
def test_strided_shards_that_round_alike_cover_the_tensor(rows: int, tp: int, fsdp: int) -> None:
    """Either every row lies on exactly one rank and torch says which, or the key is refused."""
    degrees = ParallelDegrees(dp_shard=fsdp, tp=tp)
    layout = layout_of(Split.COLUMN, (rows, 3), degrees)
    everywhere = [degrees.coordinate(rank) for rank in range(degrees.world_size)]
    kept = [layout.kept((rows, 3), at) for at in everywhere]
    held = sorted(row for (o, _), (n, _) in kept for row in range(o, o + n))
    assert held == list(range(rows))
    if not layout_problems("w", Split.COLUMN, (rows, 3), degrees):
        assert [layout.box((rows, 3), at) for at in everywhere] == kept


def test_no_key_is_matched_by_two_patterns() -> None:
    for key in small_table():
        assert sum(bool(re.fullmatch(pattern, key)) for pattern, _ in SPLITS) <= 1


def test_pipeline_stages_take_embedding_first_and_head_last() -> None:
    stages = stage_of_keys(small_table(), 4)
    layers = [stages[f"layers.{n}.attention.q_norm.weight"] for n in range(12)]
    assert stages["tok_embeddings.weight"] == 0
    assert stages["lm_head.weight"] == stages["norm.weight"] == 3
    assert layers == sorted(layers)
    assert [layers.count(stage) for stage in range(4)] == [3, 4, 3, 2]


def test_a_rest_that_does_not_divide_names_the_degrees_in_its_way() -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelDegrees(dp_shard=-1, tp=3).resolve(2)
    assert str(caught.value) == (
        "[parallel.rest] data_parallel_shard_degree -1 has no whole number of ranks to take beside "
        "tensor_parallel_degree 3\n"
        "  expected a number of ranks that 3 divides\n"
        "  actual   2 ranks\n"
        "  fix      start 3 ranks or a multiple of 3, or change tensor_parallel_degree"
    )
    with pytest.raises(ConfigError) as caught:
        ParallelDegrees(dp_shard=-1, dp_replicate=2, pp=5).resolve(16)
    assert caught.value.problems[0].fix == (
        "start 10 ranks or a multiple of 10, or change data_parallel_replicate_degree or "
        "pipeline_parallel_degree"
    )
