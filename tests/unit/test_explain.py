"""`explain`: the guide's questions answered for a command line and a disk, without loading."""

import json
import shlex

import pytest

from tests.files.toy import Job
from torchtitan_ckpt.cli import main


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Job("./outputs/x") as job:
        job.train(5, last=5)
    (tmp_path / "outputs/x/checkpoint/step-9").mkdir()
    (tmp_path / "outputs/x/checkpoint/step-010").mkdir()
    return tmp_path


def explain(capsys, text):
    code = main(["explain", *shlex.split(text)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_resume_says_what_is_passed_over_and_why(disk, capsys):
    code, out, _ = explain(capsys, "--dump_folder ./outputs/x --checkpoint.enable")
    assert code == 0
    assert out.startswith("resume from step 4")
    assert "step-5 is newer and is passed over: it holds the model only (DCP)" in out
    assert "step-9 is newer and is passed over: it holds no complete checkpoint" in out
    assert "step-010      only resembles a step" in out
    assert "Why can the last checkpoint not be resumed?" in out


def test_why_was_initial_load_path_not_loaded(disk, capsys):
    path = "--checkpoint.initial_load_path ./outputs/x/checkpoint/step-4"
    _, out, _ = explain(capsys, f"--dump_folder ./outputs/y {path}")
    assert "nothing is loaded" in out
    assert "Why is initial_load_path not loaded? checkpoint.enable is off" in out
    _, out, _ = explain(capsys, f"--dump_folder ./outputs/x --checkpoint.enable {path}")
    assert "already holds step-4, which wins" in out
    assert "Use a new dump_folder" in out
    _, out, _ = explain(capsys, f"--dump_folder ./outputs/y --checkpoint.enable {path}")
    assert out.startswith("start from other weights")
    assert "states   model\n" in out


def test_a_whole_command_of_the_guide_is_accepted(disk, capsys):
    code, out, _ = explain(
        capsys,
        "NGPU=16 CONFIG=qwen3_debug bash scripts/run_train.sh --dump_folder ./outputs/x "
        "--checkpoint.enable --checkpoint.load_step 2 "
        "--checkpoint.exclude_from_loading optimizer,lr_scheduler,dataloader",
    )
    assert code == 0
    assert "resume from step 2" in out
    assert "states   model, train_state" in out


def test_what_cannot_be_loaded_is_the_jobs_own_error(disk, capsys):
    code, out, err = explain(
        capsys, "--dump_folder ./outputs/x --checkpoint.enable --checkpoint.load_step 9"
    )
    assert code == 3
    assert "[resolve.step-broken]" in err
    assert not out
    code, _, err = explain(
        capsys, "--checkpoint.enable --checkpoint.exclude_from_loading data_loader"
    )
    assert code == 2
    assert "did you mean 'dataloader'?" in err
    code, _, err = explain(capsys, "--checkpoint.enable --checkpoint.load_only false")
    assert code == 2
    assert "--checkpoint.no-load-only" in err


def test_json_holds_the_decision(disk, capsys):
    code, out, _ = explain(capsys, "--json --dump_folder ./outputs/x --checkpoint.enable")
    decision = json.loads(out)
    assert (code, decision["action"], decision["step"]) == (0, "resume", 4)
    assert [s["step"] for s in decision["passed_over"]] == [9, 5]


def test_explain_changes_nothing_on_disk(disk, capsys):
    before = sorted((p, p.stat().st_mtime_ns) for p in disk.rglob("*"))
    explain(capsys, "--dump_folder ./outputs/x --checkpoint.enable")
    assert sorted((p, p.stat().st_mtime_ns) for p in disk.rglob("*")) == before


@pytest.mark.parametrize(
    ("path", "actual", "fix"),
    [
        (
            "outputs/x/checkpoint/step-5000",
            "{at}/outputs/x/checkpoint is there, with step-9, step-5, step-4, step-2",
            "--checkpoint.initial_load_path {at}/outputs/x/checkpoint/step-9",
        ),
        (
            "outputs/y/checkpoint/step-4",
            "{at}/outputs is there, with x/checkpoint/step-4",
            "--checkpoint.initial_load_path {at}/outputs/x/checkpoint/step-4",
        ),
        (
            "outptus/x",
            "{at} is there, with outputs/x",
            "--checkpoint.initial_load_path {at}/outputs/x",
        ),
        ("qwen3", "{at} is there, with nothing of a similar name", "correct the path"),
    ],
)
def test_a_path_that_is_not_there_names_its_neighbours(disk, capsys, path, actual, fix):
    code, _, err = explain(
        capsys,
        f"--dump_folder ./outputs/new --checkpoint.enable --checkpoint.initial_load_path {path}",
    )
    assert code == 3
    assert f"  actual   {actual.format(at=disk)}\n" in err
    assert err.rstrip().endswith(f"fix      {fix.format(at=disk)}")
