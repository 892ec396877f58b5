"""The guide's command line conventions, read without torch and without a disk."""

from __future__ import annotations

import shlex
import subprocess
import sys
import types
from dataclasses import fields, replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from torchtitan_ckpt.config import CheckpointConfig
from torchtitan_ckpt.errors import ConfigError
from torchtitan_ckpt.train import JobConfig, registry
from torchtitan_ckpt.train.cli_args import parse_flags, parse_job, split_command


def checkpoint(line: str, config: str = "qwen3_debug") -> CheckpointConfig:
    return parse_job(shlex.split(line), config=config).checkpoint


def refused(line: str, config: str = "qwen3_debug") -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        parse_job(shlex.split(line), config=config)
    return [(problem.code, problem.fix) for problem in caught.value.problems]


def test_no_flags_give_the_registry_s_job() -> None:
    assert parse_job([]) == registry.qwen3_debug()
    assert checkpoint("") == CheckpointConfig()


def test_underscores_and_hyphens_are_the_same() -> None:
    assert checkpoint("--checkpoint.keep_latest_k 3") == checkpoint("--checkpoint.keep-latest-k=3")
    assert parse_job(["--dump-folder", "x"]) == parse_job(["--dump_folder=x"])


@pytest.mark.parametrize(
    "form",
    ["--checkpoint.no-load-only", "--checkpoint.no_load_only", "--checkpoint.no-load_only"],
)
def test_a_bool_is_turned_off_after_its_section(form: str) -> None:
    assert checkpoint("", "qwen3_load_only_debug").load_only
    assert not checkpoint(form, "qwen3_load_only_debug").load_only


@pytest.mark.parametrize("word", ["--no-checkpoint.load-only", "--no_checkpoint.load_only"])
def test_a_bool_turned_off_before_its_section_is_told_the_right_form(word: str) -> None:
    assert refused(word) == [("cli.bool-form", "--checkpoint.no-load-only")]


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("--checkpoint.load_only false", "--checkpoint.no-load-only"),
        ("--checkpoint.load-only=False", "--checkpoint.no-load-only"),
        ("--checkpoint.load_only true", "--checkpoint.load_only"),
        ("--checkpoint.no-load-only true", "--checkpoint.no-load-only"),
        ("--checkpoint.no-load-only false", "--checkpoint.load_only"),
        ("--checkpoint.enable ./outputs", "remove ./outputs"),
    ],
)
def test_a_bool_with_a_value_is_told_the_right_form(line: str, fix: str) -> None:
    assert refused(line) == [("cli.bool-form", fix)]


def test_a_list_is_one_comma_separated_value() -> None:
    line = "--checkpoint.exclude_from_loading optimizer,lr_scheduler,dataloader"
    assert checkpoint(line).exclude_from_loading == ["optimizer", "lr_scheduler", "dataloader"]
    assert checkpoint("--checkpoint.exclude-from-loading=train_state").exclude_from_loading == [
        "train_state"
    ]


@pytest.mark.parametrize("words", ["optimizer lr_scheduler", "optimizer, lr_scheduler"])
def test_a_list_of_words_is_told_the_comma_form(words: str) -> None:
    fix = "--checkpoint.exclude_from_loading optimizer,lr_scheduler"
    assert refused(f"--checkpoint.exclude_from_loading {words}") == [("cli.list-form", fix)]


def test_a_registry_s_defaults_stay_until_overridden() -> None:
    before = registry.qwen3_load_only_debug().checkpoint
    assert before.load_only
    assert before.initial_load_path
    after = checkpoint("--checkpoint.enable", "qwen3_load_only_debug")
    assert after == replace(before, enable=True)
    line = "--checkpoint.enable --checkpoint.no-load-only --checkpoint.initial_load_path None"
    assert checkpoint(line, "qwen3_load_only_debug") == CheckpointConfig(enable=True)


def test_every_option_of_the_manager_has_a_flag() -> None:
    hints = get_type_hints(CheckpointConfig)
    samples = {bool: True, int: 7, list[str]: ["a", "b"]}
    for item in fields(CheckpointConfig):
        choices = get_args(hints[item.name]) if get_origin(hints[item.name]) is Literal else ()
        value = choices[-1] if choices else samples.get(hints[item.name], "text")
        text = ",".join(value) if isinstance(value, list) else str(value)
        words = [f"--checkpoint.{item.name}", *([] if value is True else [text])]
        assert getattr(parse_flags(words, JobConfig()).checkpoint, item.name) == value


