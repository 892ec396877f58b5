"""`.pt` files: describe them without their data, load from them, and write them entry by entry.

A `.pt` file is one torch.save archive (torch_zip.py) of a dict. Nested dicts are described with
their keys joined by dots. What is written loads with `torch.load(weights_only=True)`, mapped too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_ckpt.errors import CheckpointError, DamagedError, Problem, RefusedError
from torchtitan_ckpt.formats.folders import File, open_folder
from torchtitan_ckpt.formats.pickle_parts import check_plain
from torchtitan_ckpt.formats.pickles import TensorRef
from torchtitan_ckpt.formats.torch_zip import Archive, Payload
from torchtitan_ckpt.manifest import ITEM_SIZE, Manifest, ObjectEntry, Shard, TensorEntry

if TYPE_CHECKING:
    from torchtitan_ckpt.formats.torch_file_write import TorchFileWriter as TorchFileWriter

_OLD_FORMAT = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
_MAX_PICKLE = 2 * 2**30
_MAX_DEPTH = 64


def read_manifest(path: str | os.PathLike[str], *, trust: bool = False) -> Manifest:
    """Describe a `.pt` file. Raises `NotFoundError`, `DamagedError` or `RefusedError`.

    A tensor that does not lie in row-major order (a transposed one) is named in
    `info["strided"]`, one a line; its shard covers the bytes of its whole storage. Keys whose value
    is None are left out and named in `info["none_keys"]`.
    """
    with OpenedFile(path) as opened:
        return opened.manifest(trust=trust)


def load(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    trust: bool = False,
    widen: bool = False,
) -> dict[str, Any]:
    """Fill the tensors of `state` from a `.pt` file and return its keys, as `dcp.load` does."""
    import torch

    from torchtitan_ckpt.formats.box_reads import read_tasks
    from torchtitan_ckpt.formats.dcp_objects import raise_all
    from torchtitan_ckpt.formats.dcp_plan import compare, plan

    with OpenedFile(path) as opened:
        manifest = opened.manifest(trust=trust)
        compare(state, manifest, widen=widen)
        failures: list[CheckpointError] = []
        with torch.no_grad():
            for job in plan(state, manifest):
                try:
                    for task in read_tasks(opened.file, 0, opened.payloads[job.key], job):
                        task()
                except CheckpointError as error:
                    failures.append(error)
        raise_all(failures)
        wanted = {key for key in state if key in manifest.objects}
        values = opened.values() if wanted else {}
    return {key: values[key] if key in wanted else value for key, value in state.items()}


class OpenedFile:
    """An open `.pt` file, its directory read. `manifest` fills `payloads`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fspath(path).removeprefix("file://")
        parent, _, self.name = text.rpartition("/")
        self.path = text
        folder = open_folder(parent or ("/" if text.startswith("/") else "."))
        self.file: File = folder.open(self.name)
        self.payloads: dict[str, Payload] = {}

    def __enter__(self) -> OpenedFile:
        try:
            self._refuse_other_formats()
            self.archive = Archive(self._read, self.file.size, where=self.path)
            if self.archive.member("data.pkl").size > _MAX_PICKLE:
                raise self.archive.refused("over 2 GiB of data.pkl")
        except BaseException:
            self.file.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def _read(self, offset: int, length: int) -> bytes:
        return self.file.read(offset, min(length, max(self.file.size - offset, 0)))

    def _refuse_other_formats(self) -> None:
        head = self._read(0, 64)
        if not head:
            raise DamagedError(
                Problem(code="torch.empty", what="the file is empty", where=self.path)
            )
        if head.startswith(_OLD_FORMAT):
            raise RefusedError(
                Problem(
                    code="torch.old-format",
                    what="a file of torch.save before torch 1.6, which is not read here",
                    where=self.path,
                    fix="load it with torch.load(weights_only=True) and save it again",
                )
            )
        if not head.startswith(b"PK\x03\x04"):
            raise DamagedError(
                Problem(
                    code="torch.not-an-archive",
                    what="not a torch.save archive",
                    where=self.path,
                    expected="a zip file",
                    fix="name a .pt file, or the folder of a checkpoint",
                )
            )

    def manifest(self, *, trust: bool) -> Manifest:
        root = self.archive.describe(trust=trust)
        if isinstance(root, TensorRef):
            root = {"": root}
        if not isinstance(root, Mapping):
            raise RefusedError(
                Problem(
                    code="torch.no-dict",
                    what=f"the file holds a {type(root).__name__}, not a dict of tensors",
                    where=self.path,
                )
            )
        check_plain(root, where=self.path)
        tensors: dict[str, TensorEntry] = {}
        objects: dict[str, ObjectEntry] = {}
        strided: list[str] = []
        nones: list[str] = []
        member = self.archive.member("data.pkl")
        at = self.archive.data_offset(member)
        for key, value in _leaves(root, self.path):
            if key in tensors or key in objects:
                raise DamagedError(
                    Problem(
                        code="torch.twice", what=f"two values are called {key}", where=self.path
                    )
                )
            if value is None:
                nones.append(key)  # a pickled None counts as absent, as in DCP
                continue
            if not isinstance(value, TensorRef):
                objects[key] = ObjectEntry(key, self.name, at, member.size)
                continue
            payload = self.archive.payload(value)
            self.payloads[key] = payload
            start, length = payload.start, payload.nbytes
            item = ITEM_SIZE[payload.dtype]
            if payload.is_row_major:
                start += payload.offset * item
                length = item
                for n in payload.size:
                    length *= n
            else:
                strided.append(key)
            shard = Shard((0,) * len(value.size), value.size, self.name, start, length)
            tensors[key] = TensorEntry(key, value.size, value.dtype, (shard,) if length else ())
        return Manifest(
            path=self.path,
            format="torch",
            tensors=tensors,
            objects=objects,
            files={self.name: self.file.size},
            info={
                name: "\n".join(keys)
                for name, keys in (("strided", strided), ("none_keys", nones))
                if keys
            },
        )

    def values(self) -> Mapping[str, Any]:
        root = self.archive.describe()
        return {
            key: value
            for key, value in _leaves(root, self.path)
            if not isinstance(value, TensorRef)
        }


def _leaves(
    root: Mapping[Any, Any], where: str, prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH:
        raise RefusedError(
            Problem(code="torch.too-deep", what="dicts nested too deep", where=where)
        )
    for name, value in root.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and _holds_tensors(value):
            yield from _leaves(value, where, f"{key}.", depth + 1)
        elif isinstance(value, (list, tuple)) and _holds_tensors(value):
            named = {str(i): part for i, part in enumerate(value)}
            yield from _leaves(named, where, f"{key}.", depth + 1)
        else:
            yield key, value


def _holds_tensors(value: Any) -> bool:
    seen: set[int] = set()
    todo = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, TensorRef):
            return True
        if isinstance(node, (Mapping, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            todo.extend(node.values() if isinstance(node, Mapping) else node)
    return False


def __getattr__(name: str) -> Any:
    """The writer needs torch; describing a file does not."""
    if name == "TorchFileWriter":
        from torchtitan_ckpt.formats.torch_file_write import TorchFileWriter

        return TorchFileWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_torch_file(path: Path) -> bool:
    """Whether a file starts like a torch.save archive, new or old."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_OLD_FORMAT))
    except OSError:
        return False
    return head.startswith(b"PK\x03\x04") or head == _OLD_FORMAT
