"""Options of the manager: defaults as in the guide, every rule, all problems at once."""

import dataclasses

import pytest

from torchtitan_ckpt.config import CheckpointConfig, ignored_options, is_remote, validate
from torchtitan_ckpt.errors import ConfigError

GUIDE_DEFAULTS = {
    "enable": False,
    "folder": "checkpoint",
    "interval": 500,
    "load_step": -1,
    "initial_load_path": None,
    "initial_load_model_only": True,
    "initial_load_in_hf": False,
    "initial_load_in_hf_quantized": False,
    "last_save_model_only": True,
    "last_save_in_hf": False,
    "export_dtype": "float32",
    "load_only": False,
    "keep_latest_k": 10,
    "exclude_from_loading": [],
    "async_mode": "disabled",
    "create_seed_checkpoint": False,
    "enable_first_step_checkpoint": False,
    "enable_ft_dataloader_checkpoints": True,
    "sync_files": True,
    "drop_page_cache_after_save": False,
    "empty_cache_after_save": True,
}


def test_defaults_are_the_guides():
    config = dataclasses.asdict(CheckpointConfig())
    assert {name: config[name] for name in GUIDE_DEFAULTS} == GUIDE_DEFAULTS


BAD = [
    ({"folder": " "}, "config.value", "checkpoint.folder"),
    ({"interval": 0}, "config.value", "checkpoint.interval"),
    ({"load_step": -2}, "config.value", "checkpoint.load_step"),
    ({"keep_latest_k": 1}, "config.value", "checkpoint.keep_latest_k"),
    ({"keep_latest_k": -1}, "config.value", "checkpoint.keep_latest_k"),
    ({"export_dtype": "bf16"}, "config.value", "bfloat16"),
    ({"async_mode": "asynch"}, "config.value", "--checkpoint.async_mode async"),
    ({"save_expert_format": "fused"}, "config.value", "standard"),
    ({"exclude_from_loading": ["data_loader"]}, "config.exclude-unknown", "'dataloader'"),
    (
        {"exclude_from_loading": ["optimiser", "lr_scheduler"]},
        "config.exclude-unknown",
        "'optimizer'",
    ),
    ({"exclude_from_loading": ["model"]}, "config.exclude-model", "new dump_folder"),
    (
        {"exclude_from_loading": ["dataloader,train_state"]},
        "config.exclude-list",
        "['dataloader', 'train_state']",
    ),
    ({"exclude_from_loading": ["optimizer"]}, "config.exclude-coupled", "optimizer,lr_scheduler"),
    (
        {"initial_load_in_hf": True, "initial_load_model_only": False},
        "config.hf-training-state",
        "no optimizer",
    ),
    ({"initial_load_in_hf_quantized": True}, "config.quantized-without-hf", "initial_load_in_hf"),
    (
        {"last_save_in_hf": True, "last_save_model_only": False},
        "config.hf-full-save",
        "model only",
    ),
    ({"load_only": True, "create_seed_checkpoint": True}, "config.seed-load-only", "no-load_only"),
    ({"last_save_in_hf": True, "folder": "s3://bucket/x"}, "config.hf-remote", "local"),
    (
        {"initial_load_in_hf": True, "initial_load_path": "memory://x"},
        "config.hf-remote",
        "local",
    ),
]


@pytest.mark.parametrize(("options", "code", "word"), BAD)
def test_each_rule(options, code, word):
    with pytest.raises(ConfigError) as caught:
        validate(CheckpointConfig(enable=True, **options))
    assert [p.code for p in caught.value.problems] == [code]
    assert word in str(caught.value)


def test_all_problems_at_once():
    config = CheckpointConfig(enable=True, interval=0, keep_latest_k=1, export_dtype="int8")
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert len(caught.value.problems) == 3
    assert "3 problems" in str(caught.value)


def test_disabled_is_never_wrong_but_says_what_it_ignores():
    config = CheckpointConfig(interval=0, initial_load_path="x")
    validate(config)
    assert set(ignored_options(config)) == {"interval", "initial_load_path"}


ALLOWED = [
    {"load_only": True, "enable_first_step_checkpoint": True},
    {"initial_load_in_hf": True, "initial_load_in_hf_quantized": True},
    {"initial_load_path": "./outputs/x/checkpoint/step-500"},
    {"exclude_from_loading": ["lr_scheduler"]},
    {"exclude_from_loading": ["optimizer", "lr_scheduler", "dataloader", "train_state"]},
    {"keep_latest_k": 0},
    {"keep_latest_k": 2},
    {"create_seed_checkpoint": True, "last_save_model_only": False},
    {"last_save_model_only": False, "export_dtype": "bfloat16"},
    {"folder": "memory://x", "async_mode": "async"},
]


@pytest.mark.parametrize("options", ALLOWED)
def test_allowed_combinations(options):
    validate(CheckpointConfig(enable=True, **options))


def test_further_states_may_be_excluded():
    config = CheckpointConfig(enable=True, exclude_from_loading=["ema"])
    validate(config, states=("optimizer", "ema"))
    with pytest.raises(ConfigError):
        validate(config)


def test_ignored_options_name_the_reason():
    config = CheckpointConfig(enable=True, load_only=True, enable_first_step_checkpoint=True)
    assert "load_only" in ignored_options(config)["enable_first_step_checkpoint"]
    assert ignored_options(CheckpointConfig(enable=True)) == {}


@pytest.mark.parametrize(
    ("path", "remote"), [("s3://a/b", True), ("memory://x", True), ("./a", False), ("C:\\x", False)]
)
def test_is_remote(path, remote):
    assert is_remote(path) is remote
