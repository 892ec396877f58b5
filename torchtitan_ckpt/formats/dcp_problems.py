"""The words for what can be wrong with a DCP folder; nothing here decides that something is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torchtitan_ckpt.errors import (
    DamagedError,
    InputError,
    NotFoundError,
    Problem,
    RefusedError,
    list_keys,
)

_RANK_LOCAL = re.compile(r"__[0-9]+(_[0-9]+)?\.metadata")
_FAULTS = {
    "dcp.beyond-file": ("bytes beyond the end of their file", "a file cut by a write or a copy"),
    "dcp.stored-twice": ("shards stored in two places", "metadata of two saves mixed"),
    "dcp.stored-unknown": ("bytes of keys that are not described", "metadata of two saves mixed"),
    "dcp.not-stored": ("keys or shards that no file holds", "metadata of two saves mixed"),
    "dcp.item-too-small": ("items smaller than their shard", "overwritten or invented metadata"),
    "dcp.coverage": ("tensors whose shards do not tile them", "a rank's part missing or doubled"),
    "dcp.file-missing": ("keys whose file is not in the folder", "an unfinished or partial copy"),
    "dcp.bytes-overlap": ("items that share bytes of a file", "overwritten or invented metadata"),
    "dcp.unsafe-name": ("files that are not opened", "links or invented names"),
}


class Faults:
    """What is wrong, by code and key, as it is found; `keys` are those of tensors and objects."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[str, str]]] = {}
        self.keys: set[str] = set()

    def add(self, code: str, key: str, detail: str) -> None:
        self._found.setdefault(code, []).append((key, detail))
        self.keys.add(key)

    @property
    def only_refused(self) -> bool:
        """Whether names that must not be opened are all that is wrong."""
        return set(self._found) == {"dcp.unsafe-name"}

    def problems(self, where: str) -> tuple[Problem, ...]:
        """One problem a code, all keys in it."""
        return tuple(_problem(code, found, where) for code, found in self._found.items())


def _problem(code: str, found: Iterable[tuple[str, str]], where: str) -> Problem:
    what, cause = _FAULTS[code]
    keys = list(dict.fromkeys(key for key, _ in found))
    details = list(dict.fromkeys(detail for _, detail in found))
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    missing = code == "dcp.file-missing"  # one fault of many keys: told by the file
    return Problem(
        code=code,
        what=_missing(details, len(keys)) if missing else f"{what}: {list_keys(keys)}",
        where=where,
        expected=f"the bytes of {list_keys(keys)}" if missing else "",
        actual="" if missing else details[0] + more,
        cause=cause,
        fix="copy the checkpoint again, or use another step",
    )


def _missing(files: Sequence[str], keys: int) -> str:
    count = f"({keys} key{'s' * (keys > 1)})"
    if len(files) == 1:
        return f"file {files[0]} is missing {count}"
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"files {', '.join(files[:3])}{more} are missing {count}"


def no_metadata(name: str, sizes: Mapping[str, int]) -> InputError:
    """The error for a folder without `.metadata`, given its files and their sizes."""
    local = sorted(n for n in sizes if _RANK_LOCAL.fullmatch(n))
    if local:
        return RefusedError(
            Problem(
                code="dcp.rank-local",
                what="every rank wrote its own metadata, and there is no common one",
                where=name,
                actual=", ".join(local[:4]) + (", …" if len(local) > 4 else ""),
                cause="saved with use_collectives=False",
                fix="load it with dcp.load(use_collectives=False) on as many ranks and save again",
            )
        )
    data = sum(n.endswith(".distcp") for n in sizes)
    unfinished = data or any(n.endswith(".metadata.tmp") for n in sizes)
    return NotFoundError(
        Problem(
            code="dcp.unfinished" if unfinished else "dcp.no-metadata",
            what="the folder has no .metadata",
            where=name,
            actual=f"{data} .distcp files" if unfinished else f"{len(sizes)} other files",
            cause="a save that was interrupted before its last step, or a partial copy"
            if unfinished
            else "not a DCP checkpoint",
            fix="use another step" if unfinished else "name the step folder itself",
        )
    )


def compressed(transforms: Iterable[str], where: str) -> RefusedError:
    """The error for entries that passed through stream extensions."""
    return RefusedError(
        Problem(
            code="dcp.compressed",
            what=f"its entries are transformed: {', '.join(transforms)}",
            where=where,
            expected="entries as torch.save wrote them",
            cause="saved with stream extensions of torch.distributed.checkpoint",
            fix="load it with dcp.load and the same extensions, and save it without them",
        )
    )


def item_differs(
    where: str, expected: tuple[Sequence[int], str], actual: tuple[Sequence[int], str]
) -> DamagedError:
    """An item whose archive holds another (shape, dtype) than the metadata says."""
    return DamagedError(
        Problem(
            code="dcp.item-differs",
            what="an item of another shape or dtype than the metadata says",
            where=where,
            expected=f"{list(expected[0])} of {expected[1]}",
            actual=f"{list(actual[0])} of {actual[1]}",
            cause="metadata and data of two saves mixed",
            fix="use another step",
        )
    )
