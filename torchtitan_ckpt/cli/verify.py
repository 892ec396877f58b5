"""`verify`: is a checkpoint whole and sound?

torchtitan-ckpt verify outputs/x/checkpoint/step-500 --deep
torchtitan-ckpt verify ./Qwen3-0.6B --against qwen3
"""

from __future__ import annotations

import json as json_module
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from torchtitan_ckpt.manifest import Manifest
    from torchtitan_ckpt.verify.completeness import Completeness
    from torchtitan_ckpt.verify.deep import Deep


@dataclass(frozen=True)
class Args:
    """Options of `torchtitan-ckpt verify`."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """A step folder, a folder or file of safetensors, or a .pt file."""

    against: str | None = None
    """What must be there: a family, a config.json or its folder, a published model's name, an
    index, or another checkpoint."""

    config: str | None = None
    """The config for a family: a config.json, its folder, or a published model's name; by default
    the config.json in or beside the checkpoint."""

    deep: bool = False
    """Read everything: checksums, NaN and Inf, tensors of one value."""

    stats: bool = False
    """With --deep (implied): denormals, moments and a histogram of magnitudes for each group."""

    threads: int | None = None
    """Threads that read; by default one a core, at most 8."""

    trust: bool = False
    """Unpickle whatever the file names. Never for files from strangers."""

    json: bool = False
    """Print JSON."""


def run(args: Args) -> int:
    """0 sound, 1 findings, 3 not readable or refused, 5 there was nothing to check."""
    from torchtitan_ckpt.errors import ConfigError, Problem, list_keys
    from torchtitan_ckpt.verify import check_structure

    if args.threads is not None and args.threads < 1:
        raise ConfigError(
            Problem(
                code="verify.threads", what="no thread", where="--threads", fix="give 1 or more"
            )
        )
    structure = check_structure(args.path, trust=args.trust)
    manifest = structure.manifest
    problems, notes = list(structure.problems), list(structure.notes)
    skipped = []
    complete: Completeness | None = None
    deep: Deep | None = None
    if args.against is not None:
        from torchtitan_ckpt.verify.completeness import compare

        complete = compare(manifest, args.against, config=args.config)
        problems += complete.problems
        notes += complete.notes
    if args.deep or args.stats:
        from torchtitan_ckpt.progress import bar
        from torchtitan_ckpt.verify.deep import read_deep
        from torchtitan_ckpt.verify.values import judge

        if structure.unread:
            keys = list_keys(structure.unread)
            skipped.append(f"values and checksums of what cannot be read: {keys}")
        with bar("reading", structure.sound.nbytes) as shown:
            deep = read_deep(
                structure.sound,
                stats=args.stats,
                threads=args.threads,
                trust=args.trust,
                progress=None if shown is None else shown.advance,
            )
        found, odd = judge(manifest, deep.values)
        problems += [*deep.problems, *found]
        notes += odd
    nothing = not manifest.tensors and not manifest.objects
    if args.json:
        print(
            json_module.dumps(
                {
                    "path": args.path,
                    "format": structure.detection.format,
                    "tensors": len(manifest.tensors),
                    "bytes": manifest.nbytes,
                    "against": None if complete is None else _complete_json(complete),
                    "deep": None if deep is None else _deep_json(deep),
                    "skipped": skipped,
                    "notes": notes,
                    "problems": [asdict(problem) for problem in problems],
                },
                indent=1,
            )
        )
    else:
        for problem in problems:
            print(problem)
        for line in notes:
            print(f"note: {line}")
        for line in skipped:
            print(f"not checked: {line}")
        if deep is not None and args.stats:
            print(_stats_text(manifest, deep))
        print(_verdict(args, structure.detection.format, manifest, complete, deep, len(problems)))
    if problems:
        return 1
    return 5 if nothing else 0


def _verdict(
    args: Args,
    format: str | None,
    manifest: Manifest,
    complete: Completeness | None,
    deep: Deep | None,
    count: int,
) -> str:
    from torchtitan_ckpt.inspection import size_text

    parts = [
        f"structure of {len(manifest.tensors)} tensors"
        + (f" and {len(manifest.objects)} objects" if manifest.objects else "")
        + f" in {len(manifest.files)} files"
    ]
    if complete is not None:
        parts.append(f"{complete.matched} of {complete.expected} tensors of {complete.name}")
    if deep is not None:
        parts.append(f"{size_text(deep.bytes_read)} read, checksums: {deep.checksums}")
    else:
        parts.append("values not read (--deep)")
    head = f"{count} problems" if count != 1 else "1 problem"
    return f"{head if count else 'sound'}: {args.path} ({format}): {'; '.join(parts)}"


def _complete_json(complete: Completeness) -> dict[str, Any]:
    return {
        "name": complete.name,
        "expected": complete.expected,
        "matched": complete.matched,
    }


def _deep_json(deep: Deep) -> dict[str, Any]:
    tensors = {}
    for key, values in deep.values.items():
        if values.stats is not None:
            tensors[key] = {
                "nan": values.nans,
                "inf": values.infs,
                "constant": values.constant,
                "mean": _number(values.stats.mean),
                "std": _number(values.stats.std),
                "min": _number(values.stats.smallest),
                "max": _number(values.stats.largest),
                "zeros": values.stats.zeros,
                "denormals": values.stats.denormals,
                "exponents": {str(e): n for e, n in sorted(values.stats.exponents.items())},
            }
    out: dict[str, Any] = {
        "bytes": deep.bytes_read,
        "summed_bytes": deep.summed,
        "checksums": deep.checksums,
        "tensors": len(deep.values),
    }
    return {**out, "stats": tensors} if tensors else out


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value - value == 0 else None


def _stats_text(manifest: Manifest, deep: Deep) -> str:
    from torchtitan_ckpt.errors import group_keys
    from torchtitan_ckpt.inspection import groups_of
    from torchtitan_ckpt.scan import Stats

    rows = ["statistics by group: mean, std, min, max; zeros, denormals; powers of two"]
    for keys in groups_of(deep.values):
        total = Stats()
        for key in keys:
            stats = deep.values[key].stats
            if stats is not None:
                total.merge(stats)
        rows.append(f"  {group_keys(keys)[0][0]}")
        rows.append(
            f"    {total.mean:.4g}, {total.std:.4g}, {total.smallest:.4g}, {total.largest:.4g}; "
            f"{total.zeros}, {total.denormals}; {_bars(total.exponents)}"
        )
    return "\n".join(rows)


def _bars(exponents: dict[int, int]) -> str:
    """A histogram in one line: 2^low, a bar for each power of two, 2^high."""
    if not exponents:
        return "-"
    low, high = min(exponents), max(exponents)
    most = max(exponents.values())
    low = max(low, high - 47)
    marks = " ▁▂▃▄▅▆▇█"
    bars = (marks[-(-exponents.get(e, 0) * (len(marks) - 1) // most)] for e in range(low, high + 1))
    return f"2^{low} {''.join(bars)} 2^{high}"
