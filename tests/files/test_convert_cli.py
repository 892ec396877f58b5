"""The verb `convert`: words, JSON, exit codes, and a source behind a URL."""

import json
import subprocess
import sys

import pytest
import torch

from tests.files.convert_lab import FIXTURES, go, hf_tensors, native_of, same_dict
from torchtitan_ckpt.cli import main
from torchtitan_ckpt.cli.convert import _size
from torchtitan_ckpt.convert.options import parse_bytes
from torchtitan_ckpt.errors import ConfigError
from torchtitan_ckpt.formats import dcp

MOE = FIXTURES / "moe"


def test_words(tmp_path, capsys):
    assert main(["convert", str(MOE), str(tmp_path / "step-1"), "--no-sync"]) == 0
    out, err = capsys.readouterr()
    assert "Hugging Face -> qwen3_moe/titan" in out
    assert "compared with the source" in out
    assert err == ""  # no terminal, no bar
    words = ["convert", str(tmp_path / "step-1"), str(tmp_path / "hf"), "--config", str(MOE)]
    assert main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "dry run: nothing was written" in out
    assert "left out layers.{0,2}.moe.expert_bias_E (2)" in out
    assert not (tmp_path / "hf").exists()


def test_json_and_lists_of_options(tmp_path, capsys):
    go(MOE, tmp_path / "a")
    words = ["convert", str(tmp_path / "a"), str(tmp_path / "m.pt"), "--json", "--no-sync"]
    words += [
        "--average",
        str(tmp_path / "a"),
        str(tmp_path / "a"),
        "--weights",
        "0.5",
        "0.25",
        "0.25",
    ]
    assert main([*words, "--window", "1MiB", "--threads", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["target_format"], told["window"], told["threads"]) == ("pt", 2**20, 1)
    assert told["verified"] is True
    assert same_dict(torch.load(tmp_path / "m.pt", weights_only=True), native_of("moe"))


def test_a_refusal_is_json_too_and_its_exit_code_says_what_kind(tmp_path, capsys):
    (tmp_path / "taken").write_text("mine")
    assert main(["convert", str(MOE), str(tmp_path / "taken"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "convert.taken"
    assert main(["convert", str(MOE), str(tmp_path / "x"), "--export-dtype", "int8"]) == 2
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "x")]) == 3


def test_a_source_behind_a_url(tmp_path):
    dcp.save(native_of("moe"), "memory://convert/step-4")
    go("memory://convert/step-4", tmp_path / "hf", config=str(MOE))
    assert same_dict(hf_tensors(tmp_path / "hf"), hf_tensors(MOE))
    with pytest.raises(ConfigError, match="local folders only"):
        go(MOE, "memory://convert/out")


def test_a_target_as_a_file_url(tmp_path, capsys):
    assert main(["convert", str(MOE), f"file://{tmp_path}/m.pt", "--no-sync"]) == 0
    assert same_dict(torch.load(tmp_path / "m.pt", weights_only=True), native_of("moe"))


def test_what_is_quantized_is_hugging_faces(tmp_path, capsys):
    assert main(["convert", str(MOE), str(tmp_path / "q"), "--quantize", "fp8", "--no-sync"]) == 0
    assert (tmp_path / "q" / "config.json").exists()


def test_help_needs_no_torch():
    code = "import sys, torchtitan_ckpt.cli.convert; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("64KB", 64000), ("1MiB", 2**20), ("1.5GB", 15 * 10**8), ("2gib", 2**31)],
)
def test_sizes(text, count):
    assert parse_bytes(text) == count


def test_a_size_that_is_none():
    with pytest.raises(ConfigError, match="not understood"):
        parse_bytes("much")
    assert _size(1_500_000_000) == "1.50 GB"
