"""Whether a checkpoint on disk is whole and sound: structure here, the rest in `completeness`
(completeness) and `deep` (every byte). Collects; nothing is raised for what is only wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torchtitan_ckpt.errors import DamagedError, NotFoundError, Problem, RefusedError, list_keys
from torchtitan_ckpt.formats import Detection, detect
from torchtitan_ckpt.formats.dcp_checksums import CHECKSUMS
from torchtitan_ckpt.formats.quantized import detect as detect_quantized
from torchtitan_ckpt.formats.quantized import is_quantized
from torchtitan_ckpt.manifest import Manifest

Progress = Callable[[int, int], None]
_UNREADABLE = ("dcp.metadata-form", "dcp.rank-local", "dcp.compressed")


@dataclass(frozen=True, slots=True)
class Structure:
    """What a look at names, sizes and headers found.

    `problems` make the checkpoint wrong; `notes` are worth knowing. `manifest` is None where too
    little is readable; `unreadable` is then the error to raise.
    """

    detection: Detection
    manifest: Manifest | None
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


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
        return Structure(found, manifest, (), tuple(_left_out(manifest)))
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
    return Structure(found, seen.manifest, tuple(problems))


def _dcp(found: Detection, path: str | os.PathLike[str], trust: bool) -> Structure:
    from torchtitan_ckpt.formats import dcp

    try:
        manifest = dcp.read_manifest(path, trust=trust)
    except (NotFoundError, RefusedError):
        raise
    except DamagedError as error:
        codes = {problem.code for problem in error.problems}
        contradicts = all(c.startswith("dcp.") and c not in _UNREADABLE for c in codes)
        if not contradicts:
            raise
        return Structure(found, None, error.problems)
    return Structure(found, manifest, tuple(_strays(manifest)), tuple(_left_out(manifest)))


def _strays(manifest: Manifest) -> Iterable[Problem]:
    """Data files that no key lies in: another save's, or what a save left behind."""
    used = {shard.file for entry in manifest.tensors.values() for shard in entry.shards}
    used |= {entry.file for entry in manifest.objects.values()}
    # Nones are left out of the manifest, so a file may hold nothing but them.
    nones = "none_keys" in manifest.info
    strays = [n for n in manifest.files if n.endswith((".distcp", ".metadata.tmp"))]
    strays = sorted(n for n in strays if n not in used)
    empty = [n for n in strays if not manifest.files[n] and n.endswith(".distcp")]
    strays = [n for n in strays if n not in empty and not (nones and n.endswith(".distcp"))]
    if strays:
        yield Problem(
            code="dcp.stray-file",
            what=f"{len(strays)} files hold data that .metadata does not name",
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
