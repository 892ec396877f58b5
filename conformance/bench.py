"""One subject on its bench: what becomes of each check, and why.

Cheapest level first; a check whose input is missing is n/a with the reason, a check after a failed
one is blocked, a check that raises by itself is an error of the gate. Nothing disappears.
"""

from __future__ import annotations

import functools
import gc
import importlib
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from conformance import declared
from conformance.contract import BY_ID, RUNS, Check, known
from conformance.lab import MAX_ELEMENTS, Lab
from conformance.raised import AdapterRaised, Kept, NotApplicable, told
from conformance.subject import Subject, place_of
from conformance.subjects import is_name
from conformance.verdict import Cell, Finding, Told, Verdict
from torchtitan_ckpt.device import Device
from torchtitan_ckpt.errors import CheckpointError, ConfigError

SEED = 20261201
# The check that tells what is kept between calls; others can say nothing of such an adapter.
_KEPT = "purity.stateless"
# Checks that go through every pair of the subject's splits.
_RESHARDED = ("reshard.full", "reshard.next-step", "reshard.hf")


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


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Lists of 100,000 keys are no garbage, and looking through them each time takes a third."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 10_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


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
        """Raises ConfigError for what the subject expects or declares of nothing, or of no key."""
        if wordless := list(declared.without_reason(subject)):
            raise ConfigError(*wordless)
        known(subject.expect, f"expect of subject {subject.name}")
        self.subject = subject
        # What a command line calls it; nothing where it cannot be named there.
        found = called or place_of(subject)
        self.called = found or (subject.name if is_name(subject.name) else "")
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
        self._told: dict[str, str] = {}
        if dead := list(declared.dead(self.lab)):
            raise ConfigError(*dead)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the report says of the subject so far, beside its cells."""
        found = dict.fromkeys((*self._declared, *self.lab.notes))
        return tuple(f"{self.subject.name}: {note}" for note in found)

    @functools.cached_property
    def _declared(self) -> list[str]:
        return declared.notes(self.lab)

    def run(self, clause: Check) -> Cell:
        """The cell of one check, computed once."""
        if clause.id not in self.cells:
            self.cells[clause.id] = self._run(clause)
        return self.cells[clause.id]

    def behind(self, cell: Cell) -> tuple[Cell, ...]:
        """The failures of this bench where a cell is blocked: nobody may have asked for them."""
        if cell.verdict != "blocked":
            return ()
        return tuple(one for one in self.cells.values() if one.verdict in ("fail", "error"))

    def _run(self, clause: Check) -> Cell:
        begin = time.perf_counter()
        missing = self._missing(clause)
        if missing:
            return self._cell(clause, "n/a", reason=missing)
        try:
            blocker = self._blocker(clause)
            if blocker:
                return self._cell(clause, "blocked", reason=f"by {blocker}")
            findings, teller = self._findings(clause)
            if teller and not findings:
                return self._cell(clause, "blocked", reason=f"by {teller}", begin=begin)
        except NotApplicable as missing_input:
            return self._cell(clause, "n/a", reason=str(missing_input), begin=begin)
        except AdapterRaised as error:
            teller = _KEPT if isinstance(error, Kept) else RUNS.get(error.direction, "")
            if self._tells(teller, clause):
                return self._cell(clause, "blocked", reason=f"by {teller}", begin=begin)
            findings = (self._raised(clause, error),)
        except CheckpointError as error:
            if self.lab.example:  # the words of a command line, not of the subject
                raise
            cell = unusable(error, self.subject.name, clause, self._told, self._again(clause))
            return self._cell(clause, cell.verdict, reason=cell.reason, findings=cell.findings)
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
        """The check whose failure makes this one meaningless, or an empty string.

        Raises AdapterRaised for a direction that raises on the whole model.
        """
        for direction in clause.runs:
            _ = self.lab.export if direction == "to_hf" else self.lab.imported
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

    def _findings(self, clause: Check) -> tuple[tuple[Finding, ...], str]:
        """What is this check's to tell, and a check that tells the rest, where there is some."""
        module, function = clause.target
        own, teller = [], ""
        try:
            for found in getattr(importlib.import_module(module), function)(self.lab):
                if isinstance(found, Told) and self._tells(found.by, clause):
                    teller = found.by
                    continue
                one = found.finding if isinstance(found, Told) else found
                again = self._again(clause, one.example)
                own.append(one.placed(subject=self.subject.name, check=clause.id, again=again))
        except NotApplicable:
            # What was found before an input was missing is found all the same.
            if not own:
                raise
        return tuple(own), teller

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
        """What repeats a finding: a command, or a call where none can name the subject."""
        label = self.lab.device.label.replace("npu-simulated", "npu-sim")
        degrees = [getattr(d, "label", str(d)) for d in self.subject.degrees]
        options: tuple[tuple[str, Any, Any], ...] = (
            ("example", example, ""),
            ("seed", self.lab.seed, SEED),
            ("max_elements", self.lab.max_elements, MAX_ELEMENTS),
            ("device", label, "cpu"),
            ("degrees", degrees if clause.chapter in ("reshard", "seed") else [], []),
        )
        given = {name: value for name, value, usual in options if value != usual}
        if not self.called:
            words = "".join(f", {name}={value!r}" for name, value in given.items())
            return f"check(subject, checks=[{clause.id!r}]{words})  # of {self.subject.name!r}"
        flags = "".join(
            f" --{name.replace('_', '-')} {shlex.quote(str(one))}"
            for name, value in given.items()
            for one in (value if isinstance(value, list) else [value])
        )
        return f"torchtitan-ckpt check {shlex.quote(self.called)} --check {clause.id}{flags}"

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
        if verdict in ("n/a", "blocked") and clause.id in self.subject.expect:
            reason += f"; expected to fail: {self.subject.expect[clause.id]}, which was not seen"
        ran = verdict not in ("n/a", "blocked", "error")
        pairs = self.lab.managers.pairs if ran and clause.id in _RESHARDED else []
        return Cell(
            subject=self.subject.name,
            check=clause.id,
            verdict=verdict,
            reason=reason,
            findings=findings,
            pairs=tuple((source.name, target.name) for source, target in pairs),
            pictures=self.lab.pictures.get(clause.id, ()) if ran else (),
            seconds=seconds,
        )


def unusable(
    error: CheckpointError, subject: str, clause: Check, told: dict[str, str], again: str
) -> Cell:
    """The cell of a subject that cannot be used: a failure once, then blocked by it.

    `told` holds which check has said what.
    """
    first = error.problems[0].what
    teller = told.setdefault(str(error), clause.id)
    if teller != clause.id:
        reason = f"by {teller}: {first}"
        return Cell(subject=subject, check=clause.id, verdict="blocked", reason=reason)
    findings = tuple(
        Finding(
            what=problem.what,
            coordinate=problem.where,
            expected=problem.expected,
            actual=problem.actual,
            cause=problem.cause,
            remedy=problem.fix,
        ).placed(subject=subject, check=clause.id, again=again)
        for problem in error.problems
    )
    return Cell(subject=subject, check=clause.id, verdict="fail", findings=findings)


def _key_in(error: AdapterRaised, lab: Lab) -> tuple[str, ...]:
    """A key named by the error's text, if it is one of the subject's."""
    text = str(error.error)
    try:
        known_keys = list(lab.native)
    except (NotApplicable, AdapterRaised):
        return ()
    return tuple(key for key in known_keys if key in text)[:1]
