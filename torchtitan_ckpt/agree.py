"""Before a save: do all ranks mean the same, by every key and by the call itself?

DCP and safetensors keep one copy of what several ranks hold. A plain tensor that differs from rank
to rank, or a key that ranks describe differently, would be lost without a word. `agree` finds both
by comparing digests, and exchanges details only where these differ; `same` compares a few named
values. Both change and write nothing; failing together is `collective`'s business.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.errors import Problem, RankError, list_keys
from torchtitan_ckpt.state import rng
from torchtitan_ckpt.state.tensors import is_emptied

# Shape, dtype and, for DTensors, mesh shape and placements; objects have none of these.
Description = tuple[tuple[int, ...], str, str]
_OBJECT: Description = ((), "", "")
# Why ranks may differ, and what helps: of keys that begin so, and of the others.
_ADVICE = {
    "optimizer.state.": (
        "state of each rank's shard under one name: scales of 8-bit blocks, or moments of a "
        "parameter that is no DTensor",
        "let the optimizer tell plain shards (torchtitan_ckpt.state.swapped.CheckpointableState), "
        "of scales the values that they stand for; or save model-only",
    ),
    "lr_scheduler.": (
        "schedulers that each rank steps otherwise, as by a loss of its own",
        "step them with the same values on every rank (a loss that was reduced over them)",
    ),
}
_CONFIGS = (
    "ranks that were built from different configs, or shards handed over as whole tensors",
    "",
)
_PLAIN = (
    "local shards that are not DTensors (expert parallelism done by hand), or buffers that ranks "
    "update each for itself",
    "make it a DTensor over its mesh, or bring the copies together before the save",
)
_OBJECTS = ("a state of each rank under one key", "name it by its rank, as the data loader does")
# Distinct descriptions that are exchanged in full; more of them are one problem, told by samples.
_MAX_VIEWS = 64


@dataclass(frozen=True, slots=True)
class _Holders:
    """For every key, which ranks hold it and how each of their views describes it."""

    ranks: Mapping[str, tuple[int, ...]]
    views: Mapping[str, Mapping[Description, tuple[int, ...]]]


def agree(flat: Mapping[str, Any], ranks: Ranks | None = None) -> None:
    """Raise `RankError` on every rank unless all ranks can save `flat` together.

    Every rank calls it with its own part of the state, flat. Compared are keys, shapes, dtypes and
    placements, that all ranks of a DTensor's mesh have its key, and the values of plain tensors and
    objects that several ranks hold, bit for bit. Pipeline stages may hold different keys.
    """
    ranks = ranks or Ranks.current()
    if ranks.size == 1:
        return
    with ranks.together("describing what they save"):
        mine = {key: _describe(value) for key, value in flat.items()}
    holders = _exchange(mine, ranks)
    problems = [*_description_problems(holders), *_key_problems(holders, ranks.size)]
    holes = ranks.gather(_mesh_holes(flat, holders, ranks))
    problems += _hole_problems(holes)
    if problems:
        raise RankError(*problems)
    problems = _value_problems(flat, holders, ranks)
    if problems:
        raise RankError(*problems)


def same(ranks: Ranks, values: Mapping[str, Any], *, code: str, fix: str) -> None:
    """Raise `RankError` on every rank unless all ranks give equal values under every name."""
    views = ranks.gather(dict(values))
    problems = []
    for name, first in views[0].items():
        other = next((r for r, view in enumerate(views) if view.get(name) != first), None)
        if other is not None:
            problems.append(
                Problem(
                    code=code,
                    what=f"ranks disagree about {name}",
                    expected=f"{first!r} on rank 0",
                    actual=f"{views[other].get(name)!r} on rank {other}",
                    fix=fix,
                )
            )
    if problems:
        raise RankError(*problems)


def _describe(value: Any) -> Description:
    if not isinstance(value, Tensor):
        return _OBJECT
    spec = ""
    if isinstance(value, DTensor):
        spec = f"{tuple(value.device_mesh.shape)} {', '.join(map(str, value.placements))}"
    return tuple(value.shape), str(value.dtype).removeprefix("torch."), spec


def _exchange(mine: Mapping[str, Description], ranks: Ranks) -> _Holders:
    """Everybody's view; ranks that say the same say it once."""
    # Each data-parallel rank has a loader entry of its own, and each rank its generators: kept
    # apart, so that they do not make every rank's view a different one.
    shared = {key: d for key, d in mine.items() if not is_own(key)}
    own = [key for key in mine if is_own(key)]
    digest = xxhash.xxh3_128_digest(repr(sorted(shared.items())).encode())
    everyone = ranks.gather((digest, own))
    digests = [d for d, _ in everyone]
    distinct = list(dict.fromkeys(digests))[:_MAX_VIEWS]
    speaks = digest in distinct and digests.index(digest) == ranks.rank
    spoken = [view for view in ranks.gather(shared if speaks else None) if view is not None]
    members = {d: tuple(r for r, other in enumerate(digests) if other == d) for d in distinct}
    holders: dict[str, list[int]] = {}
    views: dict[str, dict[Description, tuple[int, ...]]] = {}
    for d, view in zip(distinct, spoken, strict=True):
        for key, description in view.items():
            holders.setdefault(key, []).extend(members[d])
            said = views.setdefault(key, {})
            said[description] = tuple(sorted((*said.get(description, ()), *members[d])))
    for rank, (_, keys) in enumerate(everyone):
        for key in keys:
            holders.setdefault(key, []).append(rank)
            views.setdefault(key, {})[_OBJECT] = tuple(holders[key])
    return _Holders({key: tuple(sorted(group)) for key, group in holders.items()}, views)


