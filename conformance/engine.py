"""Runs subjects through the contract: `check()`.

Cheapest level first; a check whose input is missing is n/a with the reason, a check after a failed
one is blocked, a check that raises by itself is an error of the gate. Nothing disappears.
"""

from __future__ import annotations

import importlib
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from conformance.contract import BY_ID, RUNS, VERSION, Check, known, select
from conformance.lab import MAX_ELEMENTS, Lab
from conformance.raised import AdapterRaised, Kept, NotApplicable, told
from conformance.subject import Subject, place_of
from conformance.verdict import Cell, Finding, Report, Verdict
from torchtitan_ckpt.device import ENV, Device, current
from torchtitan_ckpt.errors import CheckpointError, ConfigError, Problem

SEED = 20261201
Progress = Callable[[str, int, int], None]
# Checks that draw cases; each repeats one of them.
SEARCHING = ("values.drawn", "files.reread")
# The check that tells what is kept between calls; others can say nothing of such an adapter.
_KEPT = "purity.stateless"
# Checks that go through every pair of the subject's splits.
_RESHARDED = ("reshard.full", "reshard.next-step", "reshard.hf")


def check(
    subjects: Subject | str | Iterable[Subject | str],
    *,
    checks: Sequence[str] = (),
    level: int | None = None,
    seed: int = SEED,
    max_elements: int = MAX_ELEMENTS,
    version: str = VERSION,
    without: Sequence[str] = (),
    degrees: Sequence[Any] = (),
    device: str | None = None,
    example: str = "",
    progress: Progress | None = None,
) -> Report:
    """Run subjects through the contract and return every cell.

    checks    globs of ids; level: the highest level; without: ids that are left out
    version   of the contract: checks that came with a later one are previews, and run when named
    degrees   parallel degrees for the chapter reshard, in place of the subjects' own
    device    cpu, npu or cuda: where the tensors of conversions and files lie; None is the
              environment variable TORCHTITAN_CKPT_DEVICE, else cpu
    example   the one case that a searching check is to repeat, as its finding printed it
    progress  called before each cell with its id, its number from 0, and how many there are
    Raises ConfigError for ids that are not in the contract, DeviceError for a device that is not
    usable.
    """
    from conformance.subjects import resolve, spread

    given = [subjects] if isinstance(subjects, Subject | str) else list(subjects)
    found = [one for s in given for one in (spread(s) if isinstance(s, str) else (s,))]
    called = [s if isinstance(s, str) else place_of(s) for s in found]
    resolved = [resolve(s) if isinstance(s, str) else s for s in found]
    known(without, "without")
    chosen = [c for c in select(checks, level=level, version=version) if c.id not in without]
    if example and [c.id for c in chosen if c.id not in SEARCHING]:
        raise ConfigError(
            Problem(
                code="check.no-example",
                what="--example repeats a case of a check that searches, and of no other",
                expected=" or ".join(f"--check {check_id}" for check_id in SEARCHING),
            )
        )
    names = [s.name for s in resolved]
    if len(set(names)) != len(names):
        raise ConfigError(
            Problem(
                code="check.same-name", what="two subjects have one name", actual=", ".join(names)
            )
        )
    where = device_under_test(device)
    cells: list[Cell] = []
    notes: list[str] = []
    for subject, words in zip(resolved, called, strict=True):
        if degrees:
            subject = replace(subject, degrees=tuple(degrees))
        bench = Bench(
            subject,
            seed=seed,
            max_elements=max_elements,
            without=without,
            device=where,
            example=example,
            called=words,
        )
        for clause in chosen:
            if progress:
                progress(f"{subject.name}::{clause.id}", len(cells), len(resolved) * len(chosen))
            with one_thread():
                cells.append(bench.run(clause))
        notes += [f"{subject.name}: {note}" for note in dict.fromkeys(bench.lab.notes)]
    return Report(
        cells=tuple(cells),
        seed=seed,
        contract=version,
        device=where.label,
        versions=_versions(),
        notes=tuple(notes),
    )


