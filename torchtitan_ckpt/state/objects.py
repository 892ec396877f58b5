"""Any other state of a job: objects with `state_dict` and `load_state_dict`, and plain dicts.

Train state with its counters, RNG states, whatever a caller registers. Each top-level key is one
value on disk, of the type it has; a container is one leaf unless tensors lie in it, so that a list
may grow between save and load. Objects that differ from rank to rank say so with an attribute
`rank_local = True` and get keys of their own rank (`rank_3.step`). The caller's objects are never
replaced and never share a reference with what was read: two resumes in a row are exact.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_ckpt.errors import MismatchError, Problem, SaveError, list_keys
from torchtitan_ckpt.manifest import Manifest
from torchtitan_ckpt.state.change import Change, remember
from torchtitan_ckpt.state.leaves import (
    UNREAD,
    Unread,
    default_node,
    flatten,
    leaf_names,
    rebuild,
    why_not_storable,
)
from torchtitan_ckpt.state.tensors import empty_like
from torchtitan_ckpt.state.theirs import give, state_of

LAYOUT = "@layout"
WORLD_SIZE = "world_size"
# Names on disk that are not the object's own: the structure, and the generators of `rng`.
_RESERVED = (LAYOUT, "@rng")
_RANK = re.compile(r"rank_(\d+)\.")


def object_state_dict(
    obj: Any, *, rank: int | None = None, world_size: int | None = None
) -> dict[str, Any]:
    """The state of `obj` as a flat dict without None; tensors are live, containers its own.

    `rank` and `world_size` matter for rank-local objects only; the default is this process's.
    Raises `SaveError` with every key that no file can hold.
    """
    leaves, node = flatten(_state_of(obj), dicts=False, reserved=_RESERVED)
    problems = [
        Problem(
            code="state.unstorable",
            what=f"{type(obj).__name__}: {key} cannot be saved",
            where=key,
            cause=why,
            fix="let its state_dict return numbers, text, bytes, tensors and containers of them",
        )
        for key, value in leaves.items()
        if (why := why_not_storable(value)) is not None
    ]
    if problems:
        raise SaveError(*problems)
    if node != default_node(leaves):
        leaves[LAYOUT] = node
    if not _is_rank_local(obj):
        return leaves
    own, size = _place(rank, world_size)
    return {**{f"rank_{own}.{key}": v for key, v in leaves.items()}, WORLD_SIZE: size}


def object_template(
    obj: Any, manifest: Manifest, prefix: str, *, rank: int | None = None
) -> dict[str, Any]:
    """What to read for `obj`: every key that the file has for it, tensors laid out as they are now.

    Keys are without `prefix`. Other ranks' parts of a rank-local object are left out.
    """
    live, _ = flatten(_state_of(obj), dicts=False, reserved=_RESERVED)
    mine = f"rank_{_place(rank, None)[0]}."
    local = _is_rank_local(obj)
    template: dict[str, Any] = {}
    for stored in sorted(manifest.keys):
        if not stored.startswith(prefix):
            continue
        key = stored.removeprefix(prefix)
        if local and not key.startswith(mine) and key != WORLD_SIZE:
            continue
        entry = manifest.tensors.get(stored)
        if entry is None:
            template[key] = UNREAD
            continue
        own = live.get(key.removeprefix(mine) if local else key)
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if isinstance(own, Tensor) and tuple(own.shape) == entry.shape:
            template[key] = empty_like(own, dtype)
        else:
            template[key] = torch.empty(entry.shape, dtype=dtype)
    return template


def load_object_state(
    obj: Any,
    values: Mapping[str, Any],
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> list[str]:
    """Hand `values` to `obj`. Returns notes. A key that `obj` has now and the file lacks is an
    error; one that only the file has is handed over and said.

    A number that the file holds as a 0-d tensor, or a list that it holds key by key (torchtitan
    writes both), comes back as the number or list that `obj` has now.
    """
    return prepare_object_load(obj, values, rank=rank, world_size=world_size)()


def prepare_object_load(
    obj: Any,
    values: Mapping[str, Any],
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> Change:
    """The refusals of `load_object_state`; what it returns hands the values over."""
    if _is_rank_local(obj):
        values = _own_part(obj, values, *_place(rank, world_size))
    unread = [key for key, value in values.items() if isinstance(value, Unread)]
    if unread:
        raise _mismatch(obj, "state.unread", f"{list_keys(unread)} was planned and never read")
    read = {key: value for key, value in values.items() if key != LAYOUT and value is not None}
    node = values.get(LAYOUT) or default_node(read)
    try:
        lost = [name for name in leaf_names(node) if name not in read]
        state = rebuild(node, lambda name: _detached(read.get(name)))
    except (LookupError, TypeError, ValueError):
        state, lost = None, []
    if not isinstance(state, dict):
        raise _mismatch(obj, "state.malformed", f"{LAYOUT} is not what this package writes there")
    live = _state_of(obj)
    nulls = {key for key, value in live.items() if value is None}
    lost += [str(key) for key in live.keys() - state.keys() - nulls]
    if lost:
        raise _mismatch(obj, "state.missing", f"the checkpoint lacks {list_keys(sorted(lost))}")
    notes = [
        f"{type(obj).__name__}: {key} is in the checkpoint only"
        for key in state
        if key not in live and live
    ]
    for key in state.keys() & live.keys():
        state[key] = _as_live(live[key], state[key])
    state.update(dict.fromkeys(nulls - state.keys()))
    return Change(lambda: _give(obj, state, notes), lambda: remember(obj))


def _give(obj: Any, state: dict[Any, Any], notes: list[str]) -> list[str]:
    if isinstance(obj, MutableMapping) and not hasattr(obj, "load_state_dict"):
        obj.clear()
        obj.update(state)
        return notes
    give(obj, state)
    return notes


def _own_part(obj: Any, values: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    saved = values.get(WORLD_SIZE)
    if saved is None:
        ranks = {int(m[1]) for key in values if (m := _RANK.match(key))}
        saved = len(ranks) or size
    prefix = f"rank_{rank}."
    own = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
    if saved != size:
        raise MismatchError(
            Problem(
                code="state.world-size",
                what=f"{type(obj).__name__} differs from rank to rank and was saved on {saved}",
                expected=f"{size} ranks",
                actual=f"{saved} ranks",
                fix="resume on as many ranks, or leave this state out (exclude_from_loading)",
            )
        )
    if not own:
        raise _mismatch(obj, "state.missing", f"the checkpoint has nothing for rank {rank}")
    return own


def _state_of(obj: Any) -> dict[Any, Any]:
    if isinstance(obj, Mapping) and not hasattr(obj, "state_dict"):
        return dict(obj)
    return state_of(obj)


def _is_rank_local(obj: Any) -> bool:
    return bool(getattr(obj, "rank_local", False))


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return (
            dist.get_rank() if rank is None else rank,
            dist.get_world_size() if world_size is None else world_size,
        )
    return rank or 0, world_size or 1


def _detached(value: Any) -> Any:
    """A value of the caller's own: it may keep it, and the dict that was read stays as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _as_live(live: Any, value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0 and type(live) in (int, float, bool):
        return type(live)(value.item())
    if type(live) in (list, tuple) and isinstance(value, dict):
        keys = [str(index) for index in range(len(value))]
        if value and sorted(value, key=str) == sorted(keys):
            return type(live)(value[key] for key in keys)
    return value


def _mismatch(obj: Any, code: str, what: str) -> MismatchError:
    return MismatchError(Problem(code=code, what=f"{type(obj).__name__}: {what}"))
