"""Saving Hugging Face files from all ranks, directly: no second copy, no folder left over.

Each writer owns whole files and, inside, whole tensors; what other ranks hold of them travels to
the owner in steps of a bounded window. With `ownership="bytes"` every rank writes its own ranges
into the common files instead, which needs a POSIX file system. Either way everything is read back
once, and the files get their names only when every rank has succeeded; the index comes last.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import xxhash

from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.errors import ConfigError, Problem, RankError, SaveError, list_keys
from torchtitan_ckpt.formats.collector import collector_paused
from torchtitan_ckpt.formats.hf_boxes import describe, local_boxes, local_tensor
from torchtitan_ckpt.formats.hf_exchange import Exchange, Source
from torchtitan_ckpt.formats.hf_file import FileWriter, dense_bytes
from torchtitan_ckpt.formats.hf_header import build_header
from torchtitan_ckpt.formats.hf_io import NAMES
from torchtitan_ckpt.formats.hf_layout import FileMap, Layout, commit, plan_layout, prepare
from torchtitan_ckpt.formats.hf_plan import (
    Described,
    Picture,
    Segment,
    Spec,
    assign,
    choose_givers,
    merge,
    rounds,
    segments,
)
from torchtitan_ckpt.formats.hf_writer import FORMAT_METADATA
from torchtitan_ckpt.manifest import TensorEntry

WINDOW = 32 << 20


def save(
    state_dict: Mapping[str, Any],
    folder: str | Path,
    *,
    file_map: FileMap | None = None,
    max_shard_size: int | str = "5GB",
    process_group: dist.ProcessGroup | None = None,
    ownership: Literal["tensor", "bytes"] = "tensor",
    sync_files: bool = True,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    allow_aliases: bool = False,
    window: int = WINDOW,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write tensors and DTensors as model.safetensors, or as numbered files with an index.

    Every rank of `process_group` (default: all) calls it; a rank may hold a part of the keys.
    Plain tensors that several ranks hold must be equal. Two keys bound to one tensor are refused
    with both names; `allow_aliases` writes the values twice instead.

    overwrite: replace the checkpoint that lies in the folder (the manager saves into a fresh one).
    window: bytes that a rank receives, sends and assembles at a time, each.

    Raises SaveError or RankError on every rank, with the first cause; nothing is put in place then.
    """
    ranks = Ranks.current(process_group).on_cpu()
    root = Path(folder)
    shown = FORMAT_METADATA if metadata is None else metadata
    with ranks.together("describing what they save"), collector_paused():
        if ownership not in ("tensor", "bytes"):
            raise ConfigError(_ownership(ownership))
        tensors, described = _describe(state_dict, ranks, allow_aliases)
    picture = _picture(ranks, described)
    sources = Source(tensors)
    _compare_copies(ranks, tensors, sources, picture)
    entries = list(picture.entries.values())
    with ranks.together("preparing the folder"):
        layout = plan_layout(
            entries, file_map=file_map, max_shard_size=max_shard_size, writers=ranks.size
        )
        if ranks.rank == 0:
            prepare(root, layout, overwrite=overwrite)
    files: dict[str, FileWriter] = {}
    try:
        if ownership == "tensor":
            _write_tensors(ranks, root, layout, picture, sources, shown, window, files, progress)
        else:
            _write_bytes(ranks, root, layout, picture, sources, shown, window, files, progress)
        with ranks.together("checking what they wrote"):
            for file in files.values():
                if sync_files:
                    file.sync()
                file.verify()
                file.close()
        with ranks.together("putting the files in place"):
            if ranks.rank == 0:
                commit(root, layout, sync_files=sync_files)
    except BaseException:
        for file in files.values():
            file.discard()
        raise


# --- what there is ------------------------------------------------------------------------------


