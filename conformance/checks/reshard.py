"""Chapter `reshard`: what a manager saves under one split of a job it loads under another.

Splits are torch's own, on rank processes; weights and gradients are exact in any order, so every
comparison with the job that never was split is bit for bit.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.checks.reshard_adapter import convert, placements, shapes
from conformance.degrees import Case
from conformance.jobs import STATES, Job, small_table, truth
from conformance.lab import Lab, NotApplicable
from conformance.managed import Held, ManagerRaised, PlainAdapter, brief, differences, opened
from conformance.manager_lab import ManagerLab, case_of, merged, takes
from conformance.spread import Picture, Row, Spread
from conformance.verdict import Finding

__all__ = [
    "convert",
    "dataloader",
    "full",
    "hf",
    "next_step",
    "placements",
    "replicas",
    "shapes",
]

SAVED = 2  # steps of the job that saves
_HF = ("last_save_in_hf", "initial_load_in_hf")
_BY_OFFSETS = "store and seek each rank's part by its place in the whole tensor"


def full(lab: Lab) -> Iterator[Finding]:
    """Model, moments, scheduler, counters and, where it can be, the loader's position."""
    for source, target in lab.managers.pairs:
        yield from _resharded(lab.managers, source, target)[0]


def next_step(lab: Lab) -> Iterator[Finding]:
    """Second copies that a load leaves stale show in the step after a load that was right."""
    for source, target in lab.managers.pairs:
        yield from _resharded(lab.managers, source, target)[1]


def dataloader(lab: Lab) -> Iterator[Finding]:
    """Positions of another data-parallel degree: handed to the loader or refused, never lost."""
    managers, rows = lab.managers, []
    for words in (("fsdp2", "1"), ("1", "fsdp2")):
        source, target = map(case_of, words)
        folder = _saved(managers, source)
        ranks = managers.run(_load_position, target.ranks, folder, target)
        wanted = [_position(rank) for rank in range(source.ranks)]
        if not all(isinstance(at, str) or at == _position(rank) for rank, at in enumerate(ranks)):
            yield Finding(
                what="a data loader of another data-parallel degree lost its position in silence",
                keys=("dataloader",),
                coordinate=_pair(source, target),
                expected="a refusal that names the data loader or its degree",
                actual="load() returned, and the loader was not told",
                cause="each rank seeks its own entry, and there is none of its number or too many",
                remedy="let the loader see what was saved, or compare the degrees and refuse",
            )
        rows.append(Row(" to ".join(words), (_each(wanted), _each(ranks))))
    title = "where each rank's data loader stands"
    lab.pictures["reshard.dataloader"] = (_told(lab, title, rows),)


def replicas(lab: Lab) -> Iterator[Finding]:
    """A plain tensor is one value: where ranks disagree, one of them would be lost."""
    ranks = lab.managers.run(_save_disagreeing, 2, lab.managers.folder())
    own = [_own_value(rank) for rank in range(2)]
    if any(not isinstance(found, str) and found != own[n] for n, found in enumerate(ranks)):
        yield Finding(
            what="a plain tensor that differs between ranks was saved as if it did not",
            keys=("extra.value",),
            coordinate="2 ranks",
            expected="a refusal, or to each rank its own value",
            actual=", ".join(f"rank {n}: {found}" for n, found in enumerate(ranks)),
            cause="one rank's value was written for all",
            remedy="compare plain tensors over the ranks before writing, or give each rank a name",
        )
    rows = [Row("fsdp2", (_each(own), _each(ranks)))]
    title = "a plain tensor that ranks disagree about"
    lab.pictures["reshard.replicas"] = (_told(lab, title, rows),)


def hf(lab: Lab) -> Iterator[Finding]:
    """Hugging Face files hold the whole model, whoever wrote them and whoever reads them."""
    missing = [name for name in _HF if not takes(lab.managers.manager, name)]
    if missing:
        raise NotApplicable(f"the manager has no option {' or '.join(missing)}")
    (expected,) = lab.managers.run(_model_that_was_saved, 1)
    for source, target in lab.managers.pairs:
        where = _pair(source, target)
        folder = lab.managers.folder()
        lab.managers.run(_export, source.ranks, folder, source)
        step = f"{folder}/checkpoint/step-{SAVED}"
        yield from _files(step, where, expected)
        yield from lab.managers.findings(_import, target.ranks, step, target, where)


def _resharded(lab: ManagerLab, source: Case, target: Case) -> tuple[list[Finding], list[Finding]]:
    """What is wrong after the load, and after one step more; each pair runs once."""

    def make() -> tuple[list[Finding], list[Finding]]:
        folder, same = _saved(lab, source), _data_degree(source) == _data_degree(target)
        ranks = lab.run(_load_and_step, target.ranks, folder, target, same, _pair(source, target))
        loaded, stepped = zip(*ranks, strict=True)
        return merged(f for one in loaded for f in one), merged(f for one in stepped for f in one)

    return lab.once(("reshard", source.name, target.name), make)


def _saved(lab: ManagerLab, case: Case) -> str:
    def make() -> str:
        folder = lab.folder()
        lab.run(_train_and_save, case.ranks, folder, case)
        return folder

    return lab.once(("saved", case.name), make)


