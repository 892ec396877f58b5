"""The main job: Qwen3 checkpoints that transformers wrote, put through real training jobs.

`main:dense-untied`, `main:dense-tied` and `main:moe` are committed under `fixtures/qwen3`, so they
are found in a checkout and not in an installed package.
"""

from __future__ import annotations

import json
from pathlib import Path

from conformance.subject import Subject
from conformance.subjects import families
from torchtitan_ckpt.errors import ConfigError, NotFoundError, Problem, nearest

NAMES = ("main:dense-untied", "main:dense-tied", "main:moe")
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
                cause=f"did you mean {near}?" if near else "the fixtures are in a checkout only",
                fix="run bash scripts/check.sh in a checkout, or name a subject of yours",
            )
        )
    config = json.loads((folder / "config.json").read_text())
    return families.of_config(name, config, job=str(folder))
