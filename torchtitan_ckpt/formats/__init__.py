"""What lies on disk: which format it is and why it is no other, and its manifest.

One module a format does the work (`dcp`, `hf`, `torch_file`); this door looks at names and first
bytes only and imports neither torch nor safetensors until a manifest is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from torchtitan_ckpt.errors import InputError, NotFoundError, Problem, RefusedError, nearest
from torchtitan_ckpt.manifest import Manifest

__all__ = ["FORMATS", "Detection", "detect", "read_manifest"]

FORMATS = ("dcp", "hf", "torch")
_INDEX = ".safetensors.index.json"
_RANK_LOCAL = re.compile(r"__[0-9]+(_[0-9]+)?\.metadata")
_STEP = re.compile(r"step-[0-9]+")
_GLANCES = 64  # folders that are looked into for steps
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class Detection:
    """What a path holds. `format` is one of FORMATS or None; `kind` says more in one word.

    Kinds: `folder` (dcp), `single`, `indexed` or `sharded` (hf), `file` (torch). Without a format:
    `missing`, `unreadable`, `empty`, `unfinished`, `rank-local`, `steps` (a folder of step
    folders), `torch-checkpointing`, `adapter` (LoRA/PEFT), `foreign`. `refused` says of each other
    format why it was not it; `hint` is a better next step than its kind's.
    """

    path: str
    format: str | None
    kind: str
    refused: Mapping[str, str] = field(default_factory=dict)
    hint: str = ""

    def error(self) -> InputError:
        """The error for a path that was expected to be a checkpoint."""
        code, what, fix = _WORDS.get(self.kind, _WORDS["foreign"])
        reasons = self.refused if len(set(self.refused.values())) > 1 else {}
        problem = Problem(
            code=f"detect.{code}",
            what=what,
            where=self.path,
            actual="; ".join(f"{name}: {why}" for name, why in reasons.items())
            or next(iter(self.refused.values()), ""),
            fix=self.hint or fix,
        )
        kind = NotFoundError if self.kind in ("missing", "empty", "unfinished") else RefusedError
        return kind(problem)


_WORDS = {
    "missing": ("missing", "there is no such file or folder", "check the path"),
    "unreadable": ("unreadable", "the path cannot be read", "check its permissions"),
    "empty": ("empty", "the folder is empty", "name the step folder, or use another step"),
    "unfinished": (
        "unfinished",
        "a save or a copy that did not finish",
        "use another step, or copy the checkpoint again",
    ),
    "rank-local": (
        "rank-local",
        "a DCP without common metadata: every rank wrote its own",
        "load it with dcp.load(use_collectives=False) on as many ranks and save again",
    ),
    "steps": ("steps", "a folder of steps, not a step", "name one of its step folders"),
    "torch-checkpointing": (
        "torch-checkpointing",
        "a folder of the torch_checkpointing package, which is not read here",
        "load it with torch_checkpointing and save it as DCP",
    ),
    "adapter": (
        "adapter",
        "LoRA or PEFT adapter weights, not a model",
        "merge the adapter into its base model first",
    ),
    "foreign": ("foreign", "no checkpoint of a known format", "name a step folder or a .pt file"),
}


def detect(path: str | os.PathLike[str]) -> Detection:
    """What lies at a local path or an fsspec URL, from names and first bytes. Never raises for
    what it finds there; `Detection.error` makes the error."""
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        return _remote(text)
    local = Path(text.removeprefix("file://"))
    try:
        if not local.exists():
            refused = dict.fromkeys(FORMATS, "nothing is there")
            return Detection(text, None, "missing", refused, _sibling(local))
        if local.is_file():
            return _file(local)
        if not local.is_dir():
            return _nothing(text, "foreign", "neither a file nor a folder")
        with os.scandir(local) as entries:
            found = {e.name: e.is_dir() for e in entries}
    except OSError as error:
        return _nothing(text, "unreadable", error.strerror or str(error))
    return _folder(text, found, local)


def read_manifest(path: str | os.PathLike[str], *, trust: bool = False) -> Manifest:
    """The manifest of a checkpoint of any format. Raises what its format's reader raises, and
    `Detection.error` when there is none."""
    found = detect(path)
    if found.format == "dcp":
        from torchtitan_ckpt.formats import dcp_manifest

        return dcp_manifest.read_manifest(path, trust=trust)
    if found.format == "torch":
        from torchtitan_ckpt.formats import torch_file

        return torch_file.read_manifest(path, trust=trust)
    if found.format == "hf":
        from torchtitan_ckpt.formats import hf

        return hf.read_manifest(os.fspath(path))
    raise found.error()


def _nothing(path: str, kind: str, why: str) -> Detection:
    return Detection(path, None, kind, dict.fromkeys(FORMATS, why))


def _remote(url: str) -> Detection:
    from torchtitan_ckpt.formats.folders import open_folder

    try:
        sizes = open_folder(url).sizes()
    except NotFoundError:
        return _nothing(url, "missing", "nothing is there")
    except InputError as error:
        return _nothing(url, "unreadable", error.problems[0].what)
    found = _folder(url, dict.fromkeys(sizes, False))
    if found.format == "hf":
        refused = {**found.refused, "hf": "safetensors are read from local folders only"}
        return Detection(url, None, "foreign", refused)
    return found


def _file(path: Path) -> Detection:
    text = str(path)
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        return _nothing(text, "unreadable", error.strerror or str(error))
    refused = {"dcp": "a file, not a folder", "hf": "not named .safetensors"}
    if head.startswith((b"PK\x03\x04", bytes.fromhex("80028a0a6cfc9c46f9206aa8"))):
        return Detection(text, "torch", "file", refused)
    if path.suffix == ".safetensors":
        refused = {"dcp": "a file, not a folder", "torch": "it does not start like torch.save's"}
        return Detection(text, "hf", "single", refused)
    refused["torch"] = "it is empty" if not head else "it does not start like torch.save's"
    unfinished = not head and path.suffix in _TORCH_SUFFIXES
    return Detection(text, None, "unfinished" if unfinished else "foreign", refused)


def _folder(path: str, found: Mapping[str, bool], local: Path | None = None) -> Detection:
    files = [name for name, is_dir in found.items() if not is_dir]
    index = [n for n in files if n.endswith(_INDEX)]
    tensors = [n for n in files if n.endswith(".safetensors")]
    refused = {
        "dcp": "it has no .metadata",
        "hf": "it has no .safetensors file and no index",
        "torch": "a folder, not a file",
    }
    if ".metadata" in files:
        if index or tensors:
            refused["hf"] = "it has .safetensors files too, but .metadata says DCP"
        del refused["dcp"]
        return Detection(path, "dcp", "folder", refused)
    adapters = [n for n in files if n.startswith("adapter_")]
    if adapters and not index and all(n.startswith("adapter_") for n in tensors):
        refused["hf"] = f"{adapters[0]} belongs to an adapter"
        return Detection(path, None, "adapter", refused)
    if index or tensors:
        del refused["hf"]
        kind = "indexed" if index else "single" if len(tensors) == 1 else "sharded"
        return Detection(path, "hf", kind, refused)
    if not found:
        return _nothing(path, "empty", "the folder is empty")
    if any(_RANK_LOCAL.fullmatch(n) for n in files):
        refused["dcp"] = "it has metadata of single ranks, no common one"
        return Detection(path, None, "rank-local", refused)
    if any(n.endswith((".distcp", ".metadata.tmp")) for n in files):
        refused["dcp"] = "it has data files but no .metadata, which a save writes last"
        return Detection(path, None, "unfinished", refused)
    if "metadata.pkl" in files:
        refused["dcp"] = "it has metadata.pkl of torch_checkpointing instead of .metadata"
        return Detection(path, None, "torch-checkpointing", refused)
    folders = [name for name, is_dir in found.items() if is_dir]
    newest = _newest(folders)
    if newest:
        return Detection(path, None, "steps", refused, _named(f"{path.rstrip('/')}/{newest}"))
    archives = [n for n in files if n.endswith(_TORCH_SUFFIXES)]
    if archives:
        refused["torch"] = f"a folder; name the file itself, such as {sorted(archives)[0]}"
    below = "" if local is None else _newest_below(local, path, folders)
    return Detection(path, None, "foreign", refused, below and _named(below))


def _named(step: str) -> str:
    return f"name a step folder; the newest in it is {step}"


def _sibling(path: Path) -> str:
    """What there is of nearly this name, for a path that is not there."""
    try:
        with os.scandir(path.parent) as entries:
            near = nearest(path.name, (e.name for e in islice(entries, 10_000)))
    except OSError:
        return ""
    return f"check the path; of a like name there is {near}" if near else ""


def _newest(folders: Iterable[str]) -> str:
    steps = [name for name in folders if _STEP.fullmatch(name)]
    return max(steps, key=lambda name: int(name.partition("-")[2]), default="")


def _newest_below(root: Path, path: str, folders: Iterable[str]) -> str:
    """The newest step one floor further down, as in the dump folder of a job."""
    for name in sorted(folders)[:_GLANCES]:
        try:
            with os.scandir(root / name) as entries:
                newest = _newest(e.name for e in islice(entries, 10_000) if e.is_dir())
        except OSError:
            continue
        if newest:
            return f"{path.rstrip('/')}/{name}/{newest}"
    return ""
