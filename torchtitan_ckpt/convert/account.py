"""Whether a conversion is whole, what it keeps of a step, what room it needs; from manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtitan_ckpt.config import TRAINING_STATES
from torchtitan_ckpt.errors import ConfigError, MismatchError, Problem, list_keys, nearest
from torchtitan_ckpt.manifest import Manifest, TensorEntry
from torchtitan_ckpt.mapping.mapping import Mapping as KeyMapping
from torchtitan_ckpt.mapping.plan import Plan
from torchtitan_ckpt.mapping.rule import Rule, Tied
from torchtitan_ckpt.state import rng


def state_of(key: str) -> str:
    """The part of a training step that a native key belongs to."""
    head = key.partition(".")[0]
    return head if head in TRAINING_STATES else "model"


def kept_keys(manifest: Manifest, only: str | None, exclude: tuple[str, ...]) -> list[str]:
    """The keys that `--only` and `--exclude` leave. Raises ConfigError for absent states."""
    present = {state_of(key) for key in manifest.keys}
    unknown = [name for name in exclude if name not in present]
    if unknown:
        near = nearest(unknown[0], present)
        raise ConfigError(
            Problem(
                code="convert.exclude",
                what=f"nothing of {', '.join(unknown)} is in the checkpoint",
                where=manifest.path,
                expected=f"some of {', '.join(sorted(present))}",
                actual=f"nearest: {near}" if near else "",
                fix="correct --exclude",
            )
        )
    keys = [k for k in (*manifest.tensors, *manifest.objects) if state_of(k) not in exclude]
    return keys if only is None else [k for k in keys if state_of(k) == only]


# What a format writes beside the bytes of a tensor or an object: an archive and its places in
# `.metadata`; a line of a header; an entry of a zip. Measured, and rounded up.
_BESIDE = {"dcp": 2048, "hf": 256, "pt": 512}


def room(target: str, entries: Sequence[TensorEntry], objects: int, piece: int) -> int:
    """Bytes that a result takes on disk, at most, values of objects aside."""
    size = sum(entry.nbytes for entry in entries)
    cuts = size // piece if target == "dcp" else 0  # each piece is an item of its own
    return size + _BESIDE[target] * (len(entries) + objects + cuts)


def missing(
    table: KeyMapping, side: int, plan: Plan, expected: Mapping[str, TensorEntry]
) -> list[str]:
    """Expected keys of `side` that the plan does not make, but for declared losses."""
    made = plan.targets
    out = []
    for key in expected:
        if key in made:
            continue
        match = table.index(side).match(key)
        entry = None if match is None else table.entries[match.entry]
        if isinstance(entry, (Rule, Tied)):
            out.append(key)
    return out


def refuse_unfit(
    absent: list[str], plan: Plan, expected: Mapping[str, TensorEntry], where: str
) -> None:
    """Raise MismatchError for an incomplete result, or one of other shapes than the config's."""
    problems = []
    if absent:
        problems.append(
            Problem(
                code="convert.incomplete",
                what=f"{len(absent)} tensors of the model cannot be made from the source",
                where=where,
                expected=list_keys(absent),
                cause="a checkpoint of a smaller model, or one that is not whole",
                fix="give the --config that the checkpoint was made with",
            )
        )
    shapes = [
        (key, entry.shape, expected[key].shape)
        for key, entry in plan.targets.items()
        if key in expected and entry.shape != expected[key].shape
    ]
    if shapes:
        key, actual, wanted = shapes[0]
        problems.append(
            Problem(
                code="convert.shape",
                what=f"{len(shapes)} tensors would have another shape than the config says",
                where=list_keys([k for k, _, _ in shapes]),
                expected=f"{key} {list(wanted)}",
                actual=str(list(actual)),
                cause="a config of another model, or a padded vocabulary",
                fix="give the --config that the checkpoint was made with",
            )
        )
    if problems:
        raise MismatchError(*problems)


def is_plain(value: object) -> bool:
    """Whether torch.load takes a value with weights_only=True."""
    if isinstance(value, Mapping):
        return all(map(is_plain, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple, set)):
        return type(value) in (list, tuple, set, torch.Size) and all(map(is_plain, value))
    plain = (bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
    return value is None or type(value) in plain or isinstance(value, torch.Tensor)


def flat_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """Objects of a `.pt` under DCP's keys: a state's dict is taken apart, as a save would."""
    out: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        apart = isinstance(value, Mapping) and value and all(isinstance(k, str) for k in value)
        if apart and not rng.is_value(key):
            for name, part in value.items():
                add(f"{key}.{name}", part)
        elif value is not None:
            out[key] = value

    for key, value in values.items():
        if key.partition(".")[0] in TRAINING_STATES:
            add(key, value)
        else:
            out[key] = value
    return out
