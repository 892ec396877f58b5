"""The verb `plan`: words, JSON, the picture, exit codes, and the guide's 671B model in time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchtitan_ckpt.cli import main

TINY = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 38,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_the_words(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--config", config, "--data_parallel_shard_degree", "4"]
    assert main([*argv, "--expert_parallel_degree", "2", "--to", "tp2"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == "save under fsdp4 x ep2: 4 ranks"
    assert "and .metadata of " in text
    tensors = 42 + 39 * 3 + 1  # 42 native, 39 of them parameters with a step and two moments
    assert f"  coverage  every element of {tensors} tensors is written exactly once" in lines
    assert "load under tp2: 2 ranks" in lines
    assert "times what is needed" in text
    assert "planned   with DCP's planners, rank by rank" in text


def test_json_has_one_entry_a_rank(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--config", config, "--data-parallel-shard-degree", "-1"]
    assert main([*argv, "--world_size", "6", "--to", "fsdp3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    save, load = found["save"], found["load"]
    assert save["covered"] is True
    assert 100 * save["items"] < save["metadata_bytes"] < 1000 * save["items"]
    assert save["degrees"]["data_parallel_shard_degree"] == 6
    assert [w["rank"] for w in save["per_rank"]] == list(range(6))
    assert sum(w["payload"] for w in save["per_rank"]) == save["bytes"]
    assert save["held_bytes"] - save["duplicated_bytes"] == save["bytes"]
    assert len(load["per_rank"]) == 3
    assert all(reader["writers"] for reader in load["per_rank"])
    assert load["amplification_dcp"] >= 1


def test_both_methods_give_the_same_numbers(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = []
    for method in ("dcp", "repeat"):
        argv = ["plan", "--config", config, "--data_parallel_shard_degree", "3", "--json"]
        argv += ["--tensor_parallel_degree", "2", "--pipeline_parallel_degree", "2"]
        # The generators of this process are a part of the state; their size follows their position.
        random.seed(1)
        np.random.seed(1)
        assert main([*argv, "--method", method]) == 0
        out.append(json.loads(capsys.readouterr().out)["save"]["per_rank"])
    assert out[0] == out[1]


def test_what_would_fail_is_said_with_the_key(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "--config", config, "--data_parallel_shard_degree", "15"]
    assert main([*argv, "--expert_parallel_degree", "5"]) == 1
    text = capsys.readouterr().out
    assert "FAIL [parallel.experts-uneven]" in text
    assert "layers.{0..2}.moe.routed_experts.inner_experts.w1_EFD" in text


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--config", "DeepSeek-V32"], "did you mean DeepSeek-V3.2?"),
        (["--config", "Qwen3-0.6B", "--family", "qwen"], "qwen3"),
        (["--config", "Qwen3-0.6B", "--world_size", "3"], "parallel.product"),
        (["--config", "Qwen3-0.6B", "--to", "nonsense"], "parallel.unreadable"),
        (["--config", "Qwen3-0.6B", "--dtype", "int8"], "plan.dtype"),
    ],
)
def test_refusals(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) in (2, 3)
    assert word in capsys.readouterr().err


def test_the_picture(config: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    argv = ["plan", "--config", config, "--data_parallel_shard_degree", "4", "--to", "fsdp2"]
    assert main([*argv, "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 3
    assert text.count("<title>rank ") == 4 + 2
    assert "http" not in text


GUIDE = [
    "plan", "--family", "deepseek_v32", "--config", "DeepSeek-V3.2", "--json",
    "--data_parallel_shard_degree", "32", "--tensor_parallel_degree", "4",
    "--expert_parallel_degree", "64",
]  # fmt: skip

# In a process of its own, whose peak is not that of the tests before it; seconds are the CPU's,
# which other programs do not lengthen.
CHILD = """
import sys, time
from pathlib import Path
from torchtitan_ckpt.cli import main

code = main(sys.argv[1:])
peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
print(time.process_time(), peak, file=sys.stderr)
sys.exit(code)
"""


def measured(argv: list[str]) -> tuple[dict[str, Any], float, int]:
    """What a plan says, the seconds that it computed, and its peak memory in bytes."""
    done = subprocess.run([sys.executable, "-c", CHILD, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, peak = done.stderr.split()[-2:]
    return json.loads(done.stdout), float(seconds), int(peak)


def test_the_guides_largest_model_on_128_dies() -> None:
    found, seconds, peak = measured([*GUIDE, "--to", "fsdp16 x tp4 x ep64"])
    save = found["save"]
    assert (save["ranks"], save["covered"], save["method"]) == (128, True, "repeat")
    # Weights and two moments of fp32, a step a parameter, and what is pinned or an integer.
    assert 8.19e12 < save["bytes"] < 8.21e12
    assert len(found["load"]["per_rank"]) == 64
    assert seconds < 10
    assert peak < 4e9


@pytest.mark.slow
def test_1024_ranks_within_two_minutes() -> None:
    argv = [word if word != "32" else "256" for word in GUIDE]
    found, seconds, peak = measured([*argv, "--to", "fsdp32 x tp4 x ep64"])
    assert found["save"]["ranks"] == 1024
    assert seconds < 120
    assert peak < 4e9
