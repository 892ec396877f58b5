"""One self-contained HTML file: the grid subjects x checks, each cell's findings, printable.

No script is needed to read it and none is loaded: cells link to sections of the same page.
"""

from __future__ import annotations

from html import escape

from conformance.contract import BY_ID, LEVELS
from conformance.report_text import summary
from conformance.verdict import Cell, Finding, Report
from torchtitan_ckpt.errors import group_keys

_STYLE = """
:root{--ok:#1a7f37;--bad:#b42318;--warn:#9a6700;--dim:#667085;--line:#d0d5dd;--back:#fff}
@media(prefers-color-scheme:dark){:root{--ok:#4ade80;--bad:#f87171;--warn:#facc15;--dim:#98a2b3;
--line:#344054;--back:#101418;color-scheme:dark}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;
background:var(--back)}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem}
th,td{border:1px solid var(--line);padding:.2rem .5rem;text-align:left;white-space:nowrap}
th[scope=row]{font-weight:400}tr.level th{background:color-mix(in srgb,var(--line) 40%,var(--back))}
td a{color:inherit;display:block;text-decoration:none}
.pass{color:var(--ok)}.fail,.error,.xpass{color:var(--bad);font-weight:600}
.xfail,.blocked{color:var(--warn)}.na{color:var(--dim)}
article{border-left:4px solid var(--bad);margin:1rem 0;padding:.2rem 0 .2rem 1rem;
break-inside:avoid}
article.xfail{border-color:var(--warn)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:0 .8rem;margin:.3rem 0}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
code{font:13px/1.4 ui-monospace,monospace;overflow-wrap:anywhere}
.meta{color:var(--dim);white-space:pre-wrap}
@media print{body{margin:0;max-width:none;font-size:11px}.scroll{overflow:visible}
td a{text-decoration:none}@page{size:A4 landscape;margin:12mm}}
"""


def render(report: Report) -> str:
    title = "Checkpoint conformance: " + ("clean" if report.ok else "findings")
    sections = [_section(cell) for cell in report.cells if cell.findings or cell.bad]
    quiet = [cell for cell in report.cells if cell.verdict in ("n/a", "blocked")]
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="meta">{escape(summary(report))}</p>',
            '<div class="scroll">',
            _grid(report),
            "</div>",
            *(("<h2>Findings</h2>", *sections) if sections else ()),
            *(("<h2>Not run, and why</h2>", _quiet(quiet)) if quiet else ()),
            *(
                ("<h2>Notes</h2><ul>", *(f"<li>{escape(n)}</li>" for n in report.notes), "</ul>")
                if report.notes
                else ()
            ),
            "</body></html>",
        )
    )


def _grid(report: Report) -> str:
    by_id = {cell.id: cell for cell in report.cells}
    head = "".join(f'<th scope="col">{escape(s)}</th>' for s in report.subjects)
    rows = [f'<thead><tr><th scope="col">check</th>{head}</tr></thead><tbody>']
    level = 0
    for check in report.checks:
        clause = BY_ID.get(check)
        if clause is not None and clause.level != level:
            level = clause.level
            rows.append(
                f'<tr class="level"><th colspan="{len(report.subjects) + 1}" '
                f'scope="colgroup">{level} {escape(LEVELS.get(level, ""))}</th></tr>'
            )
        why = escape(clause.why if clause else "", quote=True)
        cells = "".join(_td(by_id.get(f"{s}::{check}")) for s in report.subjects)
        rows.append(f'<tr><th scope="row" title="{why}">{escape(check)}</th>{cells}</tr>')
    return "<table>" + "\n".join(rows) + "</tbody></table>"


def _td(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    text = cell.verdict + (f" ({len(cell.findings)})" if len(cell.findings) > 1 else "")
    name = _class(cell)
    if cell.findings or cell.bad:
        return f'<td class="{name}"><a href="#{_anchor(cell)}">{text}</a></td>'
    return f'<td class="{name}" title="{escape(cell.reason, quote=True)}">{text}</td>'


def _section(cell: Cell) -> str:
    body = "".join(_finding(finding) for finding in cell.findings)
    reason = f"<p>{escape(cell.reason)}</p>" if cell.reason else ""
    return (
        f'<article class="{_class(cell)}" id="{_anchor(cell)}"><h3><code>{escape(cell.id)}</code> '
        f"{cell.verdict}</h3>{reason}{body}</article>"
    )


def _finding(finding: Finding) -> str:
    keys = "<br>".join(
        f"<code>{escape(key)}</code>" + (f" ({number})" if number > 1 else "")
        for key, number in group_keys(finding.keys)
    )
    rows = [
        ("keys", keys),
        ("at", escape(finding.coordinate)),
        ("expected", escape(finding.expected)),
        ("actual", escape(finding.actual)),
        ("compared with", escape(finding.oracle)),
        ("cause", escape(finding.cause)),
        ("fix", escape(finding.remedy)),
        ("again", f"<code>{escape(finding.again)}</code>" if finding.again else ""),
    ]
    items = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows if text)
    return f"<p><strong>{escape(finding.what)}</strong></p><dl>{items}</dl>"


def _quiet(cells: list[Cell]) -> str:
    items = "".join(
        f'<li><code>{escape(c.id)}</code> <span class="{_class(c)}">{c.verdict}</span>: '
        f"{escape(c.reason)}</li>"
        for c in cells
    )
    return f"<ul>{items}</ul>"


def _class(cell: Cell) -> str:
    return cell.verdict.replace("/", "")


def _anchor(cell: Cell) -> str:
    return "c-" + "".join(c if c.isalnum() else f"-{ord(c):x}-" for c in cell.id)
