"""Rules, data, progress and first weights of the reference job."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchtitan_ckpt.config import CheckpointConfig
from torchtitan_ckpt.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    MismatchError,
    NotFoundError,
)
from torchtitan_ckpt.train import registry, trainer
from torchtitan_ckpt.train.build import build_parts, make_lr_scheduler, make_optimizer
from torchtitan_ckpt.train.config import (
    JobConfig,
    LRSchedulerConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan_ckpt.train.data import SyntheticDataLoader
from torchtitan_ckpt.train.models.config import from_hf_config, read_hf_config
from torchtitan_ckpt.train.models.qwen3 import Qwen3Model, init_weights
from torchtitan_ckpt.train.pipeline import stretches
from torchtitan_ckpt.train.progress import TrainState
from torchtitan_ckpt.train.rules import check_job
from torchtitan_ckpt.train.world import Place, World

ALONE = World(Place(0, 0, 1), torch.device("cpu"))


def codes(job: JobConfig, world_size: int) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_job(job, world_size)
    return [problem.code for problem in caught.value.problems]


def split(job: JobConfig, **degrees: int) -> JobConfig:
    return replace(job, parallelism=ParallelismConfig(**degrees))


# --- rules


def test_the_sharding_degree_takes_the_ranks_that_are_left() -> None:
    job = split(registry.qwen3_debug(), tensor_parallel_degree=2)
    assert check_job(job, 8).dp_shard == 4
    assert check_job(registry.qwen3_debug(), 1).world_size == 1


@pytest.mark.parametrize(
    ("job", "world", "code"),
    [
        (split(registry.qwen3_debug(), tensor_parallel_degree=3), 3, "train.tensor-degree"),
        (split(registry.qwen3_debug(), tensor_parallel_degree=2), 3, "parallel.rest"),
        (split(registry.qwen3_debug(), data_parallel_shard_degree=2), 4, "parallel.product"),
        (split(registry.qwen3_debug(), context_parallel_degree=2), 2, "train.no-context-parallel"),
        (split(registry.qwen3_debug(), expert_parallel_degree=2), 2, "train.expert-degree"),
        (split(registry.qwen3_moe_debug(), expert_parallel_degree=5), 5, "train.expert-degree"),
        (split(registry.qwen3_moe_debug(), pipeline_parallel_degree=4), 4, "train.pipeline-degree"),
        (split(registry.qwen3_tied_debug(), pipeline_parallel_degree=2), 2, "train.pipeline-tied"),
        (split(registry.qwen3_debug(), tensor_parallel_degree=0), 1, "parallel.degree"),
        (replace(registry.qwen3_debug(), training=TrainingConfig(steps=0)), 1, "train.value"),
        (replace(registry.qwen3_debug(), training=TrainingConfig(dropout=1.0)), 1, "train.value"),
        (
            replace(
                registry.qwen3_debug(), checkpoint=CheckpointConfig(enable=True, keep_latest_k=1)
            ),
            1,
            "config.value",
        ),
    ],
)
def test_what_no_job_can_have(job: JobConfig, world: int, code: str) -> None:
    assert code in codes(job, world)


def test_everything_wrong_is_said_at_once() -> None:
    job = replace(
        split(registry.qwen3_debug(), context_parallel_degree=2, tensor_parallel_degree=0),
        training=TrainingConfig(steps=0, seq_len=0),
        checkpoint=CheckpointConfig(enable=True, interval=0),
    )
    assert codes(job, 2) == [
        "train.value",
        "train.value",
        "train.no-context-parallel",
        "config.value",
        "parallel.degree",
    ]


def test_a_seed_is_made_by_one_process_unsplit() -> None:
    seed = CheckpointConfig(enable=True, create_seed_checkpoint=True)
    job = replace(registry.qwen3_debug(), checkpoint=seed)
    assert check_job(job, 1).world_size == 1
    assert codes(job, 2) == ["train.seed-world"]
    assert codes(split(job, tensor_parallel_degree=2), 2) == [
        "train.seed-world",
        "train.seed-degrees",
    ]
    with pytest.raises(ConfigError, match=r"--parallelism\.expert_parallel_degree 1"):
        check_job(split(job, expert_parallel_degree=2), 1)
    off = replace(job, checkpoint=replace(seed, enable=False))
    assert codes(off, 1) == ["train.seed-disabled"]


# --- the model's description


def test_a_config_json_survives_the_round_trip() -> None:
    for model in (registry.DENSE, registry.TIED, registry.MOE):
        assert from_hf_config(json.loads(json.dumps(model.to_hf()))) == model


def test_what_these_models_do_not_compute_is_refused_at_once() -> None:
    config = registry.DENSE.to_hf() | {
        "model_type": "llama",
        "attention_bias": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "hidden_size": None,
    }
    with pytest.raises(ConfigError) as caught:
        from_hf_config(config)
    text = str(caught.value)
    for word in ("model_type='llama'", "attention_bias=True", "rope_scaling", "hidden_size=None"):
        assert word in text


def test_a_missing_or_broken_config_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json"):
        read_hf_config(tmp_path)
    for text in ("{", "[]", ""):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(DamagedError, match=r"config\.json"):
            read_hf_config(tmp_path)


def test_sizes_that_make_no_model_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        replace(registry.MOE, head_dim=7, num_key_value_heads=3, num_experts_per_tok=13)
    assert len(caught.value.problems) == 3


# --- weights


def test_names_are_torchtitan_s() -> None:
    with torch.device("meta"):
        keys = set(Qwen3Model(registry.MOE).state_dict())
    assert {
        "tok_embeddings.weight",
        "norm.weight",
        "lm_head.weight",
        "layers.0.attention_norm.weight",
        "layers.0.attention.qkv_linear.wq.weight",
        "layers.0.attention.q_norm.weight",
        "layers.0.attention.wo.weight",
        "layers.0.moe.router.gate.weight",
        "layers.0.moe.expert_bias_E",
        "layers.0.moe.routed_experts.inner_experts.w1_EFD",
        "layers.0.moe.routed_experts.inner_experts.w2_EDF",
        "layers.0.moe.routed_experts.inner_experts.w3_EFD",
        "layers.1.feed_forward.w2.weight",
    } <= keys
    assert not any("tokens_per_expert" in key for key in keys)


def test_first_weights_follow_from_seed_and_name_alone() -> None:
    config = registry.DENSE
    whole = build_parts(registry.qwen3_debug(), ALONE)[0].state_dict()
    assert all(torch.isfinite(value).all() for value in whole.values())
    torch.manual_seed(1234)
    part = Qwen3Model(config, layers=range(10, 13), first=False, last=True)
    init_weights(part, config, 0)
    for name, value in part.state_dict().items():
        assert torch.equal(value, whole[name]), name
    init_weights(part, config, 1)
    assert not torch.equal(part.state_dict()["lm_head.weight"], whole["lm_head.weight"])


def test_no_two_tensors_begin_alike() -> None:
    whole = build_parts(registry.qwen3_moe_debug(), ALONE)[0].state_dict()
    first = [v.flatten()[:4].tolist() for k, v in whole.items() if "norm" not in k and v.any()]
    assert len({tuple(values) for values in first}) == len(first)


def test_a_tie_holds_after_building() -> None:
    (model,) = build_parts(registry.qwen3_tied_debug(), ALONE)
    assert model.lm_head is not None
    assert model.tok_embeddings is not None
    assert model.lm_head.weight is model.tok_embeddings.weight


def test_parameters_may_be_bfloat16_while_the_bias_stays_float32() -> None:
    job = replace(registry.qwen3_moe_debug(), training=TrainingConfig(dtype="bfloat16"))
    (model,) = build_parts(job, ALONE)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert model.moe_layers()[0].expert_bias_E.dtype is torch.float32


def test_the_bias_moves_towards_experts_with_too_few_tokens() -> None:
    (model,) = build_parts(registry.qwen3_moe_debug(), ALONE)
    moe = model.moe_layers()[0]
    model(torch.arange(64).reshape(2, 32) % 7)
    counts = moe.tokens_per_expert_E.clone()
    assert counts.sum() == 2 * 32 * registry.MOE.num_experts_per_tok
    moe.move_bias()
    assert moe.expert_bias_E is not None
    assert moe.expert_bias_E[counts.argmin()] > 0 > moe.expert_bias_E[counts.argmax()]
    assert not moe.tokens_per_expert_E.any()


@pytest.mark.parametrize(("layers", "ranks", "stages"), [(13, 1, 1), (13, 2, 4), (3, 2, 2)])
def test_pipeline_stages_hold_every_layer_once(layers: int, ranks: int, stages: int) -> None:
    found = stretches(layers, ranks)
    assert len(found) == stages
    assert all(len(stage) for stage in found)
    assert [layer for stage in found for layer in stage] == list(range(layers))


# --- data, progress, schedule


def loader(**changed: int) -> SyntheticDataLoader:
    sizes = {"vocab_size": 50, "seq_len": 6, "batch_size": 3, "seed": 1}
    return SyntheticDataLoader(**{**sizes, **changed})


def test_the_data_goes_on_where_it_was() -> None:
    one = loader(dp_rank=1, dp_world_size=2)
    batches = [next(one) for _ in range(5)]
    other = loader(dp_rank=1, dp_world_size=2)
    for _ in range(3):
        next(other)
    state = other.state_dict()
    assert set(state) == {"dp_rank_1", "world_size"}
    assert isinstance(state["dp_rank_1"], bytes)
    resumed = loader(dp_rank=1, dp_world_size=2)
    resumed.load_state_dict(state)
    assert torch.equal(next(resumed), batches[3])
    assert torch.equal(next(resumed), batches[4])
    assert batches[0].shape == (3, 7)
    assert int(torch.stack(batches).max()) < 50


def test_no_two_batches_or_ranks_are_alike() -> None:
    streams = [loader(dp_rank=rank, dp_world_size=4) for rank in range(4)] + [loader(seed=2)]
    rows = {tuple(next(stream).flatten().tolist()) for stream in streams for _ in range(6)}
    assert len(rows) == 30


def test_another_number_of_ranks_cannot_take_over_the_data() -> None:
    with pytest.raises(MismatchError, match="exclude_from_loading dataloader"):
        loader(dp_world_size=2).load_state_dict(loader(dp_world_size=4).state_dict())
    loader().load_state_dict({})
    for broken in (b"", b"{}", b'{"batches": "x"}', None):
        with pytest.raises(CheckpointError, match="dp_rank_0"):
            loader().load_state_dict({"dp_rank_0": broken, "world_size": 1})


def test_progress_brings_back_the_random_stream() -> None:
    state = TrainState()
    state.step, state.ntokens_seen = 7, 512
    saved = {key: getattr(value, "clone", lambda v=value: v)() for key, value in
             state.state_dict().items()}  # fmt: skip
    expected = torch.rand(3)
    torch.rand(11)
    other = TrainState()
    other.load_state_dict(saved)
    assert (other.step, other.ntokens_seen) == (7, 512)
    assert torch.equal(torch.rand(3), expected)


def test_the_learning_rate_rises_then_falls() -> None:
    optimizer = make_optimizer(torch.nn.Linear(2, 3), OptimizerConfig(lr=1.0))
    options = LRSchedulerConfig(warmup_steps=2, total_steps=6, min_lr_factor=0.2)
    scheduler = make_lr_scheduler(optimizer, options, steps=99)
    rates = []
    for _ in range(9):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:3] == [1 / 3, 2 / 3, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[6:] == [0.2] * 3


def test_cuda_is_told_to_repeat_its_sums_unless_somebody_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    for before, after in (("", ":4096:8"), (":16:8", ":16:8")):
        monkeypatch.setenv(name, before)
        if not before:
            monkeypatch.delenv(name)
        with trainer._repeatable(torch.device("cuda")):
            assert os.environ[name] == after


def test_a_job_leaves_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    with trainer._repeatable(torch.device("cpu")):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == before
