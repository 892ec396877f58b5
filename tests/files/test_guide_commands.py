"""Every command line of the guide, run as written through scripts/run_train.sh.

Only the model's size differs, and NGPU where a number of ranks is not the point. Commands run in a
folder of their own, so that the guide's relative paths mean what they mean there. A loss is
compared by its bits.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures" / "qwen3"
REGISTRY = '''
from dataclasses import replace
from torchtitan_ckpt.train import JobConfig, qwen3_moe_debug
from torchtitan_ckpt.train.config import TrainingConfig

def micro() -> JobConfig:
    """So small that six hundred steps take seconds."""
    job = qwen3_moe_debug()
    model = replace(
        job.model, vocab_size=26, hidden_size=10, intermediate_size=14, num_hidden_layers=2,
        mlp_only_layers=(0,), head_dim=6, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    training = TrainingConfig(steps=600, seq_len=8, dropout=0.1)
    return replace(job, model=model, training=training)
'''
MICRO = "MODULE=guide_registry CONFIG=micro"
SEED_DEGREES = " ".join(
    f"--parallelism.{name}_degree 1"
    for name in (
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "expert_parallel",
    )
)


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit code, each step's loss by its bits, and all that it said."""

    code: int
    losses: dict[int, str]
    out: str
    err: str


