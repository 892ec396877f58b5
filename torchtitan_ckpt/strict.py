"""Whether a checkpoint fits a whole job: keys, shapes and dtypes over all ranks together.

A rank holds a part of the model, so only all ranks together can say that the file has a key for
which there is no place. Everything is found before any data moves, and said at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import xxhash

from torchtitan_ckpt.agree import is_own
from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.errors import MismatchError, Problem, list_keys, nearest
from torchtitan_ckpt.manifest import Manifest, is_floating

# What older versions stored and a model computes by itself when it is built.
DERIVED = ("freqs_cis", "*.freqs_cis", "rope.cache", "*.rope.cache", "*.rotary_emb.inv_freq")

# Digits of the significand and bits of the exponent; a float fits where both are no fewer.
_FLOATS = {"float16": (11, 5), "bfloat16": (8, 8), "float32": (24, 8), "float64": (53, 11)}

_ROWS = 8  # pairs of shapes that a message lists

# Shape and dtype; None for what is no tensor.
Spec = tuple[tuple[int, ...], str] | None


@dataclass(frozen=True, slots=True)
class Fit:
    """What may be loaded: `narrowed` keys need a rounding cast; `notes` are for the log."""

    narrowed: frozenset[str]
    excused: frozenset[str]
    notes: tuple[str, ...]


def spec(value: Any) -> Spec:
    """Global shape and dtype of a tensor; None for a value that is no tensor."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return None


def compare(
    specs: Mapping[str, Spec],
    manifest: Manifest,
    relevant: Iterable[str],
    ranks: Ranks,
    *,
    casts: bool,
    narrow: bool,
    excuse: Sequence[str] = (),
    any_dtype: Collection[str] = (),
) -> Fit:
    """Compare what all ranks want with `relevant` keys of the manifest. A collective.

    `any_dtype` are keys whose stored dtype says nothing (quantized weights). `casts` lets a float
    of the file be loaded into a wider one, `narrow` into any. Raises MismatchError, on every rank
    the same.
    """
    wanted = _union(dict(specs), ranks)
    held = set(relevant)
    patterns = (*excuse, *DERIVED)
    excused = {key for key in wanted.keys() ^ held if any(fnmatchcase(key, p) for p in patterns)}
    missing = sorted(wanted.keys() - held - excused)
    unexpected = sorted(held - wanted.keys() - excused)
    problems = _key_problems(manifest, missing, unexpected)
    kinds: dict[tuple[str, str], list[str]] = {}
    shapes: dict[tuple[str, str], list[str]] = {}
    dtypes: dict[tuple[str, str], list[str]] = {}
    for key in sorted(wanted.keys() & held):
        want, entry = wanted[key], manifest.tensors.get(key)
        if (want is None) != (entry is None):
            words = ("an object", "a tensor") if want is None else ("a tensor", "an object")
            kinds.setdefault(words, []).append(key)
        elif want is not None and entry is not None:
            if want[0] != entry.shape:
                pair = (str(list(want[0])), str(list(entry.shape)))
                shapes.setdefault(pair, []).append(key)
            if want[1] != entry.dtype and key not in any_dtype:
                dtypes.setdefault((want[1], entry.dtype), []).append(key)
    problems += _differences(manifest, "kind", "are of another kind", kinds)
    problems += _shape_problems(manifest, shapes)
    reshaped = sum(map(len, shapes.values()))
    if 2 * (len(missing) + reshaped) > len(wanted):
        problems.insert(0, _another_model(manifest, wanted, missing, unexpected, reshaped))
    notes = [f"left out, as excused: {list_keys(sorted(excused))}"] if excused else []
    narrowed: set[str] = set()
    for (want_dtype, held_dtype), keys in dtypes.items():
        how = _cast(held_dtype, want_dtype)
        if (how == "widen" and casts) or (how == "narrow" and casts and narrow):
            notes.append(
                f"{len(keys)} tensors are cast from {held_dtype} (file) to {want_dtype} (model)"
            )
            narrowed.update(keys if how == "narrow" else ())
        else:
            problems.append(_dtype_problem(manifest, want_dtype, held_dtype, keys, how, casts))
    if problems:
        raise MismatchError(*problems)
    return Fit(frozenset(narrowed), frozenset(excused), tuple(notes))


def _union(mine: dict[str, Spec], ranks: Ranks) -> dict[str, Spec]:
    """What all ranks want. Ranks that want the same thing, as most do, send it once.

    What each rank has of its own (its data loader's entry) would make all of them differ.
    """
    own = {key: value for key, value in mine.items() if is_own(key)}
    shared = {key: value for key, value in mine.items() if key not in own}
    digest = xxhash.xxh3_128_hexdigest(repr(sorted(shared.items())).encode())
    told = ranks.gather((digest, own))
    first = [d for d, _ in told].index(digest)
    out: dict[str, Spec] = {}
    for part in (*ranks.gather(shared if first == ranks.rank else {}), *(o for _, o in told)):
        out.update(part)
    return out


