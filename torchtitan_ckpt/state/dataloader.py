"""State of the data loader: one entry a data-parallel rank, and the degree it was saved at.

Names are torchtitan's: `dp_rank_<r>` (bytes that only the loader reads) and `world_size`. A loader
that names its entry itself, as torchtitan's, is taken as it is; any other gets its rank's name.
The degree is compared at the load: positions of ranks that no longer exist would be lost without a
word. With TorchFT every replica keeps its own, and its id is compared too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torchtitan_ckpt.errors import MismatchError, Problem, SaveError
from torchtitan_ckpt.manifest import Manifest
from torchtitan_ckpt.state.change import Change, remember
from torchtitan_ckpt.state.leaves import UNREAD, Unread, why_not_storable
from torchtitan_ckpt.state.theirs import give, state_of

WORLD_SIZE = "world_size"
REPLICA = "replica_id"
_RANK = re.compile(r"dp_rank_(\d+)")


@runtime_checkable
class Reshardable(Protocol):
    """A loader that can start from the positions of another number of data-parallel ranks."""

    def load_resharded_state(self, states: Mapping[int, Any], dp_rank: int, degree: int) -> None:
        """`states` are all saved ranks' entries; become rank `dp_rank` of `degree`."""
        ...


def dataloader_state_dict(
    loader: Any, *, dp_rank: int = 0, degree: int = 1, replica_id: str | None = None
) -> dict[str, Any]:
    """The loader's state as flat entries. Empty if the loader has none.

    `dp_rank` and `degree` are used where the loader does not name its entry itself.
    """
    state = state_of(loader)
    if not state:
        return {}
    flat = state if _is_named(state) else {f"dp_rank_{dp_rank}": state, WORLD_SIZE: degree}
    for key, value in flat.items():
        if (why := why_not_storable(value)) is not None:
            raise SaveError(
                Problem(
                    code="dataloader.unstorable",
                    what=f"the data loader's state {key} cannot be saved",
                    cause=why,
                    fix="let its state_dict return bytes, or numbers, text and containers of them",
                )
            )
    if replica_id is not None:
        flat[REPLICA] = replica_id
    return {key: value for key, value in flat.items() if value is not None}


def dataloader_template(
    loader: Any, manifest: Manifest, prefix: str, *, dp_rank: int = 0
) -> dict[str, Any]:
    """What to read: this rank's entry and the degree; all ranks' entries for a `Reshardable`."""
    own = f"dp_rank_{_own_rank(loader, dp_rank)}"
    template: dict[str, Any] = {}
    for stored in sorted(manifest.keys):
        key = stored.removeprefix(prefix)
        if not stored.startswith(prefix):
            continue
        others = _RANK.fullmatch(key) is not None and key != own
        if not others or isinstance(loader, Reshardable):
            template[key] = UNREAD
    return template


def load_dataloader_state(
    loader: Any,
    values: Mapping[str, Any],
    *,
    dp_rank: int = 0,
    degree: int = 1,
    replica_id: str | None = None,
) -> list[str]:
    """Give the loader its position back. Returns notes.

    Raises `MismatchError` if the degree or the replica is another one, unless the loader is
    `Reshardable`; the loader is then as it was.
    """
    return prepare_dataloader_load(
        loader, values, dp_rank=dp_rank, degree=degree, replica_id=replica_id
    )()


def prepare_dataloader_load(
    loader: Any,
    values: Mapping[str, Any],
    *,
    dp_rank: int = 0,
    degree: int = 1,
    replica_id: str | None = None,
) -> Change:
    """The refusals of `load_dataloader_state`; what it returns gives the loader its position."""
    if any(isinstance(value, Unread) for value in values.values()):
        raise _mismatch("dataloader.unread", "the data loader's state was planned and never read")
    if not values:
        beginning = "the checkpoint has no state of the data loader: data starts from the beginning"
        return Change(lambda: [beginning])
    now = state_of(loader)
    named = _is_named(now)
    size = int(now[WORLD_SIZE]) if named and WORLD_SIZE in now else degree
    rank = _own_rank(loader, dp_rank)
    states = {int(m[1]): value for key, value in values.items() if (m := _RANK.fullmatch(key))}
    saved = int(values[WORLD_SIZE]) if WORLD_SIZE in values else len(states)
    if replica_id is not None and values.get(REPLICA, replica_id) != replica_id:
        raise _mismatch(
            "dataloader.replica",
            f"this is the data of replica {values[REPLICA]}, not of {replica_id}",
        )
    if saved != size:
        if not isinstance(loader, Reshardable):
            raise MismatchError(
                Problem(
                    code="dataloader.degree",
                    what="the data loader was saved at another data-parallel degree",
                    expected=f"{size} ranks",
                    actual=f"{saved} ranks",
                    cause="positions cannot be divided anew: samples would be lost or repeated",
                    fix="resume at the saved degree, or leave dataloader out of the load "
                    "(exclude_from_loading) and accept that data starts from the beginning",
                )
            )
        return Change(lambda: _reshard(loader, states, rank, saved, size), lambda: remember(loader))
    if rank not in states:
        raise _mismatch("dataloader.missing", f"the checkpoint has no dp_rank_{rank}")
    state = copy.deepcopy(states[rank])
    entry = {f"dp_rank_{rank}": state, WORLD_SIZE: saved} if named else state
    return Change(lambda: _give(loader, entry), lambda: remember(loader))


def _give(loader: Any, entry: Any) -> list[str]:
    give(loader, entry, code="dataloader.refused")
    return []


def _reshard(
    loader: Reshardable, states: Mapping[int, Any], rank: int, saved: int, size: int
) -> list[str]:
    args = (copy.deepcopy(states), rank, size)
    give(loader, *args, code="dataloader.refused", method="load_resharded_state")
    return [f"the data loader was resharded from {saved} to {size} ranks"]


def _own_rank(loader: Any, dp_rank: int) -> int:
    """The rank in the loader's own entry, where it names one."""
    found = [int(m[1]) for key in state_of(loader) if (m := _RANK.fullmatch(str(key)))]
    return found[0] if len(found) == 1 else dp_rank


def _is_named(state: Mapping[Any, Any]) -> bool:
    return any(_RANK.fullmatch(str(key)) for key in state)


def _mismatch(code: str, what: str) -> MismatchError:
    return MismatchError(
        Problem(
            code=code,
            what=what,
            fix="leave dataloader out of the load (exclude_from_loading)",
        )
    )