def _describe(
    state_dict: Mapping[str, Any], ranks: Ranks, allow_aliases: bool
) -> tuple[dict[str, torch.Tensor], list[Described]]:
    """This rank's tensors and their description; raises with everything that cannot be saved."""
    problems: list[Problem] = []
    bad: dict[str, list[str]] = {}
    tensors: dict[str, torch.Tensor] = {}
    described: list[Described] = []
    memory: dict[tuple[Any, ...], list[str]] = {}
    specs: dict[Any, Spec] = {}
    for key, value in state_dict.items():
        reason = _unsavable(value)
        if not reason:
            try:
                local_boxes(value)
            except ValueError as error:
                reason = str(error)
        if not (isinstance(key, str) and _is_utf8(key)):
            reason = "a key that is no text"
        if reason:
            bad.setdefault(reason, []).append(str(key))
            continue
        tensors[key] = value
        shape, dtype = tuple(value.shape), NAMES[value.dtype]
        described.append(Described(key, shape, dtype, _spec(value, ranks, specs)))
        local = local_tensor(value)
        if local.numel():
            place = (local.data_ptr(), local.shape, local.stride(), local.dtype, local.device)
            memory.setdefault(place, []).append(key)
    for reason, keys in bad.items():
        problems.append(_not_savable(reason, keys))
    if not allow_aliases:
        problems += [_alias(keys) for keys in memory.values() if len(keys) > 1]
    if problems:
        raise SaveError(*problems)
    return tensors, described


