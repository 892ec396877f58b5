"""Whether a checkpoint on disk is whole and sound: structure here, the rest in `completeness`
(completeness) and `deep` (every byte). Collects; nothing is raised for what is only wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from torchtitan_ckpt.errors import DamagedError, Problem, RefusedError, list_keys
from torchtitan_ckpt.formats import Detection, detect
from torchtitan_ckpt.formats.dcp_checksums import CHECKSUMS
from torchtitan_ckpt.formats.quantized import detect as detect_quantized
from torchtitan_ckpt.formats.quantized import is_quantized
from torchtitan_ckpt.manifest import Manifest

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Structure:
    """What a look at names, sizes and headers found.

    `problems` make the checkpoint wrong; `notes` are worth knowing. `manifest` is all that the
    checkpoint describes, `sound` the part of it that can be read: of a tensor, the shards that can.
    """

    detection: Detection
    manifest: Manifest
    sound: Manifest
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def unread(self) -> list[str]:
        """Keys that cannot be read, or not whole."""
        parts = self.sound.tensors
        tensors = self.manifest.tensors.items()
        return [
            *(k for k, e in tensors if k not in parts or len(parts[k].shards) < len(e.shards)),
            *(key for key in self.manifest.objects if key not in self.sound.objects),
        ]


def check_structure(path: str | os.PathLike[str], *, trust: bool = False) -> Structure:
    """Check that files, sizes, offsets, shards and names fit together; reads no tensor.

    Raises `NotFoundError` and `RefusedError` for what is no checkpoint or must not be read, and
    `DamagedError` for one whose description cannot be understood at all.
    """
    found = detect(path)
    if found.format == "hf":
        return _hf(found)
    if found.format == "dcp":
        return _dcp(found, path, trust)
    if found.format == "torch":
        from torchtitan_ckpt.formats import torch_file

        manifest = torch_file.read_manifest(path, trust=trust)
        return Structure(found, manifest, manifest, (), tuple(_left_out(manifest)))
    raise found.error()


def _hf(found: Detection) -> Structure:
    from torchtitan_ckpt.formats import hf

    seen = hf.survey(found.path.removeprefix("file://"))
    if seen.manifest is None:
        kind = DamagedError if seen.problems else RefusedError
        raise kind(*seen.problems, *seen.refused)
    problems = [*seen.problems, *seen.refused, *seen.notes]
    if not seen.problems and not seen.refused and is_quantized(seen.manifest):
        try:
            detect_quantized(seen.manifest)
        except RefusedError as error:
            problems += error.problems
    return Structure(found, seen.manifest, seen.manifest, tuple(problems))


def _dcp(found: Detection, path: str | os.PathLike[str], trust: bool) -> Structure:
    from torchtitan_ckpt.formats import dcp

    seen = dcp.survey(path, trust=trust)
    if seen.refused:
        raise RefusedError(*seen.problems)
    problems = (*seen.problems, *_strays(seen.manifest, seen.named))
    notes = tuple(_left_out(seen.manifest))
    return Structure(found, seen.manifest, seen.sound, problems, notes)


def _strays(manifest: Manifest, named: Collection[str]) -> Iterable[Problem]:
    """Data files that no key lies in: another save's, or what a save left behind."""
    strays = [n for n in manifest.files if n.endswith((".distcp", ".metadata.tmp"))]
    strays = sorted(n for n in strays if n not in named)
    strays = [n for n in strays if manifest.files[n] or not n.endswith(".distcp")]
    if strays:
        yield Problem(
            code="dcp.stray-file",
            what=f"{len(strays)} files of other saves, which .metadata does not name",
            where=manifest.path,
            actual=", ".join(strays[:8]) + (f" and {len(strays) - 8} more" * (len(strays) > 8)),
            cause="a save over an older one with more ranks, or a save that was interrupted",
            fix="remove them; nothing reads them",
        )


def _left_out(manifest: Manifest) -> Iterable[str]:
    nones = manifest.info.get("none_keys")
    if nones:
        yield f"a pickled None counts as absent: {list_keys(nones.split(chr(10)))}"


def has_checksums(manifest: Manifest) -> bool:
    """Whether a checkpoint carries checksums of this project's writer."""
    return manifest.format == "dcp" and CHECKSUMS in manifest.files


def local_path(path: str | os.PathLike[str]) -> Path:
    return Path(os.fspath(path).removeprefix("file://"))
