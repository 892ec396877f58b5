"""A Hugging Face folder: which files and tensors make up the checkpoint, and what contradicts.

The index is the only authority: it alone says which file a tensor is read from, so a stray file
that repeats a key changes nothing. Three layouts are known: one file, files with an index, and the
sharded files that torch's DCP writes without consolidation. No data is read here.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_ckpt.errors import (
    DamagedError,
    InputError,
    NotFoundError,
    Problem,
    RefusedError,
    list_keys,
    nearest,
)
from torchtitan_ckpt.formats.collector import collector_paused
from torchtitan_ckpt.formats.hf_header import Header, capped, read_header
from torchtitan_ckpt.formats.hf_problems import (
    HEADER_LIMIT,
    INDEX,
    SINGLE,
    absent,
    adapter_file,
    adapter_keys,
    many_indexes,
    no_index,
    partial_tensor,
    repeated_keys,
    stray_file,
    two_checkpoints,
    unsafe_name,
    vanished,
)
from torchtitan_ckpt.formats.hf_sharded import (
    is_sharded,
    missing_shards,
    sharded_tensors,
    sharding_info,
)
from torchtitan_ckpt.formats.strangers import leaves, open_regular
from torchtitan_ckpt.manifest import Manifest, Shard, TensorEntry

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_NUMBERED = re.compile(r"^(.*-)(\d+)(-of-)(\d+)(\.safetensors)$")
_ADAPTER_KEY = re.compile(r"(^|\.)lora_[A-Za-z_]+(\.|$)|^base_model\.model\.")
_ADAPTER_FILE = "adapter_model.safetensors"

_MOST_FILES = 100_000  # each is opened; the largest models have some hundreds


@dataclass(frozen=True, slots=True)
class Survey:
    """What a folder holds. `manifest` is None when `problems` leave nothing to describe.

    `refused` are problems of a readable checkpoint that must not be loaded this way; `notes` are
    faults that change nothing of what is read (a stray file, a wrong total_size).
    """

    manifest: Manifest | None
    problems: tuple[Problem, ...] = ()
    refused: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a folder or of one file; raises with everything that is wrong with it."""
    found = survey(path)
    if found.problems:
        raise DamagedError(*found.problems, *found.refused)
    if found.refused:
        raise RefusedError(*found.refused)
    assert found.manifest is not None
    return found.manifest


def survey(path: str | Path) -> Survey:
    """Look at a folder or file without raising for what is wrong inside it.

    Raises NotFoundError where there is no such folder, or nothing of this format in it.
    """
    with collector_paused():
        return _survey(Path(path))


def _survey(root: Path) -> Survey:
    if root.is_file():
        return _survey_files(root.parent, [root.name], None, [], "single")
    names, index_names = _list(root)
    if _ADAPTER_FILE in names and SINGLE not in names and not index_names:
        return Survey(None, refused=(adapter_file(root),))
    if index_names:
        return _survey_index(root, names, index_names)
    if SINGLE in names:
        stray = [name for name in names if name != SINGLE]
        return _survey_files(root, [SINGLE], None, stray, "single")
    if len(names) == 1 and not _NUMBERED.match(names[0]) and not is_sharded(names[0]):
        return _survey_files(root, names, None, [], "single")
    if names and any(is_sharded(name) for name in names):
        return _survey_sharded(root, names)
    if names:
        return Survey(None, (no_index(root, names),))
    raise NotFoundError(
        Problem(
            code="hf.empty-folder",
            what="the folder holds no safetensors file",
            where=str(root),
            expected=f"{SINGLE}, or shards with {INDEX}",
            fix="check the path; a DCP folder has a file .metadata instead",
        )
    )


def _list(root: Path) -> tuple[list[str], list[str]]:
    try:
        everything = sorted(os.listdir(root))
    except FileNotFoundError as error:
        raise NotFoundError(
            Problem(
                code="hf.folder-missing",
                what="the folder does not exist",
                where=str(root),
                fix="check the path",
            )
        ) from error
    except OSError as error:
        raise DamagedError(
            Problem(
                code="hf.folder-unreadable",
                what="the folder cannot be listed",
                where=str(root),
                actual=error.strerror or str(error),
                fix="check the permissions",
            )
        ) from error
    names = [name for name in everything if name.endswith(SUFFIX)]
    return names, [name for name in everything if name.endswith(INDEX_SUFFIX)]


# --- an index -----------------------------------------------------------------------------------