def run(command: str, where: Path, *, code: int = 0, traceback: bool = False) -> Done:
    """`command` as the guide writes it; it must end with `code`, and show no traceback unasked."""
    words = shlex.split(command)
    environ = {k: v for k, v in os.environ.items() if k not in ("NGPU", "MODULE", "CONFIG")}
    environ.update(PYTHON=sys.executable, PYTHONPATH=str(where), OMP_NUM_THREADS="1")
    while re.match(r"[A-Z]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    if words[0] == "bash":
        words[1] = str(ROOT / words[1])
    else:
        words[0] = sys.executable
        environ["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        words, cwd=where, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    assert ("Traceback" in done.stderr) is traceback, done.stderr
    found = re.findall(r"^step=(\d+) .*loss_hex=(\S+)", done.stdout, re.MULTILINE)
    assert len(found) == len(dict(found)), "a step was printed twice"
    return Done(
        done.returncode, {int(step): loss for step, loss in found}, done.stdout, done.stderr
    )


def train(flags: str, where: Path, *, env: str = MICRO, ngpu: int = 1, code: int = 0) -> Done:
    return run(f"NGPU={ngpu} {env} bash scripts/run_train.sh {flags}", where, code=code)


def steps_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("step-")}


def copied(site: Path, to: Path) -> Path:
    shutil.copytree(site, to, dirs_exist_ok=True)
    return to


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder with a registry and a model's open weights, as a user has them."""
    (tmp_path / "guide_registry.py").write_text(REGISTRY)
    shutil.copytree(FIXTURES / "moe", tmp_path / "checkpoint" / "qwen3-moe")
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """The guide's first command: six hundred steps, saved every hundred."""
    where = tmp_path_factory.mktemp("trained")
    (where / "guide_registry.py").write_text(REGISTRY)
    done = train(
        "--dump_folder ./outputs/x --checkpoint.enable --checkpoint.folder checkpoint "
        "--checkpoint.interval 100",
        where,
    )
    return where, done


def test_save_every_hundred_steps(trained: tuple[Path, Done]) -> None:
    where, done = trained
    assert list(done.losses) == list(range(1, 601))
    assert len(set(done.losses.values())) > 590
    found = steps_in(where / "outputs" / "x" / "checkpoint")
    assert found == {f"step-{n}" for n in range(100, 601, 100)}


def test_resume_at_a_step_bit_for_bit_twice(trained: tuple[Path, Done], tmp_path: Path) -> None:
    where, first = trained
    for attempt in ("a", "b"):
        there = copied(where, tmp_path / attempt)
        again = train(
            "--dump_folder ./outputs/x --checkpoint.enable --checkpoint.load_step 500", there
        )
        assert list(again.losses) == list(range(501, 601))
        assert again.losses == {step: first.losses[step] for step in range(501, 601)}


def test_resume_by_itself_passes_over_the_last_model_only_step(
    trained: tuple[Path, Done], tmp_path: Path
) -> None:
    where, first = trained
    there = copied(where, tmp_path / "a")
    again = train("--dump_folder ./outputs/x --checkpoint.enable", there)
    assert again.losses == {step: first.losses[step] for step in range(501, 601)}
    assert "step-600" in again.err


def test_start_from_a_step_of_another_job(trained: tuple[Path, Done], tmp_path: Path) -> None:
    where, first = trained
    there = copied(where, tmp_path / "a")
    line = "--checkpoint.enable --checkpoint.initial_load_path ./outputs/x/checkpoint/step-500"
    done = train(f"--dump_folder ./outputs/y {line} --training.steps 3", there)
    assert list(done.losses) == [1, 2, 3]
    assert done.losses[1] != first.losses[1]
    assert float.fromhex(done.losses[1]) < float.fromhex(first.losses[1])
    # A valid checkpoint in the output folder wins over every initial_* option, and the log says so.
    once_more = train(f"--dump_folder ./outputs/x {line}", there)
    assert once_more.losses == {step: first.losses[step] for step in range(501, 601)}
    assert "initial_load_path" in once_more.err


def test_leave_states_out_of_a_load(trained: tuple[Path, Done], tmp_path: Path) -> None:
    where, first = trained
    there = copied(where, tmp_path / "a")
    done = train(
        "--dump_folder ./outputs/x --checkpoint.enable --checkpoint.load_step 500 "
        "--checkpoint.exclude_from_loading optimizer,lr_scheduler,dataloader --training.steps 503",
        there,
    )
    assert list(done.losses) == [501, 502, 503]
    # The data starts afresh; model, step and random stream do not.
    assert done.losses[501] != first.losses[501]
    assert float.fromhex(done.losses[501]) < float.fromhex(first.losses[1])


def test_the_step_folder_as_one_pt_file(trained: tuple[Path, Done], tmp_path: Path) -> None:
    where, _ = trained
    there = copied(where, tmp_path / "a")
    run(
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
        "./outputs/x/checkpoint/step-500 checkpoint.pt",
        there,
    )
    state = torch.load(there / "checkpoint.pt", weights_only=False)
    assert state["tok_embeddings.weight"].shape == (26, 10)
    assert state["layers.1.moe.routed_experts.inner_experts.w1_EFD"].shape == (4, 8, 10)


def test_start_from_open_weights(place: Path) -> None:
    env, tail = "CONFIG=qwen3_moe_debug", "--training.steps 2"
    line = "--checkpoint.enable --checkpoint.initial_load_in_hf"
    by_path = train(
        f"--dump_folder ./outputs/a {line} --checkpoint.initial_load_path ./checkpoint/qwen3-moe "
        f"{tail}",
        place,
        env=env,
    )
    by_assets = train(
        f"--dump_folder ./outputs/b {line} --hf_assets_path ./checkpoint/qwen3-moe {tail}",
        place,
        env=env,
    )
    fresh = train(f"--dump_folder ./outputs/c {tail}", place, env=env)
    assert list(by_path.losses) == [1, 2]
    assert by_path.losses == by_assets.losses
    assert by_path.losses != fresh.losses
    assert steps_in(place / "outputs" / "a" / "checkpoint") == {"step-2"}
    assert not (place / "outputs" / "c" / "checkpoint").exists()


def test_the_last_step_in_hugging_face_s_format(place: Path) -> None:
    train(
        "--dump_folder ./outputs/a --checkpoint.enable --checkpoint.initial_load_in_hf "
        "--hf_assets_path ./checkpoint/qwen3-moe --checkpoint.interval 500 "
        "--checkpoint.last_save_in_hf --checkpoint.export_dtype bfloat16 --training.steps 2",
        place,
        env="CONFIG=qwen3_moe_debug",
    )
    assert headers(place / "outputs/a/checkpoint/step-2") == headers(FIXTURES / "moe")


def headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Key to dtype and shape, over all safetensors files of a folder."""
    out = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                part = file.get_slice(key)
                out[key] = (part.get_dtype(), part.get_shape())
    return out


def test_a_seed_is_made_alone_and_loaded_by_two(place: Path) -> None:
    seed = "--dump_folder ./outputs/a --checkpoint.enable --checkpoint.create_seed_checkpoint"
    done = train(f"{seed} {SEED_DEGREES} --training.seed 7", place)
    assert not done.losses
    assert steps_in(place / "outputs/a/checkpoint") == {"step-0"}
    flags = "--dump_folder ./outputs/{} --checkpoint.enable --training.steps 2"
    loaded = train(flags.format("a"), place, ngpu=2)
    fresh = train(flags.format("b"), place, ngpu=2)
    assert list(loaded.losses) == [1, 2]
    assert loaded.losses[1] != fresh.losses[1]


@pytest.mark.parametrize(
    ("ngpu", "degree", "words"),
    [(1, "expert_parallel_degree", "every parallel degree 1"), (2, "", "NGPU=1")],
)
def test_a_seed_is_refused_where_it_would_be_split(
    place: Path, ngpu: int, degree: str, words: str
) -> None:
    more = f"--parallelism.{degree} 2" if degree else ""
    done = train(
        f"--dump_folder ./o --checkpoint.enable --checkpoint.create_seed_checkpoint {more}",
        place,
        ngpu=ngpu,
        code=2,
    )
    assert words in done.err
    assert not (place / "o").exists()


def test_a_registry_s_defaults_stay_until_overridden(place: Path) -> None:
    env = "CONFIG=qwen3_load_only_debug"
    line = "--dump_folder ./outputs/a --checkpoint.enable --training.steps 2"
    missing = train(line, place, env=env, code=3)
    assert "checkpoint/qwen3_debug" in missing.err
    shutil.copytree(FIXTURES / "dense-untied", place / "checkpoint" / "qwen3_debug")
    loaded = train(f"{line} --checkpoint.initial_load_in_hf", place, env=env)
    assert list(loaded.losses) == [1, 2]
    assert not list(place.glob("outputs/a/checkpoint/step-*"))  # load_only stayed
    saved = train(
        f"{line} --checkpoint.initial_load_in_hf --checkpoint.no-load-only", place, env=env
    )
    assert saved.losses == loaded.losses
    assert steps_in(place / "outputs/a/checkpoint") == {"step-2"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--no-checkpoint.load-only", "--checkpoint.no-load-only"),
        ("--checkpoint.load_only false", "--checkpoint.no-load-only"),
        (
            "--checkpoint.exclude_from_loading optimizer lr_scheduler dataloader",
            "--checkpoint.exclude_from_loading optimizer,lr_scheduler,dataloader",
        ),
        ("--checkpoint.enable --checkpoint.exclude_from_loading optimzer", "'optimizer'"),
    ],
)
@pytest.mark.parametrize("ngpu", [1, 2])
def test_a_missed_convention_is_one_message(place: Path, flags: str, words: str, ngpu: int) -> None:
    done = train(flags, place, ngpu=ngpu, code=2)
    assert words in done.err
    assert done.err.count("[c") == 1, done.err


def resumed(place: Path, ngpu: int, config: str, split: str, times: int) -> None:
    """Six steps on several ranks, then from step 3 again: the same bits every time."""
    line = (
        f"--dump_folder ./outputs/x --checkpoint.enable --checkpoint.interval 3 "
        f"--training.steps 6 --parallelism.{split}"
    )
    first = train(line, place, env=f"CONFIG={config}", ngpu=ngpu)
    assert list(first.losses) == [1, 2, 3, 4, 5, 6]
    for _ in range(times):
        again = train(f"{line} --checkpoint.load_step 3", place, env=f"CONFIG={config}", ngpu=ngpu)
        assert again.losses == {step: first.losses[step] for step in (4, 5, 6)}


def test_two_ranks_resume_bit_for_bit(place: Path) -> None:
    resumed(place, 2, "qwen3_tied_debug", "data_parallel_shard_degree 2", times=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ngpu", "config", "split"),
    [
        (2, "qwen3_debug", "data_parallel_shard_degree 2"),
        (2, "qwen3_tied_debug", "tensor_parallel_degree 2"),
        (2, "qwen3_debug", "pipeline_parallel_degree 2"),
        (4, "qwen3_moe_debug", "expert_parallel_degree 2"),
        (4, "qwen3_moe_debug", "data_parallel_replicate_degree 2"),
    ],
)
def test_several_ranks_resume_bit_for_bit_twice(
    place: Path, ngpu: int, config: str, split: str
) -> None:
    resumed(place, ngpu, config, split, times=2)


@pytest.mark.slow
def test_sixteen_ranks(place: Path) -> None:
    line = (
        "--dump_folder ./outputs/x --checkpoint.enable --checkpoint.folder checkpoint "
        "--checkpoint.interval 100 --training.steps 102 --parallelism.tensor_parallel_degree 2"
    )
    first = train(line, place, ngpu=16)
    again = train(f"{line} --checkpoint.load_step 100", place, ngpu=16)
    assert again.losses == {step: first.losses[step] for step in (101, 102)}


def test_debug_shows_the_traceback(place: Path) -> None:
    command = "bash scripts/run_train.sh --training.steps 0"
    quiet = run(f"{MICRO} {command}", place, code=2)
    assert "training.steps cannot be 0" in quiet.err
    loud = run(f"{MICRO} {command} --debug", place, code=2, traceback=True)
    assert "training.steps cannot be 0" in loud.err
