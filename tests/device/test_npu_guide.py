"""The guide's command lines on two devices, from first step to export and back.

One goes through `scripts/run_train.sh` as written; the others hand their words to the same parser
in rank processes that already run, because starting torch takes longer than training does.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from conformance.ranks import RankPool
from torchtitan_ckpt.diff import Options, diff
from torchtitan_ckpt.formats import dcp

ROOT = Path(__file__).parents[2]
SMALL = "--training.seq_len 12 --training.local_batch_size 1"


def _train(folder: str, words: str, port: int, config: str) -> str:
    """What one rank prints for a command line that is started in `folder`."""
    from torchtitan_ckpt.train.cli_args import parse_flags
    from torchtitan_ckpt.train.registry import load
    from torchtitan_ckpt.train.trainer import run

    dist.barrier()  # who leaves at once closes connections that others are still making
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    job = parse_flags(shlex.split(f"{SMALL} {words}"), load("torchtitan_ckpt.train", config))
    out = io.StringIO()
    run(job, out=out)
    return out.getvalue()


def train(
    ranks: RankPool, folder: Path, words: str, world: int = 2, config: str = "qwen3_debug"
) -> dict[int, str]:
    """The loss of every step, as a hexadecimal float, which shows every bit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = ranks.run(_train, world, str(folder), words, port, config, timeout=240)[0]
    found = re.findall(r"step=(\d+) loss=\S+ loss_hex=(\S+)", text)
    return {int(step): loss for step, loss in found}


@pytest.fixture(scope="module")
def trained(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, str]]:
    """A run of five steps with full checkpoints at 2 and 4, and the model alone at 5."""
    folder = tmp_path_factory.mktemp("guide")
    losses = train(
        ranks,
        folder,
        "--dump_folder ./outputs/x --checkpoint.enable --checkpoint.folder checkpoint "
        "--checkpoint.interval 2 --training.steps 5",
    )
    assert sorted(losses) == [1, 2, 3, 4, 5]
    steps = sorted(p.name for p in (folder / "outputs/x/checkpoint").glob("step-*"))
    assert steps == ["step-2", "step-4", "step-5"]
    return folder, losses


def test_resume_from_a_step(ranks: RankPool, trained: tuple[Path, dict[int, str]]):
    folder, losses = trained
    again = train(
        ranks,
        folder,
        "--dump_folder ./outputs/x --checkpoint.enable --checkpoint.interval 100 "
        "--checkpoint.load_step 2 --training.steps 4 --checkpoint.no-last-save-model-only",
    )
    assert again == {step: losses[step] for step in (3, 4)}


def test_start_from_another_jobs_step(ranks: RankPool, trained: tuple[Path, dict[int, str]]):
    folder, losses = trained
    started = train(
        ranks,
        folder,
        "--dump_folder ./outputs/y --checkpoint.enable "
        "--checkpoint.initial_load_path ./outputs/x/checkpoint/step-4 --training.steps 1",
    )
    # The model of step 4 meets the data of step 1.
    assert list(started) == [1]
    assert float.fromhex(started[1]) < float.fromhex(losses[1])


def test_parts_can_be_left_out(ranks: RankPool, trained: tuple[Path, dict[int, str]]):
    folder, losses = trained
    again = train(
        ranks,
        folder,
        "--dump_folder ./outputs/x --checkpoint.enable --checkpoint.load_step 4 "
        "--checkpoint.exclude_from_loading optimizer,lr_scheduler,dataloader "
        "--training.steps 5 --checkpoint.folder checkpoint --checkpoint.load-only",
    )
    assert list(again) == [5], "train_state was loaded, so that one step is left"
    assert again[5] != losses[5], "the data begins anew"


