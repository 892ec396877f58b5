"""The reference job when nobody reads its lines, and when it or its launcher is stopped."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException

from torchtitan_ckpt.config import CheckpointConfig
from torchtitan_ckpt.train import launch, registry, trainer
from torchtitan_ckpt.train.__main__ import main
from torchtitan_ckpt.train.config import TrainingConfig


def test_a_job_whose_lines_nobody_reads_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`| head -1`, or a log on a full disk: no reason to lose a training."""
    reader, writer = os.pipe()
    os.close(reader)
    job = replace(
        registry.qwen3_debug(),
        dump_folder=str(tmp_path),
        training=TrainingConfig(steps=2, local_batch_size=1, seq_len=8),
        checkpoint=CheckpointConfig(enable=True, interval=1),
    )
    with os.fdopen(writer, "w") as out:
        trainer.run(job, out=out)
    assert (tmp_path / "checkpoint/step-2/.metadata").exists()
    assert [r.message for r in caplog.records if "printed no more" in r.message] == [
        "steps are printed no more, and go on: [Errno 32] Broken pipe"
    ]


def test_an_interrupted_job_says_so_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "run", interrupted)
    assert main(["--dump_folder", str(tmp_path)]) == 130
    assert caplog.messages == ["interrupted"]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_is_stopped_says_so_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stop: signal.Signals
) -> None:
    def stopped(_: list[str]) -> None:
        raise SignalException("in the launcher", stop)

    monkeypatch.setattr(run, "main", stopped)
    monkeypatch.setenv("NGPU", "2")
    assert launch.main(["--dump_folder", "unused"]) == 128 + stop
    assert capsys.readouterr().err == f"the job was stopped by {stop.name}\n"
