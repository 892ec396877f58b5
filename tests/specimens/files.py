"""Writers, folders and forward passes broken on purpose, each named for its check."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import StackSummary
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from conformance import Subject, codec
from tests.specimens import right
from tests.specimens.right import Right
from tests.specimens.specimen import BLIND, Specimen

Change = Callable[[Path], None]


class Plain:
    """A right codec over safetensors, for edits: a fresh folder, files, then the index."""

    name = "the right codec"

    def save(self, state_dict: dict[str, Any], folder: str, files: Mapping[str, int]) -> None:
        for old in Path(folder).iterdir():
            old.unlink()
        codec.write(state_dict, folder, files)

    def load(self, folder: str, targets: dict[str, Any]) -> None:
        for key, value in codec.read_indexed(folder).items():
            if key in targets:
                targets[key].copy_(value)


def after(change: Change) -> type:
    """The right codec, and then a change of the folder."""

    class Changed(Plain):
        def save(self, state_dict: dict[str, Any], folder: str, files: Mapping[str, int]) -> None:
            super().save(state_dict, folder, files)
            change(Path(folder))

    return Changed


def saving(change: Callable[[dict[str, Any]], dict[str, Any]]) -> type:
    """The right codec of changed tensors."""

    class Saving(Plain):
        def save(self, state_dict: dict[str, Any], folder: str, files: Mapping[str, int]) -> None:
            super().save(change(state_dict), folder, files)

    return Saving


def index(change: Callable[[dict[str, Any]], None]) -> Change:
    def run(folder: Path) -> None:
        path = folder / codec.INDEX
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return run


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cast(kind: Callable[[torch.Tensor], bool], dtype: torch.dtype) -> Any:
    return saving(lambda s: {k: v.to(dtype) if kind(v) else v for k, v in s.items()})


class Appends(Plain):
    """Old files stay in the folder."""

    def save(self, state_dict: dict[str, Any], folder: str, files: Mapping[str, int]) -> None:
        codec.write(state_dict, folder, files)


class KeepsOldIndex(Plain):
    """Copying the assets puts the old index over the new one."""

    def save(self, state_dict: dict[str, Any], folder: str, files: Mapping[str, int]) -> None:
        path = Path(folder, codec.INDEX)
        old = path.read_text() if path.exists() else None
        super().save(state_dict, folder, files)
        if old is not None:
            path.write_text(old)


class TakesAnyFile(Plain):
    """Reads every tensor as fp32, whatever it is."""

    def load(self, folder: str, targets: dict[str, Any]) -> None:
        for key, value in codec.read_indexed(folder).items():
            if key in targets:
                targets[key].copy_(value.float().to(targets[key].dtype))


class LeavesOut(Plain):
    """Fills only the first file's keys."""

    def load(self, folder: str, targets: dict[str, Any]) -> None:
        first = codec.headers(files_of(Path(folder))[0])
        for key, value in codec.read_indexed(folder).items():
            if key in targets and key in first:
                targets[key].copy_(value)


class RefusesAsTorch(Plain):
    """Raises what DCP's writers raise, which is no Exception."""

    def save(self, state_dict: dict[str, Any], folder: str, files: Mapping[str, int]) -> None:
        error = ValueError("hard.bool: no such dtype")
        raise CheckpointException("save", {0: (error, StackSummary())})


def _cut_index(folder: Path) -> None:
    path = folder / codec.INDEX
    path.write_text(path.read_text()[:-2])


def _empty_file(folder: Path) -> None:
    first = files_of(folder)[0]
    first.write_bytes(b"\x00" * 78)


