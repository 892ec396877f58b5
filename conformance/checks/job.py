"""Chapter `job`: real training jobs over real files, each in a process of its own.

Files written by another library start a job, the job is stopped and resumed, and what it exports is
laid beside those files. Jobs are those of the subject's trainer, by default the reference job of
`torchtitan_ckpt.train`; comparisons are bitwise.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.fingerprint import same_bits
from conformance.lab import AdapterRaised, Lab, NotApplicable
from conformance.managed import brief
from conformance.verdict import Finding
from torchtitan_ckpt.adapter import MappingAdapter
from torchtitan_ckpt.formats import dcp, hf
from torchtitan_ckpt.manifest import Manifest

STEPS = 6


class JobFailed(AdapterRaised):
    """A job of this chapter ended with an error."""

    def __init__(self, code: int, command: list[str], stderr: str) -> None:
        last = " | ".join(line.strip() for line in stderr.splitlines()[-6:])
        self.direction, self.error = "job", self
        words = f"a training job ended with exit code {code}: {last}"
        Exception.__init__(self, f"{words} ({shlex.join(command[1:])})")


@dataclass(frozen=True)
class Runs:
    """One job that was never stopped, and one that was stopped at 2 and at 4."""

    folder: tempfile.TemporaryDirectory[str]
    whole: list[str]
    cut: list[str]

    def step(self, job: str, step: int) -> str:
        return f"{self.folder.name}/{job}/checkpoint/step-{step}"


def unchanged(lab: Lab) -> Iterator[Finding]:
    """A job that learns nothing gives the files back: keys, shapes, dtypes, values."""
    assets = _assets(lab)
    original = _tensors(assets)
    dtypes = {str(v.dtype) for v in original.values() if v.is_floating_point()}
    if len(dtypes) != 1:
        raise NotApplicable(
            f"an export has one float dtype; the files: {', '.join(sorted(dtypes))}"
        )
    dtype = dtypes.pop().removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        _train(
            lab.subject.trainer,
            assets,
            lab.device.kind.value,
            folder,
            1,
            *("--optimizer.lr", "0", "--optimizer.weight_decay", "0"),
            *("--checkpoint.last_save_in_hf", "--checkpoint.export_dtype", dtype),
        )
        exported = _tensors(f"{folder}/checkpoint/step-1")
    yield from _differences(original, exported, "the files that started the job")


def resume(lab: Lab) -> Iterator[Finding]:
    """Stopped twice and resumed: losses and the whole state equal the run never stopped."""
    runs = _runs(_assets(lab), lab.device.kind.value, lab.subject.trainer)
    if runs.whole != runs.cut:
        first = next(
            (n for n, (a, b) in enumerate(zip(runs.whole, runs.cut, strict=False)) if a != b),
            min(len(runs.whole), len(runs.cut)),
        )
        yield Finding(
            what="losses after a resume differ from the run that was never stopped",
            coordinate=f"step {first + 1}",
            expected=_at(runs.whole, first),
            actual=_at(runs.cut, first),
            cause="a state that was not saved, not loaded, or changed by saving",
            remedy="compare the two step folders with torchtitan-ckpt diff",
        )
    whole, cut = (_state(runs.step(job, 4)) for job in ("whole", "cut"))
    yield from _differences(whole, cut, "the run that was never stopped, at step 4")


def export(lab: Lab) -> Iterator[Finding]:
    """The trained model exports under the files' keys, shapes and values of its last step."""
    assets = _assets(lab)
    runs = _runs(assets, lab.device.kind.value, lab.subject.trainer)
    exported = _tensors(runs.step("cut", STEPS))
    yield from _keys(_tensors(assets), exported, "the files that started the job")
    native = _model(runs.step("whole", STEPS))
    expected = MappingAdapter(assets).to_hf(native)
    cast = {key: value.to(torch.bfloat16) for key, value in expected.items()}
    yield from _values(cast, exported, "the last step of the run that was never stopped")


