"""Rules on DTensors: bitwise as on whole tensors, for every placement; placements come back."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conformance.ranks import RankPool
from tests.ranks import mapping_cases as cases
from torchtitan_ckpt.adapter import MappingAdapter

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


MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 20,
    "intermediate_size": 28,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_experts": 12,
    "mlp_only_layers": [0],
    "vocab_size": 37,
}


def test_each_rank_reads_its_own_bytes_and_no_more(pool: RankPool, tmp_path: Path) -> None:
    adapter = MappingAdapter(MOE)
    native = {
        key: cases.value(entry.shape, 7 * number) * (not key.endswith("expert_bias_E"))
        for number, (key, entry) in enumerate(adapter.native_entries().items())
    }
    hf = {key: tensor.contiguous() for key, tensor in adapter.to_hf(native).items()}
    save_file(hf, tmp_path / "model.safetensors")
    for result in pool.run(cases.check_load, 4, str(tmp_path), MOE):
        assert result["read"] == result["held"]
        for key, tensor in native.items():
            assert torch.equal(torch.from_numpy(result["values"][key]), tensor), key