def _state_of(key: str) -> str:
    """The state of `_ADVICE` that a key belongs to, or nothing."""
    return next((start for start in _ADVICE if key.startswith(start)), "")


def _advice(keys: Sequence[str], others: tuple[str, str]) -> tuple[str, str]:
    """Cause and fix for keys of one state."""
    return _ADVICE.get(_state_of(keys[0]), others)


def is_own(key: str) -> bool:
    """Whether each rank, or each data-parallel rank, has a key of this kind for itself."""
    return key.startswith(("dataloader.dp_rank_", f"{rng.PREFIX}rank_"))


# --- descriptions -------------------------------------------------------------------------------


def _description_problems(holders: _Holders) -> list[Problem]:
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for key, said in holders.views.items():
        if len(said) == 1:
            continue
        (first, some), (second, others) = list(said.items())[:2]
        code, what = _difference(first, second)
        text = f"{_spell(first)} on {_names(some)}|{_spell(second)} on {_names(others)}"
        found.setdefault((code, what, text, _state_of(key)), []).append(key)
    return [
        Problem(
            code=f"ranks.{code}",
            what=f"ranks disagree about the {what} of {list_keys(keys)}",
            expected=text.partition("|")[0],
            actual=text.partition("|")[2],
            cause=cause,
            fix=fix,
        )
        for (code, what, text, _), keys in found.items()
        for cause, fix in [_advice(keys, _CONFIGS)]
    ]


def _difference(a: Description, b: Description) -> tuple[str, str]:
    if bool(a[1]) != bool(b[1]):
        return "kind", "kind"
    if a[0] != b[0]:
        return "shape", "shape"
    return ("dtype", "dtype") if a[1] != b[1] else ("placement", "placement")


def _spell(description: Description) -> str:
    shape, dtype, spec = description
    if not dtype:
        return "no tensor"
    return f"{dtype} {list(shape)}" + (f", {spec}" if spec else ", plain")


def _key_problems(holders: _Holders, world: int) -> list[Problem]:
    """Keys that some ranks lack, unless the ranks fall into pipeline stages.

    Stages are a partition of the ranks. The smallest groups of ranks that hold a key of their own
    must therefore cover whatever larger group holds keys together.
    """
    by_group: dict[tuple[int, ...], list[str]] = {}
    for key, group in holders.ranks.items():
        if not is_own(key):
            by_group.setdefault(group, []).append(key)
    everyone = tuple(range(world))
    groups = [set(group) for group in {*by_group, everyone}]
    smallest = [g for g in groups if not any(other < g for other in groups)]
    without = sorted(set(everyone).difference(*smallest))
    lacking: dict[tuple[int, ...], list[int]] = {}
    for rank in without:
        around = min((g for g in groups if rank in g), key=len)
        for group in by_group:
            if set(group) in smallest and set(group) < around:
                lacking.setdefault(group, []).append(rank)
    return [
        Problem(
            code="ranks.keys",
            what=f"ranks disagree about the keys: {_names(some)} without "
            f"{list_keys(by_group[group])}",
            where=f"held by {_names(group)}",
            cause="a state that only some ranks have, or models of different configs",
            fix="give every rank of a pipeline stage the same keys",
        )
        for group, some in lacking.items()
    ]


def _mesh_holes(flat: Mapping[str, Any], holders: _Holders, ranks: Ranks) -> list[str]:
    """This rank's DTensors whose mesh has ranks without the key."""
    place = _places(ranks)
    out = []
    known: dict[int, tuple[int, ...]] = {}
    for key, value in flat.items():
        if not isinstance(value, DTensor):
            continue
        mesh = value.device_mesh
        if id(mesh) not in known:
            flatten = mesh.mesh.flatten().tolist()
            known[id(mesh)] = tuple(place[r] for r in flatten if r in place)
        if not set(known[id(mesh)]) <= set(holders.ranks[key]):
            out.append(key)
    return out


