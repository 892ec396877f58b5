"""The reference job when nobody reads its lines, and when it is interrupted."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_ckpt.config import CheckpointConfig
from torchtitan_ckpt.train import registry, trainer
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