def _cast(held: str, want: str) -> str:
    if not (is_floating(held) and is_floating(want)):
        return "never"
    small, large = _FLOATS.get(held), _FLOATS.get(want)
    if small and large and small[0] <= large[0] and small[1] <= large[1]:
        return "widen"
    return "narrow"


def _key_problems(
    manifest: Manifest, missing: Sequence[str], unexpected: Sequence[str]
) -> list[Problem]:
    problems = []
    if missing:
        guess = nearest(missing[0], unexpected)
        problems.append(
            Problem(
                code="load.missing",
                what=f"{len(missing)} keys that the job wants are not in the checkpoint.",
                where=manifest.path,
                expected=list_keys(missing),
                actual=f"nearest: {guess}" if guess else "",
                cause="renamed, another model, or another native name generation"
                if guess
                else "another model, or a state that the saving job did not have",
                fix="use the model that saved it; torchtitan-ckpt convert changes generations; "
                "--checkpoint.excuse_mismatch PATTERN excuses keys by name",
            )
        )
    if unexpected:
        problems.append(
            Problem(
                code="load.unexpected",
                what=f"{len(unexpected)} keys of the checkpoint have no place in the job.",
                where=manifest.path,
                actual=list_keys(unexpected),
                cause="a larger or another model, or parameters that no optimizer holds any more",
                fix="use the model that saved it, or excuse the keys by name with "
                "--checkpoint.excuse_mismatch PATTERN",
            )
        )
    return problems


def _another_model(
    manifest: Manifest,
    wanted: Collection[str],
    missing: Collection[str],
    unexpected: Collection[str],
    reshaped: int,
) -> Problem:
    """The one line that says what all the others come from."""
    return Problem(
        code="load.another-model",
        what=f"another model: of the {len(wanted)} keys that the job wants, {len(missing)} are not "
        f"in the checkpoint and {reshaped} have another shape; {len(unexpected)} of its keys have "
        "no place in the job.",
        where=manifest.path,
        fix="use the configuration that saved it, or name another checkpoint; torchtitan-ckpt "
        "inspect shows what this one holds",
    )


def _differences(
    manifest: Manifest, kind: str, words: str, groups: Mapping[tuple[str, str], list[str]]
) -> list[Problem]:
    return [
        Problem(
            code=f"load.{kind}",
            what=f"{len(keys)} keys {words} in the checkpoint: {list_keys(keys)}",
            where=manifest.path,
            expected=f"{want} (job)",
            actual=f"{held} (checkpoint)",
            cause="another version saved it",
            fix="use the configuration that saved it",
        )
        for (want, held), keys in groups.items()
    ]


def _shape_problems(
    manifest: Manifest, groups: Mapping[tuple[str, str], list[str]]
) -> list[Problem]:
    """All shapes that differ, as one problem with a line for each pair of shapes."""
    if not groups:
        return []
    count = sum(map(len, groups.values()))
    pairs = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = [f"{want} and {held}: {list_keys(keys, 3)}" for (want, held), keys in pairs[:_ROWS]]
    if len(pairs) > _ROWS:
        rows.append(f"… and {len(pairs) - _ROWS} more pairs of shapes")
    return [
        Problem(
            code="load.shape",
            what=f"{count} tensor{' has' if count == 1 else 's have'} another shape in the "
            "checkpoint.",
            where=manifest.path,
            expected="the shapes of the job, which stand first",
            actual="\n".join(rows),
            cause="a model of other sizes",
            fix="use the configuration that saved it",
        )
    ]


def _dtype_problem(
    manifest: Manifest, want: str, held: str, keys: Sequence[str], how: str, casts: bool
) -> Problem:
    if not casts:
        cause = "a resume never casts: it would not continue the run that was saved"
        fix = f"resume with a model in {held}, or start a new job from it with initial_load_path"
    elif how == "narrow":
        cause = "the cast would drop digits"
        fix = "--checkpoint.allow_narrowing permits it for an initial, model-only load"
    else:
        cause = "floats and integers are never cast into each other"
        fix = "use the model that saved it"
    return Problem(
        code="load.dtype",
        what=f"{len(keys)} tensors have another dtype in the checkpoint: {list_keys(keys)}",
        where=manifest.path,
        expected=f"{want} (job)",
        actual=f"{held} (checkpoint)",
        cause=cause,
        fix=fix,
    )
