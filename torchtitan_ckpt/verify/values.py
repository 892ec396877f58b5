"""From what a deep read saw to problems and notes: which values are wrong, which are only odd.

NaN and Inf are wrong wherever they are. A weight matrix of one value is wrong; a bias, a norm's
scale or a moment of one value is normal in a young model, and only said.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchtitan_ckpt.config import TRAINING_STATES
from torchtitan_ckpt.errors import Problem, group_keys, list_keys
from torchtitan_ckpt.manifest import Manifest, TensorEntry
from torchtitan_ckpt.scan import Values, coordinate


def judge(manifest: Manifest, values: Mapping[str, Values]) -> tuple[list[Problem], list[str]]:
    """Problems and notes about values."""
    bad: dict[str, Values] = {}
    flat: list[str] = []
    odd: dict[str, list[str]] = {}
    for key, seen in values.items():
        entry = manifest.tensors[key]
        if seen.nans or seen.infs:
            bad[key] = seen
        elif seen.constant:
            if _is_weight(entry):
                flat.append(key)
            else:
                odd.setdefault("0" if seen.zero else seen.value(), []).append(key)
    problems = []
    if bad:
        key, seen = next(iter(bad.items()))
        nans, infs = (sum(getattr(v, name) for v in bad.values()) for name in ("nans", "infs"))
        problems.append(
            Problem(
                code="verify.not-finite",
                what=f"NaN or Inf in {list_keys(bad)}",
                where=f"{manifest.path}: {key}, {_place(manifest, key, seen)}",
                actual=f"{nans} NaN, {infs} Inf",
                cause="the run diverged, a conversion overflowed, or bytes were overwritten",
                fix="use an earlier step",
            )
        )
    if flat:
        shown = ", ".join(f"{group} = {_one(values, flat, group)}" for group, _ in _few(flat))
        problems.append(
            Problem(
                code="verify.constant",
                what=f"one value only in the weights {list_keys(flat)}",
                where=manifest.path,
                actual=shown,
                cause="a tensor that was never loaded or trained, or a hole of zeros in a file",
                fix="compare with an earlier step (`torchtitan-ckpt diff`)",
            )
        )
    notes = [f"every element is {value}: {list_keys(keys)}" for value, keys in odd.items()]
    return problems, notes


def _is_weight(entry: TensorEntry) -> bool:
    head = entry.key.partition(".")[0]
    floating = entry.dtype.startswith(("float", "bfloat", "complex"))
    return floating and sum(n > 1 for n in entry.shape) > 1 and head not in TRAINING_STATES


def _place(manifest: Manifest, key: str, seen: Values) -> str:
    """Where the first bad value is; of a sharded tensor the shard's own place is not known here."""
    entry = manifest.tensors[key]
    if seen.first_bad is None:
        return ""
    if len(entry.shards) != 1:
        return f"element {seen.first_bad} of a shard"
    return f"at {list(coordinate(seen.first_bad, entry.shape))}"


def _few(keys: list[str]) -> list[tuple[str, int]]:
    return group_keys(keys)[:4]


def _one(values: Mapping[str, Values], keys: list[str], group: str) -> str:
    members = [key for key in keys if group_keys([key])[0][0] == group] or keys[:1]
    return values[members[0]].value()
