"""The contract: a table of checks, and nothing that runs them.

A check's id is `chapter.name` and names its function: `keys.high-numbers` is
`conformance.checks.keys.high_numbers`. Ids are contracts; they change only with a line in the
changelog. A check whose `since` is newer than the version asked for is a preview: it runs only
when named. This module imports no torch, so that listing the contract is quick.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from keyword import iskeyword

from torchtitan_ckpt.errors import ConfigError, Problem, nearest

VERSION = "2026.12"


@dataclass(frozen=True, slots=True)
class Check:
    """One clause. `needs` are inputs of a Subject without which it is n/a; `after` block it."""

    id: str
    level: int
    why: str
    needs: tuple[str, ...] = ("adapter", "native")
    after: tuple[str, ...] = ()
    since: str = "2026.12"

    @property
    def chapter(self) -> str:
        return self.id.partition(".")[0]

    @property
    def target(self) -> tuple[str, str]:
        """Module and function."""
        chapter, _, name = self.id.partition(".")
        function = name.replace("-", "_")
        return f"conformance.checks.{chapter}", f"{function}_" if iskeyword(function) else function


LEVELS = {
    1: "keys and shapes, on meta tensors",
    2: "values, on tensors that say where they belong",
    3: "files on disk",
    4: "a forward pass",
    5: "several ranks and managers",
}

_A, _N, _H, _R = "adapter", "native", "hf", "reference"
_RUNS = ("keys.leaves",)

CONTRACT: tuple[Check, ...] = (
    Check("keys.leaves", 1, "Both directions run, and every leaf is a tensor under a str."),
    Check("keys.total", 1, "Every native element leaves, once.", after=_RUNS),
    Check("keys.exact", 1, "The keys written are those of the files.", (_A, _N, _H), _RUNS),
    Check("keys.import", 1, "Import returns the model's keys, and uses each key.", after=_RUNS),
    Check("keys.hf-only", 1, "Files may hold declared extras; import accepts them.", after=_RUNS),
    Check("keys.also-reads", 1, "Declared older spellings are read as well.", after=_RUNS),
    Check("keys.unknown-refused", 1, "An unknown key raises; it is never dropped.", after=_RUNS),
    Check("keys.lora-refused", 1, "LoRA keys raise; they are never dropped.", after=_RUNS),
    Check("keys.half-group", 1, "Half a stack or half a fused pair raises.", after=_RUNS),
    Check("keys.high-numbers", 1, "Layers and experts keep their numeric order.", after=_RUNS),
    Check("keys.layers", 1, "All tensors of a layer go to the same layer.", after=_RUNS),
    Check("keys.partial", 1, "A part of the model in gives that part out.", after=_RUNS),
    Check("keys.index", 1, "The map of keys to files lists what is written.", after=_RUNS),
    Check("shapes.exact", 1, "Shapes written are those of the files.", (_A, _N, _H), _RUNS),
    Check("shapes.native", 1, "Import returns the model's shapes.", after=_RUNS),
    Check("dtypes.policy", 1, "No dtype changes unless declared.", after=_RUNS),
    Check(
        "values.pinned-export",
        2,
        "Each element written is the one an independent implementation writes there.",
        (_A, _N, _R),
        _RUNS,
    ),
    Check(
        "values.pinned-import",
        2,
        "Each element read is the one an independent implementation reads there.",
        (_A, _N, _R),
        _RUNS,
    ),
    Check(
        "values.provenance",
        2,
        "Each element written is one element of its source, once.",
        after=_RUNS,
    ),
    Check(
        "values.native-round-trip",
        2,
        "Export then import gives back every bit.",
        after=(*_RUNS, "values.pinned-export", "values.pinned-import", "values.provenance"),
    ),
    Check(
        "values.hf-round-trip",
        2,
        "Import of bf16 files then export gives back every bit.",
        after=(
            *_RUNS,
            "values.pinned-export",
            "values.pinned-import",
            "values.provenance",
            "values.native-round-trip",
        ),
    ),
    Check("values.tied", 2, "A tied pair stays tied, and only the declared pair.", after=_RUNS),
    Check(
        "values.load",
        2,
        "The trainer's load fills every element of a NaN-filled model.",
        after=_RUNS,
    ),
    Check("values.dtensor", 2, "DTensors convert as plain tensors do.", after=_RUNS),
    Check(
        "purity.input-unchanged", 2, "The caller's dict and tensors are left alone.", after=_RUNS
    ),
    Check("purity.stateless", 2, "Nothing leaks between directions and instances.", after=_RUNS),
    Check("purity.repeat", 2, "The second call gives what a first call gives.", after=_RUNS),
    Check("purity.order", 2, "The order of the dict does not matter.", after=_RUNS),
    Check("purity.aliasing", 2, "No two outputs share an element.", after=_RUNS),
    Check(
        "purity.contiguous-when-saved",
        2,
        "A saved output holds its bytes in order, no more.",
        after=_RUNS,
    ),
    Check("files.index", 3, "Index, file headers and keys agree; every file opens.", (), ()),
    Check("files.reread", 3, "What was written is read back bit for bit.", (), ("files.index",)),
    Check(
        "files.reexport",
        3,
        "A second export into the same folder leaves nothing stale.",
        (),
        ("files.index",),
    ),
    Check("files.reader", 3, "The adapter's own reader reads what was exported.", after=_RUNS),
    Check("files.quantized", 3, "The quantized reader dequantizes or refuses.", after=_RUNS),
    Check(
        "forward.logits",
        4,
        "Another implementation computes the same logits.",
        (_A, _N, "forward"),
        _RUNS,
    ),
)

BY_ID: dict[str, Check] = {check.id: check for check in CONTRACT}


def select(
    globs: Sequence[str] = (), *, level: int | None = None, version: str = VERSION
) -> tuple[Check, ...]:
    """Checks by glob and highest level; a glob that matches nothing is an error."""
    for glob in globs:
        if not fnmatch.filter(BY_ID, glob):
            raise _unknown("--check", glob)
    return tuple(
        check
        for check in CONTRACT
        if (level is None or check.level <= level)
        and (
            any(fnmatch.fnmatchcase(check.id, glob) for glob in globs)
            if globs
            else check.since <= version
        )
    )


def known(ids: Iterable[str], where: str) -> None:
    """Raise ConfigError for ids that are not in the contract."""
    for check_id in ids:
        if check_id not in BY_ID:
            raise _unknown(where, check_id)


def _unknown(where: str, name: str) -> ConfigError:
    near = nearest(name, BY_ID)
    return ConfigError(
        Problem(
            code="check.unknown-id",
            what=f"no check of the contract {VERSION} matches {name!r}",
            where=where,
            cause=f"did you mean {near}?" if near else "",
            fix="`torchtitan-ckpt checks` lists the ids",
        )
    )