@functools.cache
def _runs(assets: str, device: str, trainer: tuple[str, ...]) -> Runs:
    folder = tempfile.TemporaryDirectory(prefix="ckpt-job-")
    train = functools.partial(_train, trainer, assets, device)
    full = ("--checkpoint.no-last_save_model_only",)
    whole = train(f"{folder.name}/whole", STEPS, *full)
    cut = train(f"{folder.name}/cut", 2, *full)
    cut += train(f"{folder.name}/cut", 4, *full)
    cut += train(
        f"{folder.name}/cut",
        STEPS,
        *("--checkpoint.last_save_in_hf", "--checkpoint.export_dtype", "bfloat16"),
    )
    return Runs(folder, whole, cut)


def _train(
    trainer: tuple[str, ...], assets: str, device: str, folder: str, steps: int, *flags: str
) -> list[str]:
    """Run a job in a process; its loss of each step, exact."""
    command = [
        *(sys.executable, *trainer, "--config", "qwen3_from_assets"),
        *("--device", device, "--hf_assets_path", assets, "--dump_folder", folder),
        *("--training.steps", str(steps), "--checkpoint.enable", "--checkpoint.interval", "2"),
        *("--checkpoint.initial_load_in_hf", *flags),
    ]
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    run = subprocess.run(command, capture_output=True, text=True, env=plain)
    if run.returncode:
        raise JobFailed(run.returncode, command, run.stderr)
    return re.findall(r"loss_hex=(\S+)", run.stdout)


def _assets(lab: Lab) -> str:
    assert lab.subject.job is not None
    return str(Path(lab.subject.job).absolute())


def _tensors(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder, as the safetensors library reads it."""
    from safetensors.torch import load_file

    out: dict[str, torch.Tensor] = {}
    for file in sorted(hf.read_manifest(folder).files):
        out.update(load_file(Path(folder) / file))
    return out


def _state(step: str) -> dict[str, Any]:
    manifest = dcp.read_manifest(step)
    return dcp.load(step, _targets(manifest), manifest=manifest)


def _model(step: str) -> dict[str, Any]:
    manifest = dcp.read_manifest(step)
    training = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
    wanted = {k: v for k, v in _targets(manifest).items() if not k.startswith(training)}
    return dcp.load(step, wanted, manifest=manifest)


def _targets(manifest: Manifest) -> dict[str, Any]:
    tensors = {
        key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for key, entry in manifest.tensors.items()
    }
    return {**tensors, **dict.fromkeys(manifest.objects)}


def _differences(
    expected: dict[str, Any], actual: dict[str, Any], oracle: str
) -> Iterator[Finding]:
    """Keys on one side, then dtypes, shapes and bytes; one finding a kind."""
    yield from _keys(expected, actual, oracle)
    yield from _values(expected, actual, oracle)


def _keys(expected: dict[str, Any], actual: dict[str, Any], oracle: str) -> Iterator[Finding]:
    for what, keys, remedy in (
        ("keys are missing", expected.keys() - actual.keys(), "write every state and weight"),
        ("keys are extra", actual.keys() - expected.keys(), "write nothing that is not known"),
    ):
        if keys:
            yield Finding(
                what=f"{len(keys)} {what}",
                keys=tuple(sorted(keys)),
                expected=f"{len(expected)} keys",
                actual=f"{len(actual)} keys",
                remedy=remedy,
                oracle=oracle,
            )


def _values(expected: dict[str, Any], actual: dict[str, Any], oracle: str) -> Iterator[Finding]:
    """Dtypes, shapes and bytes of the keys that both sides have."""
    wrong = [
        k for k in sorted(expected.keys() & actual.keys()) if not _same(expected[k], actual[k])
    ]
    if wrong:
        yield Finding(
            what=f"{len(wrong)} values differ",
            keys=tuple(wrong),
            expected=brief(expected[wrong[0]])[:160],
            actual=brief(actual[wrong[0]])[:160],
            oracle=oracle,
            remedy="torchtitan-ckpt diff shows where",
        )


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(type(a) is type(b) and a == b)
    return a.shape == b.shape and same_bits(a, b)


def _at(lines: list[str], index: int) -> str:
    return lines[index] if index < len(lines) else "no such step"
