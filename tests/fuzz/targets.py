"""What the fuzzer feeds: one function and the first inputs a format. A target returns or raises an
error of the tree; anything else, a call that would run code, or seconds over one input is a find.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.formats import dcp_manifest, hf_header, hf_index, pickles, torch_file

FIXTURES = Path(__file__).parents[2] / "fixtures"
RUNS_CODE = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")

Target = Callable[[bytes], None]
Made = tuple[Target, Iterable[bytes]]


class Found(Exception):
    """Something that reading a file must never do."""


def refuse_code(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook of the interpreter: reading never runs code."""
    if event in RUNS_CODE:
        raise Found(f"{event} {args!r:.200}")


def target_of(name: str, folder: Path) -> tuple[Target, list[bytes]]:
    """The target of a format, with its scratch files in `folder`, and its first inputs."""
    run, seeds = FORMATS[name](folder)

    def target(data: bytes) -> None:
        try:
            run(data)
        except CheckpointError as error:
            str(error)  # its words are made of the input too

    return target, list(seeds)


def _metadata(folder: Path) -> Made:
    """`.metadata` beside the data files that one of the first inputs speaks of."""
    step = FIXTURES / "dcp" / "handmade-2.4"
    for file in step.glob("*.distcp"):
        (folder / file.name).write_bytes(file.read_bytes())

    def run(data: bytes) -> None:
        (folder / ".metadata").write_bytes(data)
        dcp_manifest.read_manifest(folder)

    paths = sorted((FIXTURES / "dcp").glob("*/.metadata"), key=lambda path: path.stat().st_size)
    return run, (path.read_bytes() for path in paths)


def _objects(folder: Path) -> Made:
    """The pickle inside a DCP item or a `.pt`, past the checksum that would hide it."""

    def run(data: bytes) -> None:
        pickles.load_values(data, rebuild=lambda ref: ref, where="data.pkl")

    values = (
        {"a": torch.ones(2, 3), "b": [1, 2.5, None, b"x", "y"], "c": (True, {"d": {3}})},
        torch.nn.Parameter(torch.ones(2).bfloat16()),
    )
    plain = [pickle.dumps([1, "a", {"b": (2.5, None)}], protocol) for protocol in (2, 3, 4, 5)]
    inner = [zipfile.ZipFile(io.BytesIO(_saved(v))).read("archive/data.pkl") for v in values]
    attacks = sorted((FIXTURES / "damaged" / "pickles").glob("*.pkl"))
    small = (path.read_bytes() for path in attacks if path.stat().st_size < 10_000)
    return run, [*plain, *inner, *small]


def _torch(folder: Path) -> Made:
    """A whole `.pt`, in memory as an object of a DCP and on disk as a checkpoint."""
    path = folder / "x.pt"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(CheckpointError):
            torch_file.read_manifest(path)
        pickles.load_object(data)

    state = {"a": torch.arange(6.0).reshape(2, 3), "n": {"b": torch.ones(5).bfloat16()}, "s": 3}
    return run, [_saved(state), _saved({"x": 1, "y": "text"}), _saved(torch.ones(3))]


def _hf_header(folder: Path) -> Made:
    path = folder / "model.safetensors"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        hf_header.read_header(path)

    state = {"a": torch.ones(2, 3), "b.c": torch.ones(4).bfloat16(), "e": torch.empty(0, 2)}
    whole = save(state, {"format": "pt"})
    return run, [whole, save({"x": torch.ones(1)}), b"\x02" + bytes(7) + b"{}"]


def _hf_index(folder: Path) -> Made:
    (folder / "model-00001-of-00002.safetensors").write_bytes(save({"a": torch.ones(2, 3)}))
    (folder / "model-00002-of-00002.safetensors").write_bytes(save({"b": torch.ones(4)}))
    path = folder / "model.safetensors.index.json"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        hf_index.survey(folder)

    files = {key: f"model-0000{i}-of-00002.safetensors" for i, key in ((1, "a"), (2, "b"))}
    first = {"metadata": {"total_size": 40}, "weight_map": files}
    outside = {"weight_map": {"a": "../x.safetensors", "b": "/etc/x.safetensors"}}
    return run, [json.dumps(tree).encode() for tree in (first, outside)]


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


FORMATS: dict[str, Callable[[Path], Made]] = {
    "metadata": _metadata,
    "objects": _objects,
    "torch": _torch,
    "hf_header": _hf_header,
    "hf_index": _hf_index,
}