def _is_utf8(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unsavable(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}, not a tensor"
    if value.is_meta:
        return "a tensor on the meta device, without values"
    if value.layout != torch.strided or value.is_quantized or value.dtype not in NAMES:
        return f"a tensor that safetensors cannot hold ({value.layout}, {value.dtype})"
    return ""


def _spec(value: torch.Tensor, ranks: Ranks, known: dict[Any, Spec]) -> Spec | None:
    mesh = getattr(value, "device_mesh", None)
    if mesh is None:
        return None
    token = (id(mesh), value.placements)  # type: ignore[attr-defined]
    if token not in known:
        global_ranks = [int(rank) for rank in mesh.mesh.flatten()]
        if ranks.group is not None:
            global_ranks = [dist.get_group_rank(ranks.group, rank) for rank in global_ranks]
        placements = describe(value.placements)  # type: ignore[attr-defined]
        known[token] = (tuple(global_ranks), tuple(mesh.shape), placements)
    return known[token]


def _picture(ranks: Ranks, described: list[Described]) -> Picture:
    """Everybody's description. Ranks that say the same say it once, whatever the world's size."""
    packed = pickle.dumps([(d.key, d.shape, d.dtype, d.spec) for d in described])
    digests = ranks.gather(hashlib.sha256(packed).digest())
    distinct = list(dict.fromkeys(digests))
    mine = ranks.rank == digests.index(digests[ranks.rank])
    texts = [text for text in ranks.gather(packed if mine else None) if text is not None]
    views = [[Described(*row) for row in pickle.loads(text)] for text in texts]  # our own ranks'
    with collector_paused():
        picture = merge(views, [distinct.index(digest) for digest in digests])
    if not isinstance(picture, Picture):
        raise RankError(*picture)
    return picture


def _compare_copies(
    ranks: Ranks, tensors: Mapping[str, torch.Tensor], sources: Source, picture: Picture
) -> None:
    """Plain tensors that several ranks hold must be equal, byte for byte."""
    if ranks.size == 1 or not picture.copies:
        return
    with ranks.together("comparing their plain tensors"):
        digests = {
            k: _digest(sources, k, picture.entries[k].shape) for k in picture.copies if k in tensors
        }
    everyone = ranks.gather(digests)
    different: dict[str, list[str]] = {}
    for key in picture.copies:
        groups: dict[bytes, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            if key in theirs:
                groups.setdefault(theirs[key], []).append(rank)
        if len(groups) > 1:
            text = " | ".join(f"ranks {_short(members)}" for members in groups.values())
            different.setdefault(text, []).append(key)
    if different:
        raise RankError(*(_copies_differ(text, keys) for text, keys in different.items()))


def _digest(sources: Source, key: str, shape: tuple[int, ...]) -> bytes:
    digest = xxhash.xxh3_128()
    for _, _, part in sources.parts(key, (0,) * len(shape), shape, WINDOW):
        digest.update(dense_bytes(part))
    return digest.digest()


# --- writing ------------------------------------------------------------------------------------


def _write_tensors(
    ranks: Ranks,
    root: Path,
    layout: Layout,
    picture: Picture,
    sources: Source,
    metadata: Mapping[str, str],
    window: int,
    files: dict[str, FileWriter],
    progress: Callable[[int], None] | None,
) -> None:
    """Whole files by their owners; the exchange stops on all ranks when one of them fails."""
    with ranks.together("opening their files"), collector_paused():
        owners = assign(layout.files, picture, ranks.size)
        queues: dict[int, list[Segment]] = {rank: [] for rank in set(owners.values())}
        file_of = {}
        given = [0] * ranks.size
        for name, entries in layout.files.items():
            owner = owners[name]
            queues[owner] += segments(_in_file_order(entries), picture, owner, window, given)
            file_of.update(dict.fromkeys((entry.key for entry in entries), name))
            if owner == ranks.rank:
                files[name] = FileWriter(root, name, entries, metadata, progress=progress)
    exchange = Exchange(ranks, sources, lambda key: files[file_of[key]])
    for step in rounds(queues, window):
        if exchange.step(step):
            break
    exchange.finish()


def _in_file_order(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    _, items = build_header([(e.key, e.dtype, e.shape) for e in entries])
    by_key = {entry.key: entry for entry in entries}
    return [by_key[key] for key in items]


def _write_bytes(
    ranks: Ranks,
    root: Path,
    layout: Layout,
    picture: Picture,
    sources: Source,
    metadata: Mapping[str, str],
    window: int,
    files: dict[str, FileWriter],
    progress: Callable[[int], None] | None,
) -> None:
    """Ranges of common files: one rank makes a file, each writes what it holds."""
    with ranks.together("making the files"):
        for number, (name, entries) in enumerate(layout.files.items()):
            if number % ranks.size == ranks.rank:
                files[name] = FileWriter(root, name, entries, metadata, progress=progress)
                files[name].flush()
    with ranks.together("writing their ranges"):
        givers = choose_givers(picture, ranks.size)
        for name, entries in layout.files.items():
            for entry in _in_file_order(entries):
                for giver, offsets, sizes in givers[entry.key]:
                    if giver != ranks.rank:
                        continue
                    if name not in files:
                        files[name] = FileWriter(
                            root, name, entries, metadata, create=False, progress=progress
                        )
                    item = files[name].items[entry.key]
                    for at, size, data in sources.parts(entry.key, offsets, sizes, window):
                        files[name].write_box(item, at, size, dense_bytes(data))
        for file in files.values():
            file.flush()


def _short(members: list[int]) -> str:
    return ", ".join(map(str, members[:6])) + (" …" if len(members) > 6 else "")


# --- messages -----------------------------------------------------------------------------------


def _ownership(value: object) -> Problem:
    return Problem(
        code="config.ownership",
        what="there is no such way to share out the writing",
        where="ownership",
        expected="tensor or bytes",
        actual=repr(value),
        fix="take tensor, which is right on every file system",
    )


def _not_savable(reason: str, keys: list[str]) -> Problem:
    return Problem(
        code="hf.not-savable",
        what=f"{len(keys)} values cannot be saved as safetensors",
        where=list_keys(keys),
        expected="tensors or DTensors with values",
        actual=reason,
        fix="leave the keys out, or correct what puts them there",
    )


def _alias(keys: list[str]) -> Problem:
    return Problem(
        code="hf.alias",
        what=f"{' and '.join(map(repr, keys))} are one tensor under {len(keys)} keys",
        cause="tied weights that the adapter did not drop; readers would untie them",
        fix="drop the tied key before saving, or pass allow_aliases=True to write it twice",
    )


def _copies_differ(text: str, keys: list[str]) -> Problem:
    return Problem(
        code="ranks.copies-differ",
        what=f"{len(keys)} plain tensors have different values on different ranks",
        where=list_keys(keys),
        expected="equal copies, or DTensors that say which part is whose",
        actual=text,
        cause="local shards (of experts, for example) under one name, or replicas that drifted",
        fix="give sharded tensors as DTensors, or each rank's own under a key of its own",
    )
