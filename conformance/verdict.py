"""What a check says: findings, and the verdict of one cell (a subject under one check).

No text layout here; the `report_*` modules draw these.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from conformance.spread import Picture
from torchtitan_ckpt.device import SIMULATED
from torchtitan_ckpt.errors import printable

Verdict = Literal["pass", "fail", "xfail", "xpass", "n/a", "blocked", "error"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
# What makes a run fail: an expected finding that no longer happens is as wrong as a new one.
BAD: frozenset[str] = frozenset({"fail", "xpass", "error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check found.

    what        one sentence with counts; keys      every key concerned, ungrouped
    coordinate  where inside the first key          expected/actual     at that place
    cause       the likely cause                    remedy              the next step
    again       the command that repeats it         oracle              what it was compared with
    example     the case of a search that shows it, as `--example` takes it
    """

    what: str
    keys: tuple[str, ...] = ()
    coordinate: str = ""
    expected: str = ""
    actual: str = ""
    cause: str = ""
    remedy: str = ""
    oracle: str = ""
    example: str = ""
    again: str = ""
    check: str = ""
    subject: str = ""

    def placed(self, *, subject: str, check: str, again: str) -> Finding:
        """The same finding with its cell and the command that repeats it.

        Texts of the subject's own, its keys among them, steer no terminal and end no report.
        """
        clean = {
            name: printable(getattr(self, name), lines=True)
            for name in ("what", "coordinate", "expected", "actual", "cause", "remedy")
        }
        keys = tuple(map(printable, self.keys))
        again = self.again or again
        return replace(self, **clean, keys=keys, subject=subject, check=check, again=again)


@dataclass(frozen=True, slots=True)
class Told:
    """A finding of the same root cause as another check's: left out where that check fails."""

    finding: Finding
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One subject under one check.

    A check of the chapter reshard has `pairs`, the splits that it saved and loaded under, whose
    pictures follow from the degrees; or `pictures`, of what the ranks told.
    """

    subject: str
    check: str
    verdict: Verdict
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    pictures: tuple[Picture, ...] = ()
    seconds: float = 0.0

    @property
    def id(self) -> str:
        return f"{self.subject}::{self.check}"

    @property
    def bad(self) -> bool:
        return self.verdict in BAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All cells of one run, with what is needed to judge and repeat it."""

    cells: tuple[Cell, ...]
    seed: int
    contract: str
    device: str = "cpu"
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def device_words(self) -> str:
        """The device for people: what is simulated is never called by a device's name alone."""
        return SIMULATED if self.device == "npu-simulated" else self.device

    @property
    def counts(self) -> dict[str, int]:
        return {v: sum(cell.verdict == v for cell in self.cells) for v in VERDICTS}

    @property
    def subjects(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.subject for cell in self.cells))

    @property
    def checks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.check for cell in self.cells))

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for cell in self.cells for finding in cell.findings)

    @property
    def ran(self) -> int:
        """Cells that gave an answer of their own."""
        return sum(cell.verdict not in ("n/a", "blocked") for cell in self.cells)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0 clean, 1 findings, 5 nothing was checked."""
        if self.ran == 0:
            return 5
        return 1 if any(cell.bad for cell in self.cells) else 0

    def cell(self, check: str, subject: str | None = None) -> Cell:
        """The cell of a check (and subject, when there are several)."""
        for cell in self.cells:
            if cell.check == check and subject in (None, cell.subject):
                return cell
        raise KeyError(f"no cell {subject or '*'}::{check}")

    def text(self) -> str:
        """The report as a person should see it."""
        from conformance.report_text import render

        return render(self)

    def __str__(self) -> str:
        return self.text()
