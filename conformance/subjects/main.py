"""The main job: Qwen3 checkpoints that transformers wrote, put through real training jobs.

`main:dense-untied`, `main:dense-tied` and `main:moe` are committed under `fixtures/qwen3`, so they
are found in a checkout and not in an installed package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from conformance.subject import Subject
from conformance.subjects import families
from conformance.verdict import Report
from torchtitan_ckpt.errors import ConfigError, NotFoundError, Problem, nearest
from torchtitan_ckpt.formats import hf

NAMES = ("main:dense-untied", "main:dense-tied", "main:moe")
# What a pass of each check of real jobs says in full.
_PROOFS = {
    "job.unchanged": "files -> job -> files: a job that learned nothing gave them back, bitwise "
    "compared with what the reference writer wrote: keys, shapes, dtypes, values",
    "job.resume": "a job stopped at steps 2 and 4 and resumed each time: every loss, and the whole "
    "state of step-4, bitwise compared with a run that was never stopped",
    "job.export": "the last step as Hugging Face safetensors: keys and shapes of the reference "
    "writer's files, values bitwise compared with the run that was never stopped, in bfloat16",
}
_FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "qwen3"


def subject(name: str) -> Subject:
    """A subject of the main job: the adapter on the checkpoint's config, and the job itself."""
    folder = _FOLDER / name.removeprefix("main:")
    if name not in NAMES or not folder.is_dir():
        near = nearest(name, NAMES)
        raise (NotFoundError if name in NAMES else ConfigError)(
            Problem(
                code="check.no-main-job",
                what=f"there is no main job {name!r} here",
                where=str(_FOLDER),
                expected=", ".join(NAMES),
                cause="" if near else "the fixtures are in a checkout only",
                fix=f"did you mean {near}?"
                if near
                else "run bash scripts/check.sh in a checkout, or name a subject of yours",
            )
        )
    config = json.loads((folder / "config.json").read_text())
    return families.of_config(name, config, job=str(folder))


def proofs(report: Report) -> str:
    """What the real jobs of a report have proved, in words; empty where it ran none of them."""
    lines = [line for name in report.subjects if name in NAMES for line in _proofs(report, name)]
    head = "what the real jobs proved, each in processes of its own"
    return "\n".join([head, *lines]) if lines else ""


def _proofs(report: Report, name: str) -> Iterator[str]:
    cells = {c.check: c for c in report.cells if c.subject == name and c.check in _PROOFS}
    if not cells:
        return
    folder = _FOLDER / name.removeprefix("main:")
    writer = json.loads((folder / "config.json").read_text()).get("transformers_version", "")
    manifest = hf.read_manifest(folder)
    dtypes = ", ".join(sorted({entry.dtype for entry in manifest.tensors.values()}))
    yield (
        f"  fixtures/qwen3/{folder.name}: {len(manifest.tensors)} tensors, {dtypes}, written by "
        f"transformers {writer}"
    )
    for check, cell in cells.items():
        how = "proved" if cell.verdict == "pass" else f"not proved ({cell.verdict})"
        yield f"    {how:<8} {_PROOFS[check]}"
