"""`diff`: how do two checkpoints differ?

torchtitan-ckpt diff outputs/x/checkpoint/step-500 outputs/y/checkpoint/step-500
torchtitan-ckpt diff outputs/x/checkpoint/step-500 ./Qwen3-0.6B      # DCP with Hugging Face
"""

from __future__ import annotations

import json as json_module
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from torchtitan_ckpt.errors import printable

if TYPE_CHECKING:
    from torchtitan_ckpt.diff.report import Difference, Group
    from torchtitan_ckpt.diff.values import Spot

_ORDER = ("different", "shape", "close", "dtype", "equal")
_ACCEPTED = {"nothing": (), "dtype": ("dtype",), "close": ("dtype", "close")}


@dataclass(frozen=True)
class Args:
    """Options of `torchtitan-ckpt diff`."""

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """A checkpoint of any format."""

    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """Another one, of the same or another format, dtype and split."""

    family: str | None = None
    """The family whose table relates native and Hugging Face names; by default that of the
    config.json in or beside one of them."""

    config: str | None = None
    """A config.json, its folder, or a published model's name."""

    adapter: str | None = None
    """pkg.mod:factory of a state-dict adapter, instead of a family."""

    generation: str | None = None
    """Native names of torchtitan 0.3.0 (titan) or of torchtitan-npu (npu); by default as found."""

    only: str | None = None
    """Only these parts of a training step, separated by commas: model, optimizer, lr_scheduler,
    dataloader, train_state."""

    accept: Literal["nothing", "dtype", "close"] = "nothing"
    """What still counts as equal for the exit code: values that differ by their dtype's rounding
    only (dtype), or also those within the tolerance (close)."""

    ulps: int = 4
    """Elements within so many units in the last place are close."""

    atol: float = 0.0
    """Elements within this absolute difference are close."""

    no_causes: bool = False
    """Do not look for permutations, transposes and exchanged tensors in what differs."""

    threads: int | None = None
    """Threads that read; by default one a core, at most 8."""

    trust: bool = False
    """Unpickle whatever the files name. Never for files from strangers."""

    json: bool = False
    """Print JSON."""


def run(args: Args) -> int:
    """0 equal, 1 different, 2 usage, 3 not readable or refused, 5 nothing was compared."""
    from torchtitan_ckpt.diff import Options, diff
    from torchtitan_ckpt.progress import bar

    options = Options(
        a=args.a,
        b=args.b,
        family=args.family,
        config=args.config,
        adapter=args.adapter,
        generation=args.generation,
        only=tuple(part.strip() for part in args.only.split(",")) if args.only else (),
        ulps=args.ulps,
        atol=args.atol,
        causes=not args.no_causes,
        threads=args.threads,
        trust=args.trust,
    )
    with bar() as shown:
        found = diff(options, None if shown is None else partial(shown.told, "comparing"))
    print(json_module.dumps(_json(found), indent=1) if args.json else text(found))
    if found.only_a or found.only_b:
        return 1
    if not found.compared:
        return 5
    wrong = [v for v in _ORDER if v != "equal" and v not in _ACCEPTED[args.accept]]
    return 1 if found.count(*wrong) else 0


def text(found: Difference) -> str:
    """The report for people."""
    rows = [f"a  {found.a}", f"b  {found.b}", f"compared {found.route}"]
    for verdict in _ORDER[:-1]:
        for group in found.groups:
            if group.verdict == verdict:
                rows += _group(group)
    rows += _only("only in a", found.only_a, found)
    rows += _only("only in b", found.only_b, found)
    rows += [f"left out: {line}" for line in found.left_out]
    rows += [f"note: {line}" for line in found.notes]
    names = {"dtype": "in dtype only", "shape": "in shape", "close": "close"}
    counts = [f"{found.count(v)} {names.get(v, v)}" for v in reversed(_ORDER) if found.count(v)]
    only = [
        f"{len(keys)} only in {side}"
        for side, keys in (("a", found.only_a), ("b", found.only_b))
        if keys
    ]
    rows.append(", ".join([*counts, *only]) or "nothing in common")
    return "\n".join(rows)


def _group(group: Group) -> list[str]:
    label = {"dtype": "dtype only"}.get(group.verdict, group.verdict)
    times = f" ({group.count})" if group.count > 1 else ""
    rows = [f"{label}: {group.name}{times}"]
    if group.a == group.b:
        rows.append(f"     {group.a}")
    else:
        rows.append(f"     a {group.a}, b {group.b}")
    if group.detail:
        rows.append(f"     {group.detail}")
    if group.verdict == "dtype":
        rows[-1] += "; the same values" if group.exact else "; equal after rounding"
    if group.differing:
        share = group.differing / group.elements
        ulps = f", {group.max_ulps} ULPs" if group.max_ulps else ""
        nans = f"; {group.one_nan} NaN on one side only" if group.one_nan else ""
        rows.append(
            f"     {group.differing} of {group.elements} elements ({share:.3%}), "
            f"at most {group.max_abs:.6g}{ulps} apart{nans}"
        )
    for name, found in (("first", group.first), ("worst", group.worst)):
        if found is not None:
            key, spot = found
            rows.append(f"     {name} {printable(key)} {list(spot.at)}: a {spot.a} {spot.bits_a}, "
                        f"b {spot.b} {spot.bits_b}")  # fmt: skip
    rows += [f"     cause {cause}" for cause in group.causes]
    return rows


def _only(label: str, keys: list[str], found: Difference) -> list[str]:
    """Keys of one side in groups; a training state that the other side lacks altogether is one."""
    from torchtitan_ckpt.config import TRAINING_STATES
    from torchtitan_ckpt.errors import group_keys

    both = {group.name.partition(".")[0] for group in found.groups}
    sides = [{key.partition(".")[0] for key in side} for side in (found.only_a, found.only_b)]
    lacked = (set(TRAINING_STATES) & (sides[0] ^ sides[1])) - both
    states: dict[str, int] = {}
    rest = []
    for key in keys:
        head = key.partition(".")[0]
        if head in lacked:
            states[head] = states.get(head, 0) + 1
        else:
            rest.append(key)
    rows = [f"{label}: all of {name} ({n})" for name, n in states.items()]
    groups = group_keys(rest)
    rows += [f"{label}: {name}" + (f" ({n})" if n > 1 else "") for name, n in groups[:20]]
    return rows + ([f"{label}: … and {len(groups) - 20} more groups"] if len(groups) > 20 else [])


def _json(found: Difference) -> dict[str, Any]:
    return {
        "a": found.a,
        "b": found.b,
        "route": found.route,
        "bytes": found.bytes_read,
        "counts": {v: found.count(v) for v in _ORDER},
        "groups": [_group_json(group) for group in found.groups],
        "only_a": found.only_a,
        "only_b": found.only_b,
        "left_out": found.left_out,
        "notes": found.notes,
    }


def _group_json(group: Group) -> dict[str, Any]:
    out = asdict(group)
    out["max_abs"] = _number(group.max_abs)
    for name in ("first", "worst"):
        value: tuple[str, Spot] | None = getattr(group, name)
        if value is not None:
            out[name] = {"key": value[0], **asdict(value[1])}
            out[name]["apart"] = _number(value[1].apart)
    return out


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value - value == 0 else None