def test_export_to_hugging_face_and_start_from_it(ranks: RankPool, tmp_path: Path):
    assets = ROOT / "fixtures" / "qwen3" / "dense-untied"
    train(
        ranks,
        tmp_path,
        f"--dump_folder ./outputs/z --hf_assets_path {assets} --checkpoint.enable "
        "--checkpoint.interval 500 --checkpoint.last_save_in_hf --checkpoint.export_dtype bfloat16 "
        "--training.steps 1",
    )
    made = tmp_path / "outputs/z/checkpoint/step-1"
    files = sorted(made.glob("*.safetensors"))
    assert files
    with safe_open(files[0], "pt") as opened:
        key = next(iter(opened.keys()))
        assert opened.get_tensor(key).dtype is torch.bfloat16
    from_path = train(
        ranks,
        tmp_path,
        "--dump_folder ./outputs/a --checkpoint.enable --checkpoint.initial_load_in_hf "
        f"--checkpoint.initial_load_path {made.relative_to(tmp_path)} --training.steps 1",
    )
    from_assets = train(
        ranks,
        tmp_path,
        "--dump_folder ./outputs/b --checkpoint.enable --checkpoint.initial_load_in_hf "
        f"--hf_assets_path {made.relative_to(tmp_path)} --training.steps 1",
    )
    assert from_path == from_assets
    assert list(from_path) == [1]


@pytest.mark.parametrize("degrees", ["", "--parallelism.expert_parallel_degree 2"])
def test_experts_resume_as_if_never_stopped(ranks: RankPool, tmp_path: Path, degrees: str):
    """Router, stacked experts, and the bias that only a buffer holds; then what lies on disk."""
    common = f"--checkpoint.enable --checkpoint.no-last-save-model-only {degrees}"
    whole, cut = f"{common} --dump_folder ./whole", f"{common} --dump_folder ./cut"
    losses = train(ranks, tmp_path, f"{whole} --training.steps 3", config="qwen3_moe_debug")
    assert sorted(losses) == [1, 2, 3]
    first = train(ranks, tmp_path, f"{cut} --training.steps 2", config="qwen3_moe_debug")
    second = train(ranks, tmp_path, f"{cut} --training.steps 3", config="qwen3_moe_debug")
    assert first | second == losses
    assert list(second) == [3]
    last = [str(tmp_path / job / "checkpoint/step-3") for job in ("whole", "cut")]
    found = diff(Options(a=last[0], b=last[1]))
    assert found.compared > 100
    # Python seeds its generator from the system: no two jobs begin with the same one.
    different = [g for g in found.groups if g.verdict != "equal"]
    assert [g for g in different if not g.keys[0].startswith("train_state.@rng")] == []
    assert found.only_a == found.only_b == []
    assert any("expert_bias" in key for key in dcp.read_manifest(last[0]).keys)


def test_a_seed_from_one_process_starts_two_ranks(ranks: RankPool, tmp_path: Path):
    degrees = " ".join(
        f"--parallelism.{name}_parallel_degree 1"
        for name in ("tensor", "pipeline", "context", "expert")
    )
    common = "--dump_folder ./outputs/s --checkpoint.enable"
    nothing = train(
        ranks,
        tmp_path,
        f"{common} --checkpoint.create_seed_checkpoint {degrees} "
        "--parallelism.data_parallel_replicate_degree 1 "
        "--parallelism.data_parallel_shard_degree 1",
        world=1,
    )
    assert nothing == {}
    assert (tmp_path / "outputs/s/checkpoint/step-0/.metadata").exists()
    seeded = train(ranks, tmp_path, f"{common} --training.steps 1")
    fresh = train(ranks, tmp_path, "--dump_folder ./outputs/t --training.steps 1")
    assert seeded == fresh, "weights are drawn from name and seed, on any set of ranks"


def test_the_script_itself_and_torchs_own_conversion(tmp_path: Path):
    """`NGPU=2 bash scripts/run_train.sh`, then torch's DCP to one .pt file."""
    env = {**os.environ, "PYTHON": sys.executable, "NGPU": "2"}
    words = (
        f"{SMALL} --dump_folder {tmp_path} --checkpoint.enable --checkpoint.folder checkpoint "
        "--checkpoint.interval 1 --training.steps 2 --checkpoint.async_mode async_with_pinned_mem"
    )
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/run_train.sh"), *shlex.split(words)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^step=\d+ ", done.stdout, re.MULTILINE)) == 2
    step = tmp_path / "checkpoint" / "step-1"
    target = tmp_path / "checkpoint.pt"
    module = "torch.distributed.checkpoint.format_utils"
    done = subprocess.run(
        [sys.executable, "-m", module, "dcp_to_torch", str(step), str(target)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = torch.load(target, map_location="cpu", weights_only=False)
    assert loaded["tok_embeddings.weight"].shape == (208, 48)
