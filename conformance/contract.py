"""The contract: a table of checks, and nothing that runs them.

A check's id is `chapter.name` and names its function: `keys.high-numbers` is
`conformance.checks.keys.high_numbers`. Ids are contracts; they change only with a line in the
changelog. A check whose `since` is newer than the version asked for is a preview: it runs only
when named. This module imports no torch, so that listing the contract is quick.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from keyword import iskeyword

from torchtitan_ckpt.errors import ConfigError, Problem, nearest

VERSION = "2026.12"


@dataclass(frozen=True, slots=True)
class Check:
    """One clause.

    `needs` are inputs of a Subject without which it is n/a. `runs` are the directions that must
    not raise on the whole model, and `after` the checks that must not have failed: otherwise the
    clause is blocked, so that one root cause is told once.
    """

    id: str
    level: int
    why: str
    needs: tuple[str, ...] = ("adapter", "native")
    runs: tuple[str, ...] = ("to_hf", "from_hf")
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

# Which check says that a direction raises on the whole model.
RUNS = {"to_hf": "keys.leaves", "from_hf": "keys.import"}
_HF, _REF = ("adapter", "native", "hf"), ("adapter", "native", "reference")
_OUT, _JOB = ("to_hf",), ("job",)
_SEED = ("seed.alone",)
_PINNED = ("values.pinned-export", "values.pinned-import", "values.provenance")
# What a search would only find again.
_WHOLE = (
    *("keys.leaves", "keys.total", "keys.exact", "keys.import", "keys.high-numbers"),
    *("keys.layers", "keys.partial", "shapes.exact", "shapes.native", "dtypes.policy", *_PINNED),
    *("values.native-round-trip", "values.hf-round-trip"),
    *("purity.stateless", "purity.repeat", "purity.order"),
)


def _manager(check_id: str, why: str, *, after: tuple[str, ...] = ()) -> Check:
    """A clause for managers.

    One that wants a refusal comes after one that wants a load: a manager that refuses everything
    has not passed it.
    """
    return Check(check_id, 5, why, ("manager",), (), after)


CONTRACT: tuple[Check, ...] = (
    Check("keys.leaves", 1, "to_hf runs; every value of both directions is a tensor.", runs=()),
    Check("keys.total", 1, "Every native element leaves, once.", runs=_OUT),
    Check("keys.exact", 1, "The keys written are those of the files.", _HF, _OUT),
    Check("keys.import", 1, "from_hf runs, returns the model's keys, uses each key.", runs=_OUT),
    Check("keys.hf-only", 1, "Files may hold declared extras; import accepts them."),
    Check("keys.also-reads", 1, "Declared older spellings are read as well."),
    Check("keys.unknown-refused", 1, "An unknown key raises or is handed on, never dropped."),
    Check("keys.lora-refused", 1, "LoRA keys raise or are handed on, never dropped."),
    Check("keys.half-group", 1, "Half a group raises, and what is missing is not made up."),
    Check("keys.high-numbers", 1, "Layers and experts keep their numeric order.", runs=_OUT),
    Check("keys.layers", 1, "All tensors of a layer go to the same layer.", runs=_OUT),
    Check("keys.partial", 1, "A part of the model in gives that part out."),
    Check("keys.index", 1, "The map of keys to files lists what is written.", runs=_OUT),
    Check("shapes.exact", 1, "Shapes written are those of the files.", _HF, _OUT),
    Check("shapes.native", 1, "Import returns the model's shapes."),
    Check("dtypes.policy", 1, "No dtype changes unless declared."),
    Check("values.pinned-export", 2, "What is written equals an independent export.", _REF, _OUT),
    Check("values.pinned-import", 2, "What is read equals an independent import.", _REF),
    Check("values.provenance", 2, "Each element written is one of its source, once.", runs=_OUT),
    Check("values.native-round-trip", 2, "Export then import keeps every bit.", after=_PINNED),
    Check(
        "values.hf-round-trip",
        2,
        "Import of bf16 files then export keeps every bit.",
        after=(*_PINNED, "values.native-round-trip"),
    ),
    Check("values.tied", 2, "A declared pair stays tied."),
    Check("values.load", 2, "A load in place fills every element of a NaN-filled model."),
    Check("values.dtensor", 2, "DTensors convert as plain tensors do."),
    Check("purity.input-unchanged", 2, "The caller's dict and tensors are left alone."),
    Check("purity.stateless", 2, "Nothing leaks between directions and instances."),
    Check("purity.repeat", 2, "A call neither sees nor changes what came before it."),
    Check("purity.assets", 2, "With an assets folder the same values come out."),
    Check("purity.settings", 2, "The process's settings are left alone, and have no say."),
    Check("purity.order", 2, "The order of the dict does not matter."),
    Check("purity.aliasing", 2, "No two outputs share an element."),
    Check("purity.contiguous-when-saved", 2, "A saved output holds its own bytes.", runs=_OUT),
    Check(
        "values.drawn", 2, "Parts, orders, dtypes, values and sizes convert alike.", after=_WHOLE
    ),
    Check("files.index", 3, "Index, headers and keys agree; every file opens.", (), ()),
    Check(
        "files.reread", 3, "What was written is read back bit for bit.", (), (), ("files.index",)
    ),
    Check("files.reexport", 3, "A second export leaves nothing stale.", (), (), ("files.index",)),
    Check("files.reader", 3, "The adapter's own reader reads plain files.", runs=_OUT),
    Check(
        "files.quantized",
        3,
        "The quantized reader dequantizes or refuses.",
        runs=_OUT,
        after=("files.reader",),
    ),
    Check(
        "forward.logits",
        4,
        "Another implementation computes the same logits.",
        ("adapter", "native", "forward"),
        after=("keys.total",),
    ),
    Check("reshard.shapes", 5, "A shape does not depend on the split of its tensor."),
    Check(
        "reshard.convert",
        5,
        "Every split converts, to what one rank gives.",
        after=("values.dtensor", "reshard.shapes"),
    ),
    Check("reshard.placements", 5, "Import splits a tensor as the model does."),
    _manager("reshard.full", "A state saved under one split loads under another."),
    _manager("reshard.next-step", "The step after a reshard equals the unsplit one."),
    _manager(
        "reshard.dataloader",
        "Another data degree keeps the position or raises.",
        after=("reshard.full",),
    ),
    _manager(
        "reshard.replicas",
        "A plain tensor that ranks disagree about raises.",
        after=("reshard.full",),
    ),
    _manager("reshard.hf", "HF files hold the whole model under every split."),
    _manager("seed.alone", "One process makes a seed and waits for nobody."),
    _manager("seed.ranks", "A seed of one rank loads under every split.", after=_SEED),
    _manager("seed.fresh", "A seed gives the model only.", after=_SEED),
    _manager("seed.one-rank", "A seed made by several ranks raises.", after=("seed.fresh",)),
    _manager(
        "seed.other-model",
        "A seed of another model raises, and changes nothing.",
        after=("seed.fresh",),
    ),
    _manager("resume.newest", "The newest step is the one with the highest number."),
    _manager("resume.names", "Only step-<number> is a step."),
    _manager("resume.unfinished", "A step that was never completed is passed over."),
    _manager("resume.half-deleted", "A step that lacks a file is passed over."),
    _manager("resume.load-step", "A named step is loaded, or raises if absent."),
    _manager("resume.initial", "initial_load_path starts a job that has no step."),
    _manager("resume.model-only", "A model-only last step hides no full one."),
    _manager("resume.uninterrupted", "Two resumes equal the job never stopped."),
    _manager("resume.again", "A second load gives what it names, as the first."),
    _manager("resume.replicas", "A replica's own record is of the step that is loaded."),
    _manager("resume.stream", "The data goes on in the middle of its sample."),
    _manager("resume.async", "An async save holds the state at the call."),
    _manager("resume.pinned", "So does one staged in pinned memory."),
    _manager("resume.modes", "What one async mode saves, every mode saves."),
    _manager(
        "resume.async-error",
        "A failed async save raises at the next call.",
        after=("resume.async",),
    ),
    _manager("resume.async-load", "A load during an async save gets a whole step."),
    _manager("resume.begun", "A step counts when complete, not when begun."),
    _manager("resume.overwrite", "A step saved again is all old or all new."),
    _manager("resume.retention", "keep_latest_k removes the oldest, nothing else."),
    _manager("resume.export-dtype", "The last save has the dtype asked for."),
    _manager("exclude.subsets", "Excluded states keep their values, others load."),
    _manager(
        "exclude.unknown",
        "An unknown name in exclude_from_loading raises.",
        after=("exclude.subsets",),
    ),
    _manager(
        "exclude.coupled", "The optimizer without its scheduler raises.", after=("exclude.subsets",)
    ),
    _manager("optimizer.none", "None in a state saves and comes back."),
    _manager(
        "optimizer.none-over-moments",
        "None never replaces a healthy moment.",
        after=("resume.newest",),
    ),
    _manager("optimizer.gradients", "Gradients present change nothing."),
    _manager("optimizer.stateless", "No state stays no state."),
    _manager("optimizer.dtypes", "State keeps its types and dtypes."),
    _manager("optimizer.by-name", "State belongs to names, not to positions."),
    _manager("optimizer.tied", "A tied pair stays one tensor under any name."),
    _manager("optimizer.groups", "Each group keeps its hyperparameters."),
    _manager("optimizer.older-file", "Hyperparameters newer than the file keep theirs."),
    _manager("optimizer.no-gradient", "A parameter without state stays without."),
    _manager("optimizer.frozen", "A frozen parameter keeps its moments."),
    _manager("optimizer.swapped", "Moments told to lie in host memory come back."),
    _manager("optimizer.emptied", "Emptied storage is refused by name."),
    Check("job.unchanged", 5, "A job that learns nothing gives its files back.", _JOB, ()),
    Check("job.resume", 5, "A resumed job equals one that was never stopped.", _JOB, ()),
    Check("job.export", 5, "What a job exports is its last step under the files' keys.", _JOB, ()),
)

BY_ID: dict[str, Check] = {check.id: check for check in CONTRACT}


def select(
    globs: Sequence[str] = (), *, level: int | None = None, version: str = VERSION
) -> tuple[Check, ...]:
    """Checks by glob and highest level; a glob that matches nothing is an error.

    Those of the contract's `version`, and later ones whose whole id is among the globs.
    ConfigError for a version that is not known here.
    """
    _known_version(version)
    if level is not None and level not in LEVELS:
        raise ConfigError(
            Problem(
                code="check.unknown-level",
                what=f"the contract has no level {level}",
                expected=", ".join(f"{number} ({what})" for number, what in LEVELS.items()),
                fix=f"name one of {min(LEVELS)} to {max(LEVELS)}",
            )
        )
    for glob in globs:
        if not fnmatch.filter(BY_ID, glob):
            raise _unknown("--check", glob)
    asked = [c for c in CONTRACT if c.id in globs or (c.since <= version and _asked(c, globs))]
    found = tuple(check for check in asked if level is None or check.level <= level)
    if asked and not found:
        raise ConfigError(
            Problem(
                code="check.level-too-low",
                what=f"none of the checks that were asked for is of level {level} or lower",
                actual=", ".join(f"{check.id}: level {check.level}" for check in asked[:3]),
                fix=f"ask for level {min(check.level for check in asked)}, or for no level",
            )
        )
    return found


def _asked(check: Check, globs: Sequence[str]) -> bool:
    return not globs or any(fnmatch.fnmatchcase(check.id, glob) for glob in globs)


def previews(
    globs: Sequence[str] = (), *, level: int | None = None, version: str = VERSION
) -> list[str]:
    """Notes of the checks that `select` holds back because they came with a later version."""
    later: dict[str, list[str]] = {}
    chosen = select(globs, level=level, version=version)
    for check in CONTRACT:
        asked = _asked(check, globs) and (level is None or check.level <= level)
        if asked and check not in chosen:
            later.setdefault(check.since, []).append(check.id)
    return [
        f"{len(ids)} preview{'s' if len(ids) > 1 else ''} of {since} did not run: {', '.join(ids)}"
        for since, ids in sorted(later.items())
    ]


def _known_version(version: str) -> None:
    every = sorted({VERSION, *(check.since for check in CONTRACT)})
    if not re.fullmatch(r"\d{4}\.\d{2}", version) or not every[0] <= version <= every[-1]:
        raise ConfigError(
            Problem(
                code="check.unknown-contract",
                what=f"no version {version!r} of the contract is known here",
                expected=" to ".join(dict.fromkeys((every[0], every[-1]))),
                fix=f"name one of {', '.join(every)}, or install a newer torchtitan-ckpt",
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
            fix=f"did you mean {near}?" if near else "`torchtitan-ckpt checks` lists the ids",
        )
    )
