"""The words for what can be wrong with safetensors files and folders; nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchtitan_ckpt.errors import Problem, list_keys

LENGTH_BYTES = 8
HEADER_LIMIT = 100_000_000  # the safetensors library's own limit
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_ADAPTER_FILE = "adapter_model.safetensors"


def too_short(file: str, size: int) -> Problem:
    return Problem(
        code="hf.header-cut",
        what="the file is empty" if not size else "the file is too short for a safetensors header",
        where=file,
        expected="at least 10 bytes",
        actual=f"{size} bytes",
        cause="an interrupted copy or save, or a full disk",
        fix="copy or write the file again",
    )


def bad_length(file: str, length: int, size: int) -> Problem:
    return Problem(
        code="hf.header-length",
        what="the length of the header is impossible",
        where=f"{file}, bytes 0 to 7",
        expected=f"at most {min(HEADER_LIMIT, max(size - LENGTH_BYTES, 0))}",
        actual=str(length),
        cause="this is no safetensors file (a Git LFS pointer, an archive?), or it was cut",
        fix="look at the first bytes; download the file itself",
    )


def not_json(file: str, reason: str) -> Problem:
    return Problem(
        code="hf.header-json",
        what="the header is not a JSON object",
        where=f"{file}, header from byte {LENGTH_BYTES}",
        actual=reason,
        cause="the file was damaged or is no safetensors file",
        fix="copy or download the file again",
    )


def absent(root: Path, names: Sequence[str]) -> Problem:
    one = len(names) == 1
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return Problem(
        code="hf.shard-absent",
        what="the index names a file that is not there"
        if one
        else f"the index names {len(names)} files that are not there",
        where=str(root / names[0]) if one else str(root),
        actual="" if one else ", ".join(names[:8]) + more,
        cause="an incomplete download or copy",
        fix=f"fetch {'the file' if one else 'the files'}; nothing can be loaded without",
    )


def vanished(root: Path, name: str) -> Problem:
    return Problem(
        code="hf.shard-absent",
        what="a file was listed and then was gone",
        where=str(root / name),
        cause="another process deletes or moves files here",
        fix="stop the other process and try again",
    )


def unsafe_name(root: Path, name: str, reason: str) -> Problem:
    return Problem(
        code="hf.unsafe-name",
        what=f"the file name {name!r} is refused: {reason}",
        where=str(root),
        expected="a plain name of a file inside the folder",
        cause="an index made to read or name files elsewhere, or files linked by hand",
        fix="copy the file into the folder and name it plainly in the index",
    )


def partial_tensor(path: Path, key: str) -> Problem:
    return Problem(
        code="hf.partial-tensor",
        what=f"the file holds only a part of {key!r}, though the folder is not a sharded one",
        where=str(path),
        cause="a file of DCP's sharded writer was renamed or indexed by hand",
        fix="put all shard files into one folder under their own names",
    )


def two_checkpoints(root: Path, index_name: str) -> Problem:
    return Problem(
        code="hf.two-checkpoints",
        what=f"the folder holds {SINGLE} and an index that does not name it",
        where=str(root),
        expected="one checkpoint in a folder",
        actual=f"{SINGLE} beside {index_name}",
        cause="a second export into the same folder; readers differ in which one they take",
        fix=f"remove the older of the two ({SINGLE}, or the index with its shards)",
    )


def many_indexes(root: Path, index_names: list[str]) -> Problem:
    return Problem(
        code="hf.many-indexes",
        what="the folder holds several indexes",
        where=str(root),
        expected=INDEX,
        actual=", ".join(index_names[:8]),
        fix=f"name the right one {INDEX}, or give each checkpoint a folder",
    )


def no_index(root: Path, names: list[str]) -> Problem:
    return Problem(
        code="hf.index-absent",
        what="the folder holds several safetensors files and no index",
        where=str(root),
        expected=INDEX,
        actual=", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else ""),
        cause="an incomplete download, or a save that was interrupted before its last step",
        fix="fetch the index, or save again; for one file give the path of the file itself",
    )


def stray_file(root: Path, stray: list[str]) -> Problem:
    return Problem(
        code="hf.stray-file",
        what="files that the checkpoint does not use are ignored",
        where=str(root),
        actual=", ".join(stray[:8]) + (f" and {len(stray) - 8} more" if len(stray) > 8 else ""),
        cause="files left over from another save",
        fix="remove them: other readers may take tensors from them",
    )


def repeated_keys(path: Path, keys: list[str]) -> Problem:
    return Problem(
        code="hf.repeated-key",
        what="a file repeats tensors that the index places elsewhere; this copy is ignored",
        where=str(path),
        actual=list_keys(keys),
        fix="export again: other readers may take this copy",
    )


def adapter_keys(root: Path, keys: list[str]) -> Problem:
    return Problem(
        code="hf.adapter-keys",
        what="the checkpoint holds LoRA/PEFT weights, which are not model weights",
        where=str(root),
        actual=list_keys(keys),
        cause="it was saved from a model wrapped for fine-tuning",
        fix="merge the adapter into its base model (peft: merge_and_unload) and save that",
    )


def adapter_file(root: Path) -> Problem:
    return Problem(
        code="hf.adapter-keys",
        what="the folder holds a LoRA/PEFT adapter and no model",
        where=str(root / _ADAPTER_FILE),
        fix="merge the adapter into its base model (peft: merge_and_unload) and save that",
    )
