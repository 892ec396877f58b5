"""One self-contained HTML file: the grid subjects x checks, each cell's findings, printable.

No script is needed to read it and none is loaded: cells link to sections of the same page.
"""

from __future__ import annotations

from html import escape

from conformance.contract import BY_ID, LEVELS
from conformance.report_text import summary
from conformance.spread import Picture
from conformance.verdict import Cell, Finding, Report
from torchtitan_ckpt.errors import group_keys

_STYLE = """
:root{--ok:#1a7f37;--bad:#b42318;--warn:#8a5a00;--dim:#667085;--line:#d0d5dd;--soft:#f2f4f7;
--bad-soft:#fee4e2;--warn-soft:#fef0c7;--back:#fff}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;
background:var(--back);color:#101828}
h1{font-size:1.5rem;margin-bottom:.3rem}h2{font-size:1.2rem;margin-top:2.5rem}
h3{font-size:1rem;margin:.2rem 0 .4rem}
.meta{color:var(--dim);white-space:pre-wrap;font-size:.9rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem}
th,td{border:1px solid var(--line);padding:.15rem .6rem;text-align:left;white-space:nowrap}
thead th{background:var(--back)}
th[scope=row]{font-weight:400}tr.level th{background:var(--soft);padding-top:.4rem}
td a{color:inherit;display:block}
td.pass{color:var(--ok)}td.na{color:var(--dim)}
td.fail,td.error,td.xpass{color:var(--bad);background:var(--bad-soft);font-weight:600}
td.xfail,td.blocked{color:var(--warn);background:var(--warn-soft)}
article{border-left:4px solid var(--bad);margin:1rem 0;padding:.2rem 0 .2rem 1rem}
article.xfail{border-color:var(--warn)}article>div{break-inside:avoid;margin-bottom:.8rem}
.tag{font:600 .8rem system-ui;padding:.05rem .5rem;border-radius:.6rem;margin-left:.4rem;
background:var(--soft)}
.tag.fail,.tag.error,.tag.xpass{color:var(--bad);background:var(--bad-soft)}
.tag.xfail,.tag.blocked{color:var(--warn);background:var(--warn-soft)}
p{margin:.4rem 0}
dl{display:grid;grid-template-columns:7.5rem 1fr;gap:0 .8rem;margin:.2rem 0}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
code{font:13px/1.4 ui-monospace,monospace;overflow-wrap:anywhere}
figure{margin:1.5rem 0 2.5rem;break-inside:avoid}figcaption{margin-bottom:.5rem;font-size:1.05rem}
table.split td,table.split th{vertical-align:top;padding:.4rem .6rem;white-space:normal}
table.split .meta{max-width:20rem}.form+.form{margin-top:.6rem}.form code{display:block}
table.split th{font-weight:600}table.split small{font-weight:400;color:var(--dim)}
table.split rect{stroke:#475467;stroke-width:1}
table.split text{font:12px system-ui;text-anchor:middle;fill:#101828}
.plan{display:flex;flex-wrap:wrap;gap:2rem;align-items:flex-start;margin-top:1rem}
.plan svg{display:block}.plan rect{fill:#3b6fb6}.plan rect.o{fill:none;stroke:#98a2b3}
.plan text{font:12px system-ui;fill:#344054}
@media print{body{margin:0;max-width:none;font-size:11px}.scroll{overflow:visible}
td a{text-decoration:none}thead{display:table-header-group}tr{break-inside:avoid}
h2,h3,figcaption{break-after:avoid}figure code{font-size:11px}
figure{zoom:.85;margin:1rem 0;display:grid;grid-template-columns:auto 1fr;gap:0 2rem}
figcaption{grid-column:1/-1}.plan{flex-direction:column;margin:0;gap:1rem}
table.split td,table.split th{padding:.15rem .5rem}.split .meta{font-size:11px;line-height:1.3}
*{print-color-adjust:exact}@page{size:A4 landscape;margin:12mm}}
"""
_NUMBERS = "Numbers are ranks; a tensor is drawn as it is cut, rows down and columns across."
_PAIRS = "The job of the chapter reshard under each pair of splits, as its degrees cut it."


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
            *_pictures(report),
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
    anchor = _anchor(cell) if cell.findings or cell.bad else next(iter(_shown(cell)), "")
    if anchor:
        return f'<td class="{name}"><a href="#{anchor}">{text}</a></td>'
    return f'<td class="{name}" title="{escape(cell.reason, quote=True)}">{text}</td>'


def _section(cell: Cell) -> str:
    body = "".join(_finding(finding) for finding in cell.findings)
    reason = f"<p>{escape(cell.reason)}</p>" if cell.reason else ""
    return (
        f'<article class="{_class(cell)}" id="{_anchor(cell)}"><h3><code>{escape(cell.id)}</code> '
        f'<span class="tag {_class(cell)}">{cell.verdict}</span></h3>'
        f"{reason}{body}{_links(cell)}</article>"
    )


def _shown(cell: Cell) -> dict[str, str]:
    """The anchors of a cell's pictures, and what each is called."""
    pairs = {_pair_anchor(pair): " to ".join(pair) for pair in cell.pairs}
    return pairs | {_told_anchor(one): one.title for one in cell.pictures}


def _links(cell: Cell) -> str:
    """From a finding about resharding to its pictures."""
    links = ", ".join(
        f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title in _shown(cell).items()
    )
    return f"<p>Which rank held what: {links}</p>" if links else ""


def _pictures(report: Report) -> list[str]:
    """Each pair of splits once, and each picture of what ranks told, whichever cells have it."""
    pairs = list(dict.fromkeys(pair for cell in report.cells for pair in cell.pairs))
    told = list(dict.fromkeys(one for cell in report.cells for one in cell.pictures))
    if not pairs and not told:
        return []
    from conformance import pictures
    from conformance.degrees import Case
    from conformance.jobs import small_table

    figures = [
        f'<figure id="{_told_anchor(one)}"><figcaption>{escape(one.title)}'
        f"</figcaption>{pictures.told(one)}</figure>"
        for one in told
    ]
    if pairs:
        figures.append(f"<p>{_PAIRS}</p>")
    figures += [
        f'<figure id="{_pair_anchor(pair)}"><figcaption>saved under <b>{escape(pair[0])}</b>, '
        f"loaded under <b>{escape(pair[1])}</b></figcaption>"
        f"{pictures.resharding(small_table(), Case.parse(pair[0]), Case.parse(pair[1]))}</figure>"
        for pair in pairs
    ]
    return ["<h2>Which rank held what</h2>", f"<p>{_NUMBERS}</p>", *figures]


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
    return f"<div><p><strong>{escape(finding.what)}</strong></p><dl>{items}</dl></div>"


def _quiet(cells: list[Cell]) -> str:
    items = "".join(
        f'<li><code>{escape(c.id)}</code> <span class="tag {_class(c)}">{c.verdict}</span> '
        f"{escape(c.reason)}</li>"
        for c in cells
    )
    return f"<ul>{items}</ul>"


def _class(cell: Cell) -> str:
    return cell.verdict.replace("/", "")


def _anchor(cell: Cell) -> str:
    return _id(f"c-{cell.id}")


def _pair_anchor(pair: tuple[str, str]) -> str:
    return _id(f"pair-{pair[0]}-to-{pair[1]}")


def _told_anchor(shown: Picture) -> str:
    return _id(f"told-{shown.title}")


def _id(text: str) -> str:
    return "".join(c if c.isalnum() else f"-{ord(c):x}-" for c in text)
