"""Usage errors of verbs and jobs: exit code 2 and the project's own form, never a parser's box."""

import errno
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_ckpt.cli import main

HELP = "torchtitan-ckpt {verb} --help lists flags and values"
CASES = [
    ("verify x --threads abc", "value", "--threads cannot be 'abc'", "a whole number", "'abc'", ""),
    ("diff a b --atol=x", "value", "--atol cannot be 'x'", "a number", "'x'", ""),
    (
        "convert a b --to nosuch",
        "value",
        "--to cannot be 'nosuch'",
        "one of dcp, hf, pt",
        "'nosuch'",
        "",
    ),
    (
        "convert a b --to hff",
        "value",
        "--to cannot be 'hff'",
        "one of dcp, hf, pt",
        "'hff'",
        "did you mean --to hf?",
    ),
    (
        "convert a b --weights 1 x",
        "value",
        "--weights cannot be '1 x'",
        "--weights W [W ...]",
        "'1 x'",
        "",
    ),
    (
        "verify x --against",
        "no-value",
        "--against lacks a value",
        "--against VALUE",
        "--against",
        "",
    ),
    ("verify", "missing", "PATH is missing", "PATH", "nothing", ""),
    ("convert", "missing", "SRC and DST are missing", "SRC and DST", "nothing", ""),
    (
        "verify x --nosuch 3",
        "unknown-flag",
        "there is no flag --nosuch",
        "one of --against, --config, --deep, --stats, --threads, --trust, --json",
        "--nosuch",
        "",
    ),
    (
        "convert a b --export_dtypee=float32",
        "unknown-flag",
        "there is no flag --export_dtypee",
        "",
        "--export_dtypee=float32",
        "did you mean --export-dtype?",
    ),
    (
        "verify x y",
        "stray",
        "'y' belongs to no flag",
        "options, and no further word",
        "y",
        "leave y out",
    ),
    (
        "explain --training.steps many --checkpoint.enable",
        "value",
        "--training.steps cannot be 'many'",
        "a whole number",
        "'many'",
        "bash scripts/run_train.sh --help lists flags and values",
    ),
    (
        "explain --training.dtype int8",
        "value",
        "--training.dtype cannot be 'int8'",
        "one of bfloat16, float32",
        "'int8'",
        "bash scripts/run_train.sh --help lists flags and values",
    ),
    (
        "inspct x",
        "unknown-verb",
        "there is no verb inspct",
        "one of check, checks, convert, diff, explain, inspect, map, plan, verify",
        "inspct",
        "did you mean torchtitan-ckpt inspect?",
    ),
]


@pytest.mark.parametrize(("line", "kind", "what", "expected", "actual", "fix"), CASES)
def test_usage_errors_are_said_in_one_form(capsys, line, kind, what, expected, actual, fix):
    words = shlex.split(line)
    assert main(words) == 2
    out, err = capsys.readouterr()
    rows = [f"[cli.{kind}] {what}", "  where    the command line"]
    rows += [f"  expected {expected}"] if expected else []
    rows += [f"  actual   {actual}", f"  fix      {fix or HELP.format(verb=words[0])}"]
    assert err == "\n".join(rows) + "\n"
    assert out == ""


def test_several_stray_words_and_flags_are_said_at_once(capsys):
    assert main(["verify", "x", "y", "--deeep", "--nosuch", "3"]) == 2
    err = capsys.readouterr().err
    for part in ("3 problems", "'y' belongs to no flag", "did you mean --deep?", "flag --nosuch"):
        assert part in err


def test_a_subject_that_nobody_knows_is_a_usage_error(capsys):
    assert main(["check", "qwen33"]) == 2
    assert "[check.no-subject] no subject is called 'qwen33'" in capsys.readouterr().err
    assert main(["check", "main:nosuch"]) == 2


def test_a_usage_error_is_json_where_that_was_asked_for(capsys):
    assert main(["verify", "--json"]) == 2
    assert '"code": "cli.missing"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "exit_code", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 3, "system.refused", "free space"),
        (PermissionError(errno.EACCES, "no", "x/y"), 3, "system.refused", "permissions"),
        (OSError(errno.EBADF, "Bad file descriptor"), 4, "internal", "--debug"),
        (KeyError("x"), 4, "internal", "--debug"),
    ],
)
def test_what_nobody_foresaw_is_said_in_the_same_form(
    capsys, monkeypatch, error, exit_code, code, words
):
    """The last net: a refusal of the system is none of our faults and says what to do."""

    def fail(args):
        raise error

    monkeypatch.setattr("torchtitan_ckpt.cli.inspect.run", fail)
    assert main(["inspect", "somewhere", "--json"]) == exit_code
    out, err = capsys.readouterr()
    (problem,) = json.loads(out)["problems"]
    assert problem["code"] == code
    assert words in problem["fix"]
    assert problem["where"] == (getattr(error, "filename", None) or "")
    assert f"[{code}]" in err


NO_CANN = """
raise RuntimeError("Failed to load the backend extension: torch_npu.") from ImportError(
    "libhccl.so: cannot open shared object file"
)
"""


@pytest.mark.parametrize(
    "command",
    [
        ["torchtitan_ckpt", "verify", "fixtures/qwen3/moe", "--deep"],
        ["torchtitan_ckpt.train.launch", "--training.steps", "1"],
        ["torchtitan_ckpt.train", "--training.steps", "1"],
    ],
)
def test_torch_npu_without_cann_is_one_plain_sentence(tmp_path, command):
    (tmp_path / "torch.py").write_text(NO_CANN)
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=root,
        env={"PYTHONPATH": f"{tmp_path}:{root}", "PATH": "", "NGPU": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("[device."), run.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in run.stderr or "pip install" in run.stderr
    assert "Traceback" not in run.stderr