def _survey_index(root: Path, names: list[str], index_names: list[str]) -> Survey:
    index_name = INDEX if INDEX in index_names else index_names[0]
    if index_name != INDEX and len(index_names) > 1:
        return Survey(None, (many_indexes(root, index_names),))
    try:
        weight_map, total_size = _read_index(root / index_name, index_name)
    except InputError as error:
        return Survey(None, error.problems)
    used = sorted(set(weight_map.values()))
    stray = [name for name in names if name not in set(used)]
    problems = [] if SINGLE not in stray else [two_checkpoints(root, index_name)]
    result = _survey_files(root, used, weight_map, stray, "index", problems)
    manifest = result.manifest
    if manifest is None or total_size is None or total_size == manifest.nbytes:
        return result
    read = {shard.file for entry in manifest.tensors.values() for shard in entry.shards}
    if not read.issuperset(used):  # the size of a part says nothing about the total
        return result
    note = Problem(
        code="hf.total-size",
        what="metadata.total_size of the index is not the size of its tensors",
        where=str(root / index_name),
        expected=str(manifest.nbytes),
        actual=str(total_size),
        cause="written by a tool that counts otherwise, or the index is of another checkpoint",
        fix="nothing is needed for reading; export again for a right figure",
    )
    return Survey(manifest, result.problems, result.refused, (*result.notes, note))


def _read_index(path: Path, name: str) -> tuple[dict[str, str], int | None]:
    fix = "copy or download the index again, or write the checkpoint again"

    def bad(what: str, actual: str, code: str = "hf.index-json") -> DamagedError:
        return DamagedError(Problem(code=code, what=what, where=str(path), actual=actual, fix=fix))

    try:
        with open(open_regular(path), "rb") as file:
            raw = file.read(HEADER_LIMIT + 1)
    except OSError as error:
        raise bad("the index cannot be read", error.strerror or str(error)) from error
    if len(raw) > HEADER_LIMIT:
        raise bad("the index is too large", f"more than {HEADER_LIMIT} bytes")
    try:
        tree = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise bad("the index is not JSON", str(error) or "nested too deep") from error
    weight_map = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad("the index has no weight_map", f"{weight_map!r:.80}")
    wrong = [k for k, v in weight_map.items() if not isinstance(v, str)]
    if wrong:
        raise bad("the weight_map names no file for some keys", list_keys(wrong))
    count = len(set(weight_map.values()))
    if count > _MOST_FILES:
        raise bad("the index names too many files", f"{count}, of at most {_MOST_FILES}")
    metadata = tree.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, int(total) if isinstance(total, int | float) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = [key for key, count in counts.items() if count > 1]
        raise ValueError(f"keys are given more than once: {list_keys(twice)}")
    return tree


# --- files --------------------------------------------------------------------------------------


def _survey_files(
    root: Path,
    used: list[str],
    weight_map: Mapping[str, str] | None,
    stray: list[str],
    layout: str,
    problems: list[Problem] | None = None,
) -> Survey:
    problems = problems or []
    headers, bad = _read_headers(root, used, indexed=weight_map is not None)
    problems.extend(bad)
    tensors: dict[str, TensorEntry] = {}
    repeated: dict[str, list[str]] = {}
    unlisted: dict[str, list[str]] = {}
    for name, header in headers.items():
        try:
            offsets = sharding_info(header)
        except DamagedError as error:
            problems.extend(error.problems)
            continue
        for key, item in header.items.items():
            if weight_map is not None and weight_map.get(key, "") != name:
                (repeated if key in weight_map else unlisted).setdefault(name, []).append(key)
                continue
            start = (0,) * len(item.shape)
            if offsets is not None and any(offsets.get(key, start)):
                problems.append(partial_tensor(root / name, key))
            shard = Shard(start, item.shape, name, item.start, item.length)
            tensors[key] = TensorEntry(key, item.shape, item.dtype, (shard,))
    if weight_map is not None:
        problems.extend(_missing_keys(root, weight_map, tensors, headers))
        problems.extend(_unlisted_keys(root, unlisted, weight_map))
        tensors = {key: tensors[key] for key in weight_map if key in tensors}
    notes = [stray_file(root, stray)] if stray else []
    notes += [repeated_keys(root / name, keys) for name, keys in repeated.items()]
    return _finish(root, layout, headers, tensors, problems, notes)