def _data_degree(case: Case) -> int:
    return case.degrees.dp_replicate * case.degrees.dp_shard


def _pair(source: Case, target: Case) -> str:
    return f"saved under {source.name}, loaded under {target.name}"


def _told(lab: Lab, title: str, rows: list[Row]) -> Picture:
    return Picture(f"{title} · {lab.subject.name}", ("saved", "loaded"), tuple(rows))


def _each(ranks: Sequence[float | str]) -> tuple[Spread]:
    """What every rank has: a number, or the words of a refusal."""
    refusal = next((found for found in ranks if isinstance(found, str)), "")
    values = ["refused" if isinstance(found, str) else f"{found:g}" for found in ranks]
    return (Spread.each(values, textwrap.shorten(refusal, 120, placeholder=" …")),)


def _position(rank: int) -> int:
    """Where the loader of a rank stands that has the data of its number."""
    return SAVED * (3 + rank)


def _own_value(rank: int) -> float:
    return rank + 1.0


def _files(step: str, where: str, expected: Mapping[str, Any]) -> Iterator[Finding]:
    """The files of an export, as the safetensors library reads them, against the truth."""
    from safetensors import safe_open

    wrong: dict[str, str] = {f"model.{key}": "missing" for key in small_table()}
    for path in sorted(Path(step).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  not a dict
                value, want = file.get_tensor(key), expected.get(key.removeprefix("model."))
                same = want is not None and value.dtype == want.dtype and torch.equal(value, want)
                wrong[key] = "" if same else brief(value)
    bad = {key: words for key, words in wrong.items() if words}
    if bad:
        first = next(iter(bad))
        yield Finding(
            what=f"{len(bad)} of {len(wrong)} tensors of the exported files are wrong",
            keys=tuple(bad),
            coordinate=where.partition(",")[0],
            expected=brief(expected.get(first.removeprefix("model."))),
            actual=bad[first],
            remedy="put every tensor together from all ranks that hold a part of it, as it is",
            oracle="the job that was never split",
        )


# --- on the ranks -------------------------------------------------------------------------------


def _model_that_was_saved(manager: Any) -> dict[str, Any]:
    """As a job has it that was never split: on the host, where the files are compared."""
    state = truth(small_table(), SAVED)
    return {key: state[key].cpu() for key in small_table()}


def _train_and_save(manager: Any, folder: str, case: Case) -> None:
    job = Job.start(small_table(), case.degrees, chunks=case.chunks)
    job.train(SAVED)
    with opened(manager, job, folder, interval=SAVED) as found:
        found.save(SAVED)


def _load_and_step(
    manager: Any, folder: str, case: Case, same_data: bool, where: str
) -> tuple[list[Finding], list[Finding]]:
    job = Job.start(small_table(), case.degrees, chunks=case.chunks, empty=True)
    excluded = [] if same_data else ["dataloader"]
    at = {name: SAVED for name in STATES if name not in excluded}
    with opened(manager, job, folder, load_only=True, exclude_from_loading=excluded) as found:
        found.load()
    loaded = differences(job, at, coordinate=where, remedy=_BY_OFFSETS)
    job.train()
    if loaded:  # what is wrong already is wrong still
        return loaded, []
    later = dict.fromkeys(at, SAVED + 1)
    words = {"what": "after one step more", "remedy": "refresh second copies after a load"}
    return [], differences(job, later, coordinate=where, **words)


def _load_position(manager: Any, folder: str, case: Case) -> int | str:
    """The position after a load, or the words of its refusal."""
    job = Job.start(small_table(), case.degrees, chunks=case.chunks)
    try:
        with opened(manager, job, folder, load_only=True) as found:
            found.load()
    except ManagerRaised as refusal:
        return str(refusal)
    return job.position


def _save_disagreeing(manager: Any, folder: str) -> float | str:
    """What this rank has back of a value of its own, or the words of a refusal."""
    case, own = case_of("fsdp2"), _own_value(dist.get_rank())
    job = Job.start(small_table(), case.degrees)
    try:
        saved, target = (Held(torch.tensor([own + n])) for n in (0.0, 4.0))
        with opened(manager, job, folder, states={"extra": saved}, interval=1) as found:
            found.save(1)
        with opened(manager, job, folder, states={"extra": target}, load_only=True) as found:
            found.load()
    except ManagerRaised as refusal:
        return str(refusal)
    return float(target.value)


def _export(manager: Any, folder: str, case: Case) -> None:
    job = Job.start(small_table(), case.degrees, chunks=case.chunks)
    job.train(SAVED)
    adapter, options = PlainAdapter(small_table()), {"interval": 99, "last_save_in_hf": True}
    with opened(manager, job, folder, adapter=adapter, **options) as found:
        found.save(SAVED, last_step=True)


def _import(manager: Any, step: str, case: Case, where: str) -> list[Finding]:
    job = Job.start(small_table(), case.degrees, chunks=case.chunks, empty=True)
    options = {"load_only": True, "initial_load_in_hf": True, "initial_load_path": step}
    with opened(manager, job, f"{step}/none", adapter=PlainAdapter(small_table()), **options) as m:
        m.load()
    return differences(job, {"model": SAVED}, coordinate=where, remedy=_BY_OFFSETS)