def test_every_mistake_is_said_at_once() -> None:
    line = "--checkpoint.lod_step 4 --no-checkpoint.enable --training.steps --debug 1 --foo.bar"
    assert refused(line) == [
        ("cli.unknown-flag", "did you mean --checkpoint.load_step?"),
        ("cli.bool-form", "--checkpoint.no-enable"),
        ("cli.no-value", "--training.steps VALUE"),
        ("cli.bool-form", "--debug"),
        ("cli.unknown-flag", "bash scripts/run_train.sh --help lists them"),
    ]


def test_values_that_no_type_takes_are_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job(["--training.steps", "many"])
    assert "training.steps" in str(caught.value)
    assert "'many'" in str(caught.value)
    assert "│" not in str(caught.value)
    assert refused("--training.dtype int8")[0][0] == "cli.value"
    assert refused("--training.steps 3 4") == [("cli.stray", "--training.steps 3")]
    assert refused("stray --training.steps 3")[0][0] == "cli.stray"
    assert checkpoint("--checkpoint.load_step -1").load_step == -1


def test_a_whole_command_of_the_guide_is_taken_apart() -> None:
    line = (
        "NGPU=16 MODULE=torchtitan_ckpt.train CONFIG=qwen3_moe_debug bash scripts/run_train.sh "
        "--dump_folder ./outputs/x --checkpoint.enable"
    )
    command = split_command(shlex.split(line))
    assert (command.ngpu, command.config) == (16, "qwen3_moe_debug")
    assert command.flags == ("--dump_folder", "./outputs/x", "--checkpoint.enable")
    job = parse_job(shlex.split(line))
    assert job.model == registry.MOE
    assert job.dump_folder == "./outputs/x"


def test_the_command_s_own_words_come_before_arguments_and_environment() -> None:
    environ = {"CONFIG": "from_environ", "NGPU": "3", "MODULE": ""}
    assert split_command([], environ=environ).config == "from_environ"
    assert split_command([], environ=environ).ngpu == 3
    assert split_command([], environ=environ).module == registry.DEFAULT_MODULE
    assert split_command([], config="argument", environ=environ).config == "argument"
    assert split_command(["--config=flag"], config="argument").config == "flag"
    assert split_command(["CONFIG=word"], config="argument").config == "word"


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_number_of_ranks_that_is_none(text: str) -> None:
    assert refused(f"NGPU={text}")[0][0] == "cli.ngpu"


def test_a_registry_is_any_importable_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_registry")
    mine = JobConfig(model=registry.TIED, checkpoint=CheckpointConfig(interval=7))
    module.mine = lambda: mine  # type: ignore[attr-defined]
    module.broken = lambda: 3  # type: ignore[attr-defined]
    module.needs = lambda size: mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_registry", module)
    job = parse_job(["--checkpoint.enable"], "my_registry", "mine")
    assert job.checkpoint == CheckpointConfig(interval=7, enable=True)
    for config, code in (("broken", "train.not-a-job"), ("needs", "train.no-config")):
        with pytest.raises(ConfigError) as caught:
            parse_job([], "my_registry", config)
        assert caught.value.problems[0].code == code


def test_what_a_registry_lacks_is_said_with_what_it_has() -> None:
    with pytest.raises(ConfigError, match=r"qwen3_moe_debug[^|]*fix +CONFIG=qwen3_debug"):
        parse_job([], config="qwen3_debgu")
    with pytest.raises(ConfigError, match="no_such_module") as caught:
        parse_job([], module="no_such_module")
    assert caught.value.problems[0].code == "train.no-module"


def test_reading_a_command_line_imports_no_torch() -> None:
    code = (
        "import sys; from torchtitan_ckpt.train.cli_args import parse_job; "
        "from torchtitan_ckpt.train.rules import check_job; "
        "check_job(parse_job(['--checkpoint.enable']), 1); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