def _cut(folder: Path) -> None:
    last = files_of(folder)[-1]
    last.write_bytes(last.read_bytes()[: last.stat().st_size * 2 // 3])


def _twice(folder: Path) -> None:
    one, two = files_of(folder)[:2]
    from safetensors.torch import load_file

    state = load_file(two)
    key = next(iter(load_file(one)))
    save_file({**state, key: torch.zeros(3)}, two)


def _stray(folder: Path) -> None:
    save_file({"old.weight": torch.zeros(3)}, folder / "old.safetensors")


def _gone(folder: Path) -> None:
    files_of(folder)[1].unlink()


def _zero(v: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(v) if v.dim() == 0 else v


def _folder(change: Change) -> Callable[[], Subject]:
    """A subject that is nothing but a folder of files."""

    def make() -> Subject:
        folder = Path(tempfile.mkdtemp(prefix="specimen-"))
        state = {f"layers.{i}.weight": torch.full((3, 4), float(i)) for i in range(12)}
        codec.write(state, folder, {k: i % 3 + 1 for i, k in enumerate(state)})
        change(folder)
        return Subject(name="folder", hf=str(folder))

    return make


def _writer(
    name: str, check: str, key: str, made: type, kinds: str, alone: bool = False
) -> Specimen:
    return Specimen(name, check, key, Right, kinds, alone, {**BLIND, "codec": made()})


def _other_logits(lab: Any) -> tuple[torch.Tensor, torch.Tensor, str]:
    ours = torch.linspace(-1, 1, 20).reshape(1, 4, 5)
    return ours, ours.flip(2), "another implementation"


SPECIMENS: tuple[Specimen, ...] = (
    _writer(
        "no-index",
        "files.index",
        "hard.int64",
        after(lambda f: (f / codec.INDEX).unlink()),
        "HFS-05",
        True,
    ),
    _writer(
        "wrong-total-size",
        "files.index",
        "hard.int64",
        after(index(lambda c: c["metadata"].update(total_size=1))),
        "HFS-05",
    ),
    _writer(
        "index-lists-absent-key",
        "files.index",
        "lm_head.weight",
        after(
            index(
                lambda c: c["weight_map"].setdefault(
                    "lm_head.weight.old", next(iter(c["weight_map"].values()))
                )
            )
        ),
        "TIE-03",
    ),
    _writer(
        "index-lacks-a-key",
        "files.index",
        "hard.bool",
        after(index(lambda c: c["weight_map"].pop("hard.bool"))),
        "HFS-05",
    ),
    _writer(
        "index-names-absent-file",
        "files.index",
        "hard.bool",
        after(index(lambda c: c["weight_map"].update({"hard.bool": "model-9.safetensors"}))),
        "HFS-03",
    ),
    _writer("index-cut-short", "files.index", codec.INDEX, after(_cut_index), "HFS-05"),
    _writer("refuses-as-torch-does", "files.index", "hard.bool", RefusesAsTorch, ""),
    _writer("file-of-78-bytes", "files.index", "model-00001", after(_empty_file), "TIE-03"),
    _writer("file-cut-short", "files.index", "model-00003", after(_cut), ""),
    _writer(
        "empty-tensors-left-out",
        "files.index",
        "hard.empty",
        saving(lambda s: {k: v for k, v in s.items() if v.numel()}),
        "",
    ),
    _writer("stray-file", "files.index", "old.weight", after(_stray), "HFS-02"),
    _writer(
        "integers-as-floats",
        "files.reread",
        "hard.int64",
        cast(lambda v: v.dtype == torch.int64, torch.float32),
        "DTY-02",
        True,
    ),
    _writer(
        "booleans-as-bytes",
        "files.reread",
        "hard.bool",
        cast(lambda v: v.dtype == torch.bool, torch.uint8),
        "DTY-02",
    ),
    _writer(
        "scalars-are-zero",
        "files.reread",
        "hard.scalar",
        saving(lambda s: {k: _zero(v) for k, v in s.items()}),
        "DTY-02",
    ),
    _writer(
        "doubles-as-floats",
        "files.reread",
        "hard.fp64",
        cast(lambda v: v.dtype == torch.float64, torch.float32),
        "DTY-05",
    ),
    _writer(
        "fp8-through-fp32",
        "files.reread",
        "hard.fp8",
        cast(lambda v: v.dtype == torch.float8_e4m3fn, torch.float32),
        "FP8-03",
    ),
    _writer("reads-as-fp32", "files.reread", "hard.int64", TakesAnyFile, "DTY-05"),
    _writer("reads-the-first-file", "files.reread", "hard.bool", LeavesOut, "HFS-03, GEO-05"),
    _writer("old-files-stay", "files.reexport", "hard.bool", Appends, "HFS-01", True),
    _writer("old-index-kept", "files.reexport", "hard.bool", KeepsOldIndex, "HFS-06"),
    Specimen(
        "folder-with-a-file-gone",
        "files.index",
        "layers.1.weight",
        kinds="HFS-03",
        make=_folder(_gone),
    ),
    Specimen(
        "folder-with-a-key-twice",
        "files.index",
        "layers.0.weight",
        kinds="HFS-02",
        make=_folder(_twice),
    ),
    Specimen(
        "folder-with-a-stray", "files.index", "old.weight", kinds="HFS-02", make=_folder(_stray)
    ),
    Specimen(
        "other-logits",
        "forward.logits",
        "other-logits",
        Right,
        "LAY-08",
        True,
        make=lambda: right.subject(
            "other-logits", Right, forward=_other_logits, listed=False, referenced=False
        ),
    ),
)
