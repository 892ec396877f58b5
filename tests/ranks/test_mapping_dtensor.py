"""Rules on DTensors: bitwise as on whole tensors, for every placement; placements come back."""

from __future__ import annotations

import itertools

import mapping_cases as cases
import pytest

from conformance.ranks import RankPool

TWO = [name for name in cases.RULES if len(next(iter(cases.RULES[name][1].values()))) == 2]
THREE = [name for name in cases.RULES if name not in TWO]


@pytest.mark.parametrize("mesh", [(2,), (4,)], ids=str)
def test_every_placement_on_one_mesh_dim(pool: RankPool, mesh: tuple[int, ...]) -> None:
    for result in pool.run(cases.check, mesh[0], mesh, TWO + THREE):
        assert result["cells"] == 3 * len(TWO) + 4 * len(THREE)
        assert result["wrong"] == []


@pytest.mark.parametrize("names", [TWO, ["unstack", "w13"]], ids=["matrices", "experts"])
def test_every_placement_on_two_mesh_dims(pool: RankPool, names: list[str]) -> None:
    for result in pool.run(cases.check, 4, (2, 2), names):
        assert result["cells"] >= 9
        assert result["wrong"] == []


@pytest.mark.slow
def test_every_rule_on_two_mesh_dims(pool: RankPool) -> None:
    for result in pool.run(cases.check, 4, (2, 2), THREE):
        assert result["wrong"] == []


@pytest.mark.parametrize(("inner", "outer"), list(itertools.product((0, 1), (0, 1))))
def test_fsdp_over_an_inner_sharding(pool: RankPool, inner: int, outer: int) -> None:
    names = ["rope", "rope-many", "interleaved", "unstack", "w13", "w13-native", "transpose"]
    for result in pool.run(cases.check_fsdp, 4, "tp", inner, outer, names):
        assert result["wrong"] == []
        assert len(result["placements"]) == 1
        assert ("_StridedShard" in result["placements"][0]) == (inner == outer)


def test_experts_on_ep_ranks_cost_no_rank_more_than_its_share(pool: RankPool) -> None:
    for result in pool.run(cases.check_share, 4):
        assert result["held"] == result["native"]
        assert result["placements"] == ["(Shard(dim=0),)"]