def _places(ranks: Ranks) -> dict[int, int]:
    if ranks.group is None:
        return {0: 0}
    return {r: place for place, r in enumerate(dist.get_process_group_ranks(ranks.group))}


def _hole_problems(holes: Sequence[Sequence[str]]) -> list[Problem]:
    keys = sorted({key for group in holes for key in group})
    if not keys:
        return []
    tellers = [rank for rank, group in enumerate(holes) if group]
    return [
        Problem(
            code="ranks.mesh",
            what=f"ranks of the tensor's mesh do not have it: {list_keys(keys)}",
            where=f"told by {_names(tellers)}",
            cause="a rank that left out its shard; a checkpoint would lack those rows",
            fix="hand over the same keys on every rank of a mesh",
        )
    ]


# --- values -------------------------------------------------------------------------------------


def _value_problems(flat: Mapping[str, Any], holders: _Holders, ranks: Ranks) -> list[Problem]:
    """Plain tensors and objects that several ranks hold, compared by digest."""
    with ranks.together("comparing what they all hold"):
        groups: dict[tuple[int, ...], dict[str, bytes]] = {}
        for key in sorted(flat):
            group = holders.ranks[key]
            if len(group) < 2 or isinstance(flat[key], DTensor):
                continue
            digest = _digest(flat[key])
            if digest is not None:
                groups.setdefault(group, {})[key] = digest
        summary = {
            group: xxhash.xxh3_128_digest(b"".join(values.values()))
            for group, values in groups.items()
        }
    everyone = ranks.gather(summary)
    suspects = {
        group for rank, said in enumerate(everyone) for group, digest in said.items()
        if digest != everyone[group[0]].get(group) and rank in group
    }  # fmt: skip
    if not suspects:
        return []
    details = ranks.gather({group: groups[group] for group in suspects if group in groups})
    found: dict[tuple[str, bool, str], list[str]] = {}
    for group in sorted(suspects):
        for key in sorted({k for rank in group for k in details[rank].get(group, {})}):
            parties: dict[bytes | None, list[int]] = {}
            for rank in group:
                parties.setdefault(details[rank].get(group, {}).get(key), []).append(rank)
            if len(parties) > 1:
                text = " | ".join(_names(party) for party in parties.values())
                is_tensor = any(d != _OBJECT for d in holders.views[key])
                found.setdefault((text, is_tensor, _state_of(key)), []).append(key)
    return [_differing(text, is_tensor, keys) for (text, is_tensor, _), keys in found.items()]


def _differing(text: str, is_tensor: bool, keys: list[str]) -> Problem:
    kind = "plain tensors" if is_tensor else "values"
    cause, fix = _advice(keys, _PLAIN if is_tensor else _OBJECTS)
    return Problem(
        code="ranks.plain-differs" if is_tensor else "ranks.object-differs",
        what=f"{kind} that differ between ranks: {list_keys(keys)}",
        expected="the same bits on every rank that holds the key, since one copy is saved",
        actual=f"parties: {text}",
        cause=cause,
        fix=fix,
    )


def _digest(value: Any) -> bytes | None:
    """A digest of the value's bits, or None for values that cannot be compared so."""
    if isinstance(value, Tensor):
        if is_emptied(value):
            return None  # the writer refuses it, by name
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return bytes(xxhash.xxh3_128_digest(data.numpy().data))
    spelled = _spelled(value)
    return None if spelled is None else bytes(xxhash.xxh3_128_digest(spelled))


def _spelled(value: Any) -> bytes | None:
    """The same bytes for equal plain values whatever made them, where pickles may differ."""
    if value is None or isinstance(value, bool | int | str | torch.dtype):
        return f"{type(value).__name__}:{value!r};".encode()
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, bytes | bytearray):
        return b"b%d:" % len(value) + bytes(value)
    if isinstance(value, Tensor):
        inner = _digest(value)
        return None if inner is None else f"{_describe(value)}".encode() + inner
    if isinstance(value, Mapping):
        return _joined(b"m", (part for item in value.items() for part in item))
    if isinstance(value, list | tuple):
        return _joined(type(value).__name__.encode(), value)
    return None


def _joined(head: bytes, values: Iterable[Any]) -> bytes | None:
    parts = [_spelled(value) for value in values]
    if any(part is None for part in parts):
        return None
    return head + b"(" + b",".join(part for part in parts if part is not None) + b")"


def _names(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0..3`, `ranks 0, 2, 5 …`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}..{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks[:6])) + (" …" if len(ranks) > 6 else "")
