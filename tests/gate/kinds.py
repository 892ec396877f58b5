"""The table of the kinds of fault: which check catches which.

    python -m tests.gate.kinds

writes `docs/kinds.md` again: ids and words are those that stand there, the checks are those that
the specimens of a kind are named for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.gate.detection import EVERY

PAGE = Path(__file__).parents[2] / "docs" / "kinds.md"
_ROW = re.compile(r"\| ([A-Z][A-Z0-9]{2}-\d\d) \| (.+?) \| (.*) \|")


@dataclass(frozen=True, slots=True)
class Row:
    """One kind. `told` is what the page says of it: the checks in backquotes."""

    id: str
    words: str
    told: str

    @property
    def checks(self) -> list[str]:
        """Those that a specimen of the kind is named for."""
        return sorted({s.check for s in EVERY if self.id in s.kinds.split(", ")})

    @property
    def named(self) -> list[str]:
        """The checks on the page."""
        return re.findall(r"`(.+?)`", self.told)

    def __str__(self) -> str:
        caught = ", ".join(f"`{check}`" for check in self.checks)
        return f"| {self.id} | {self.words} | {caught} |"


def rows(page: str) -> list[Row]:
    return [Row(*match.groups()) for match in map(_ROW.fullmatch, page.splitlines()) if match]


def remade(page: str) -> str:
    """The page with every row as the specimens have it."""
    found = {row.id: str(row) for row in rows(page)}
    return "".join(
        found[match[1]] + "\n" if (match := _ROW.fullmatch(line)) else line + "\n"
        for line in page.splitlines()
    )


if __name__ == "__main__":
    PAGE.write_text(remade(PAGE.read_text()))