def _survey_sharded(root: Path, names: list[str]) -> Survey:
    """Files of DCP's safetensors writer, each with a part of the tensors and their offsets."""
    used = [name for name in names if is_sharded(name)]
    stray = [name for name in names if not is_sharded(name)]
    headers, problems = _read_headers(root, used, indexed=False)
    problems.extend(missing_shards(root, used))
    tensors, wrong = sharded_tensors(headers)
    problems.extend(wrong)
    notes = [stray_file(root, stray)] if stray else []
    return _finish(root, "sharded", headers, tensors, problems, notes)


def _read_headers(
    root: Path, used: Iterable[str], *, indexed: bool
) -> tuple[dict[str, Header], list[Problem]]:
    headers: dict[str, Header] = {}
    problems: list[Problem] = []
    refused: list[Problem] = []
    missing: list[str] = []
    for name in used:
        reason = _unsafe(root, name)
        if reason:
            refused.append(unsafe_name(root, name, reason))
            continue
        try:
            headers[name] = read_header(root / name, name)
        except NotFoundError:
            if indexed:
                missing.append(name)
            else:
                problems.append(vanished(root, name))
        except InputError as error:
            problems.extend(error.problems)
    if missing:
        problems.append(absent(root, missing))
    return headers, [*capped(refused, str(root)), *problems]


def _unsafe(root: Path, name: str) -> str:
    """Why a file name must not be followed, or an empty string."""
    parts = re.split(r"[/\\]", name)
    if not name.endswith(SUFFIX) or "\0" in name:
        return "it is not the name of a safetensors file"
    if Path(name).is_absolute() or name.startswith("\\") or (len(name) > 1 and name[1] == ":"):
        return "it is absolute"
    if ".." in parts or "" in parts:
        return "it climbs out of the folder"
    try:
        mode = (root / name).stat().st_mode
        if leaves(root, name):
            return "it is a link out of the folder"
    except (OSError, RuntimeError, ValueError):
        return ""  # an absent file is reported as absent
    return "" if stat.S_ISREG(mode) else "it is not a regular file"


def _finish(
    root: Path,
    layout: str,
    headers: Mapping[str, Header],
    tensors: Mapping[str, TensorEntry],
    problems: list[Problem],
    notes: list[Problem],
) -> Survey:
    refused = []
    # The pattern alone takes a fifth of the time over 100,000 keys.
    marked = [key for key in tensors if "lora_" in key or key.startswith("base_model.")]
    adapters = [key for key in marked if _ADAPTER_KEY.search(key)]
    if adapters:
        refused.append(adapter_keys(root, adapters))
    info = {"layout": layout}
    for header in headers.values():
        info.update({f"metadata.{k}": v for k, v in header.metadata.items() if len(v) < 1000})
    if notes:
        info["notes"] = "\n".join(f"{note.what}: {note.actual}" for note in notes)
    files = {name: header.size for name, header in headers.items()}
    manifest = Manifest(str(root), "hf", tensors, {}, files, info)
    return Survey(manifest, tuple(problems), tuple(refused), tuple(notes))


# --- messages -----------------------------------------------------------------------------------


def _missing_keys(
    root: Path,
    weight_map: Mapping[str, str],
    tensors: Mapping[str, TensorEntry],
    headers: Mapping[str, Header],
) -> list[Problem]:
    lost: dict[str, list[str]] = {}
    for key, name in weight_map.items():
        if key not in tensors and name in headers:
            lost.setdefault(name, []).append(key)
    problems = []
    for name, keys in lost.items():
        close = nearest(keys[0], headers[name].items)
        problems.append(
            Problem(
                code="hf.index-key",
                what=f"the index promises {len(keys)} tensors that the file does not hold",
                where=str(root / name),
                expected=list_keys(keys),
                actual=f"nearest in the file: {close}" if close else "nothing like it in the file",
                cause="the index is of another save than the file",
                fix="copy index and files from one save; or export again",
            )
        )
    return problems


def _unlisted_keys(
    root: Path, unlisted: Mapping[str, list[str]], weight_map: Mapping[str, str]
) -> list[Problem]:
    problems = []
    for name, keys in unlisted.items():
        close = nearest(keys[0], weight_map)
        problems.append(
            Problem(
                code="hf.file-key",
                what=f"the file holds {len(keys)} tensors that the index does not know",
                where=str(root / name),
                actual=list_keys(keys),
                cause="the index is of another save than the file"
                + (f"; nearest in the index: {close}" if close else ""),
                fix="copy index and files from one save; or export again",
            )
        )
    return problems
