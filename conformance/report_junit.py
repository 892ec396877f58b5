"""JUnit XML, as CI systems read it: a suite for each subject, a case for each check."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from conformance.report_text import cell_text
from conformance.verdict import Cell, Report

# XML 1.0 has no place for control characters, escaped or not.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")


def render(report: Report) -> str:
    root = ElementTree.Element("testsuites", name="torchtitan-ckpt conformance")
    for subject in report.subjects:
        cells = [cell for cell in report.cells if cell.subject == subject]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=_clean(subject),
            tests=str(len(cells)),
            failures=str(sum(cell.verdict in ("fail", "xpass") for cell in cells)),
            errors=str(sum(cell.verdict == "error" for cell in cells)),
            skipped=str(sum(cell.verdict in ("n/a", "blocked", "xfail") for cell in cells)),
            time=f"{sum(cell.seconds for cell in cells):.3f}",
        )
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in (
            ("contract", report.contract),
            ("seed", str(report.seed)),
            ("device", report.device_words),
            *report.versions.items(),
            *(("note", note) for note in report.notes if _concerns(note, subject, report)),
        ):
            ElementTree.SubElement(properties, "property", name=name, value=_clean(value))
        for cell in cells:
            _case(suite, cell)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _concerns(note: str, subject: str, report: Report) -> bool:
    """Whether a note is of this subject, or of no subject in particular."""
    own = [one for one in report.subjects if note.startswith(f"{one}: ")]
    return subject in own or not own


def _case(suite: ElementTree.Element, cell: Cell) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"{_clean(cell.subject)}.{cell.check.partition('.')[0]}",
        name=cell.check,
        time=f"{cell.seconds:.3f}",
    )
    if cell.verdict == "pass":
        return
    first = cell.findings[0].what if cell.findings else cell.reason
    if cell.bad:
        kind = "error" if cell.verdict == "error" else "failure"
        message = first or cell.reason
        node = ElementTree.SubElement(case, kind, message=_clean(message), type=cell.verdict)
        node.text = _clean(cell_text(cell))
    else:
        message = f"{cell.verdict}: {cell.reason}"
        ElementTree.SubElement(case, "skipped", message=_clean(message), type=cell.verdict)


def _clean(text: str) -> str:
    return _CONTROL.sub("?", text)