def device_under_test(force: str | None = None) -> Device:
    """The device of `force`, else of the environment variable, else the CPU.

    Unlike a job, a check takes no accelerator that nobody asked for: it shares the machine.
    """
    return current(force or (None if os.environ.get(ENV) else "cpu"))


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors here are small: threads that wait for each other cost more than they give."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Bench:
    """One subject's lab and the verdicts so far; parents of a check are run when asked for."""

    def __init__(
        self,
        subject: Subject,
        *,
        seed: int = SEED,
        max_elements: int = MAX_ELEMENTS,
        without: Sequence[str] = (),
        device: Device | None = None,
        example: str = "",
        called: str = "",
    ) -> None:
        known(subject.expect, f"expect of subject {subject.name}")
        self.subject = subject
        # What a command line calls it, where that is not its own name.
        found = called or place_of(subject)
        self.called = found or subject.name
        self.without = frozenset(without)
        self.lab = Lab(
            subject,
            seed=seed,
            max_elements=max_elements,
            device=device,
            example=example,
            found=found,
        )
        self.cells: dict[str, Cell] = {}

    def run(self, clause: Check) -> Cell:
        """The cell of one check, computed once."""
        if clause.id not in self.cells:
            self.cells[clause.id] = self._run(clause)
        return self.cells[clause.id]

    def _run(self, clause: Check) -> Cell:
        begin = time.perf_counter()
        missing = self._missing(clause)
        if missing:
            return self._cell(clause, "n/a", reason=missing)
        try:
            blocker = self._blocker(clause)
            if blocker:
                return self._cell(clause, "blocked", reason=f"by {blocker}")
            findings = tuple(self._findings(clause))
        except NotApplicable as missing_input:
            return self._cell(clause, "n/a", reason=str(missing_input), begin=begin)
        except AdapterRaised as error:
            teller = _KEPT if isinstance(error, Kept) else RUNS.get(error.direction, "")
            if self._tells(teller, clause):
                return self._cell(clause, "blocked", reason=f"by {teller}", begin=begin)
            findings = (self._raised(clause, error),)
        except CheckpointError:
            raise
        except Exception as error:
            finding = Finding(
                what=f"the gate failed: {told(error)}",
                cause="a fault of the gate, not of the subject",
                remedy="report it with the command below",
            ).placed(subject=self.subject.name, check=clause.id, again=self._again(clause))
            return self._cell(clause, "error", findings=(finding,), begin=begin)
        verdict: Verdict = "fail" if findings else "pass"
        reason = self.subject.expect.get(clause.id, "")
        if clause.id in self.subject.expect:
            verdict = "xfail" if findings else "xpass"
            if not findings:
                reason = f"expected to fail and does not: {reason}"
        return self._cell(clause, verdict, reason=reason, findings=findings, begin=begin)

    def _blocker(self, clause: Check) -> str:
        """The check whose failure makes this one meaningless, or an empty string."""
        for direction in clause.runs:
            try:
                _ = self.lab.export if direction == "to_hf" else self.lab.imported
            except AdapterRaised:
                return RUNS[direction]
        # One case that is repeated is asked for by itself.
        for parent in () if self.lab.example else clause.after:
            if parent not in self.without and self.run(BY_ID[parent]).verdict in (
                "fail",
                "xfail",
                "error",
                "blocked",
            ):
                return parent
        return ""

    def _tells(self, check_id: str, clause: Check) -> bool:
        """Whether another check than this one fails of the same root cause."""
        if check_id in ("", clause.id, *self.without):
            return False
        return self.run(BY_ID[check_id]).verdict in ("fail", "xfail")

    def _missing(self, clause: Check) -> str:
        for need in clause.needs:
            if need == "hf" and self.subject.reference is not None:
                continue
            if getattr(self.subject, need) is None:
                return {
                    "adapter": "the subject has no adapter",
                    "native": "the subject supplies no native model or state dict",
                    "hf": "the subject supplies no HF key list and no reference",
                    "reference": "the subject names no independent reference",
                    "forward": "the subject names no pair of models that can run",
                }.get(need, f"the subject supplies no {need}")
        return ""

    def _findings(self, clause: Check) -> Iterator[Finding]:
        module, function = clause.target
        found = getattr(importlib.import_module(module), function)(self.lab)
        for finding in found:
            yield finding.placed(
                subject=self.subject.name,
                check=clause.id,
                again=self._again(clause, finding.example),
            )

    def _raised(self, clause: Check, error: AdapterRaised) -> Finding:
        return Finding(
            what=str(error),
            keys=error.keys or _key_in(error, self.lab),
            expected=error.expected,
            actual=error.actual,
            cause=error.cause,
            remedy=error.remedy,
        ).placed(subject=self.subject.name, check=clause.id, again=self._again(clause))

    def _again(self, clause: Check, example: str = "") -> str:
        name = shlex.quote(self.called)
        seed = "" if self.lab.seed == SEED else f" --seed {self.lab.seed}"
        label = self.lab.device.label.replace("npu-simulated", "npu-sim")
        device = "" if label == "cpu" else f" --device {label}"
        degrees = "".join(
            f" --degrees {shlex.quote(getattr(d, 'label', str(d)))}"
            for d in self.subject.degrees
            if clause.chapter in ("reshard", "seed")
        )
        case = f" --example {shlex.quote(example)}" if example else ""
        return f"torchtitan-ckpt check {name} --check {clause.id}{case}{seed}{device}{degrees}"

    def _cell(
        self,
        clause: Check,
        verdict: Verdict,
        *,
        reason: str = "",
        findings: tuple[Finding, ...] = (),
        begin: float | None = None,
    ) -> Cell:
        seconds = 0.0 if begin is None else time.perf_counter() - begin
        ran = clause.id in _RESHARDED and verdict not in ("n/a", "blocked", "error")
        pairs = self.lab.managers.pairs if ran else []
        return Cell(
            subject=self.subject.name,
            check=clause.id,
            verdict=verdict,
            reason=reason,
            findings=findings,
            pairs=tuple((source.name, target.name) for source, target in pairs),
            seconds=seconds,
        )


def _key_in(error: AdapterRaised, lab: Lab) -> tuple[str, ...]:
    """A key named by the error's text, if it is one of the subject's."""
    text = str(error.error)
    try:
        known_keys = list(lab.native)
    except (NotApplicable, AdapterRaised):
        return ()
    return tuple(key for key in known_keys if key in text)[:1]


def _versions() -> dict[str, str]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    packages = (
        "torch",
        "torch_npu",
        "torchtitan",
        "transformers",
        "safetensors",
        "torchtitan-ckpt",
    )
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
