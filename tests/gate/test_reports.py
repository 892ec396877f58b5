"""The words of the reports are output: held by snapshots, and well formed for their readers."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conformance import Cell, Finding, Report
from conformance import report_github as github
from conformance import report_html as html
from conformance import report_json as as_json
from conformance import report_junit as junit
from conformance import report_markdown as markdown
from conformance.pictures import told
from conformance.spread import Part, Picture, Row, Spread
from torchtitan_ckpt.device import SIMULATED

FOUND = Finding(
    what="to_hf dropped 5 of 75 native tensors",
    keys=(*(f"layers.{i}.moe.w1" for i in range(4)), "norm.weight"),
    coordinate="[0, 1]",
    expected="75 tensors",
    actual="70 tensors <b>&</b> | more",
    cause="no rule matches; nearest: layers.{}.moe.w1_EFD (renamed?)",
    remedy="update the rule",
    oracle="a list",
    again="torchtitan-ckpt check m:S --check keys.total",
    check="keys.total",
    subject="one",
)


def cell(subject: str, check: str, verdict: str, reason: str = "", *found: Finding) -> Cell:
    return Cell(
        subject=subject,
        check=check,
        verdict=verdict,
        reason=reason,  # type: ignore[arg-type]
        findings=found,
        seconds=0.5,
    )


REPORT = Report(
    cells=(
        cell("one", "keys.leaves", "pass"),
        cell("one", "keys.total", "fail", "", FOUND),
        cell("one", "values.load", "blocked", "by keys.leaves"),
        cell("two", "keys.leaves", "xfail", "issue 7", FOUND),
        cell("two", "keys.total", "xpass", "expected to fail and does not: issue 8"),
        cell("two", "values.load", "n/a", "the subject has no adapter"),
    ),
    seed=7,
    contract="2026.12",
    versions={"python": "3.11.7", "torch": "2.13.0"},
    notes=("one: values are checked on layers.0",),
)

TEXT = """\
FAIL keys.total       one                    to_hf dropped 5 of 75 native tensors
     layers.{0..3}.moe.w1   (4)
     norm.weight
     at     [0, 1]
     want   75 tensors
     have   70 tensors <b>&</b> | more
     by     a list
     no rule matches; nearest: layers.{}.moe.w1_EFD (renamed?)
     fix    update the rule
     again  torchtitan-ckpt check m:S --check keys.total
XPASS keys.total      two                    expected to fail and does not: issue 8
     fix    remove it from `expect`
xfail   two  keys.leaves: issue 7
n/a     two  values.load: the subject has no adapter
blocked one  values.load: by keys.leaves
note one: values are checked on layers.0
6 cells (2 subjects x 3 checks, cpu): 1 pass · 1 fail · 1 xfail · 1 xpass · 1 n/a · 1 blocked
contract 2026.12 · seed 7 · python 3.11.7 torch 2.13.0"""


def test_the_text_is_as_reviewed() -> None:
    assert REPORT.text() == TEXT
    assert REPORT.exit_code == 1
    assert max(len(line) for line in TEXT.splitlines()) <= 100


def test_json_holds_every_cell_and_finding() -> None:
    content = json.loads(as_json.render(REPORT))
    assert (content["schema"], content["seed"], content["exit_code"]) == (1, 7, 1)
    assert [c["id"] for c in content["cells"]][:2] == ["one::keys.leaves", "one::keys.total"]
    assert content["cells"][1]["findings"][0]["keys"] == list(FOUND.keys)
    assert sum(content["counts"].values()) == len(REPORT.cells)


def test_json_is_read_back_as_the_same_report() -> None:
    assert as_json.parse(as_json.render(RESHARDED)) == RESHARDED


def test_junit_counts_and_texts() -> None:
    root = ElementTree.fromstring(junit.render(REPORT))
    one, two = root.findall("testsuite")
    assert (one.get("tests"), one.get("failures"), one.get("skipped")) == ("3", "1", "1")
    assert (two.get("failures"), two.get("skipped")) == ("1", "2")
    failure = one.find("testcase[@name='keys.total']/failure")
    assert failure is not None
    assert "layers.{0..3}.moe.w1" in (failure.text or "")
    dirty = Report(
        cells=(cell("s", "keys.total", "n/a", "bad \x1b[31m byte"),), seed=1, contract="2026.12"
    )
    ElementTree.fromstring(junit.render(dirty))


def test_what_was_left_out_is_said_in_every_report() -> None:
    for module in (as_json, html, junit, markdown):
        assert REPORT.notes[0] in module.render(REPORT), module


def test_markdown_table_and_escapes() -> None:
    text = markdown.render(REPORT)
    assert "| keys.total | ❌ fail | ❗ xpass |" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {4}


def test_github_annotations_and_step_summary(tmp_path: Path) -> None:
    lines = github.annotations(REPORT).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("::error title=one%3A%3Akeys.total::to_hf dropped 5 of 75")
    assert "%0A" in lines[0]
    path = tmp_path / "summary.md"
    environment = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(path)}
    assert github.active(environment)
    assert not github.active({"CI": "true"})
    assert github.write_summary(REPORT, environment) == str(path)
    assert "keys.total" in path.read_text()
    assert github.write_summary(REPORT, {"X": ""}) == ""


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.links += [v for k, v in attrs if k == "href" and v]
        self.ids += [v for k, v in attrs if k == "id" and v]
        self.outside += [v for k, v in attrs if k in ("src", "href") and v and "://" in v]
        if tag not in ("meta", "br"):
            self.open.append(tag)
        assert "onclick" not in named

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_file_whose_links_lead_somewhere() -> None:
    text = html.render(REPORT)
    page = Links()
    page.feed(text)
    assert page.open == []
    assert page.outside == []
    assert "<script" not in text
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in text
    assert "<b>" not in text
    assert "@media print" in text


SPLIT = Spread((6, 4), (Part((0, 0), (3, 4), (0, 2)), Part((3, 0), (3, 4), (1, 3))))
WHOLE = Spread((6, 4), (Part((0, 0), (6, 4), (0, 1, 2, 3)),), ("model.w",), "a <plain> tensor")
CONVERTED = Picture(
    "layers.0.w · two", ("before", "after"), (Row("hsdp2x2", ((SPLIT,), (WHOLE,))),)
)
POSITIONS = Picture(
    "positions · two",
    ("saved", "loaded"),
    (Row("fsdp2 to 1", ((Spread.each(["6", "8"], ""),), (Spread.each(["refused"], "why"),))),),
)


RESHARDED = Report(
    cells=(
        *REPORT.cells,
        dataclasses.replace(
            cell("one", "reshard.full", "pass"), pairs=(("fsdp2 x tp2", "1"), ("1", "fsdp8"))
        ),
        dataclasses.replace(
            cell("two", "reshard.full", "fail", "", FOUND), pairs=(("fsdp2 x tp2", "1"),)
        ),
        dataclasses.replace(cell("two", "reshard.shapes", "pass"), pictures=(CONVERTED,)),
        dataclasses.replace(
            cell("two", "reshard.convert", "fail", "", FOUND), pictures=(CONVERTED, POSITIONS)
        ),
    ),
    seed=7,
    contract="2026.12",
    device="npu-simulated",
)


def test_a_resharded_job_is_drawn_before_and_after() -> None:
    """Each pair of splits once, linked from the grid and from the findings."""
    text = html.render(RESHARDED)
    page = Links()
    page.feed(text)
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert text.count("<figure") == 4
    pair = html._pair_anchor(("fsdp2 x tp2", "1"))
    assert page.links.count(f"#{pair}") == 2, "from the cell that passed and from the finding"
    assert "nothing on rank 5, 6, 7" in text, "five numbers over eight ranks"
    assert text.count(">bytes written, by rank") == 2
    assert SIMULATED in text
    assert json.loads(as_json.render(RESHARDED))["cells"][-3]["pairs"] == [["fsdp2 x tp2", "1"]]


def test_what_ranks_told_is_drawn_once_and_linked_from_every_cell_that_has_it() -> None:
    text = html.render(RESHARDED)
    page = Links()
    page.feed(text)
    first, second = map(html._told_anchor, (CONVERTED, POSITIONS))
    assert (page.links.count(f"#{first}"), page.links.count(f"#{second}")) == (2, 1)
    assert (page.ids.count(first), page.ids.count(second)) == (1, 1)
    assert as_json.parse(as_json.render(RESHARDED)).cells[-1].pictures == (CONVERTED, POSITIONS)


def test_a_picture_of_what_ranks_told_has_every_part_with_its_ranks() -> None:
    drawn = told(CONVERTED)
    piece = r'y="([\d.]+)" width="180.0" height="([\d.]+)" fill="\S+"><title>rank ([^<]+)<'
    assert re.findall(piece, drawn) == [
        ("0.0", "32.0", "0,2"),
        ("32.0", "32.0", "1,3"),
        ("0.0", "64.0", "0-3"),
    ]
    assert "<code>model.w</code>" in drawn
    assert "6 x 4 · a &lt;plain&gt; tensor" in drawn
    assert re.findall(r"<text[^>]*>([^<]+)<", told(POSITIONS)) == ["0: 6", "1: 8", "0: refused"]


def test_what_cannot_be_drawn_is_said() -> None:
    raised = Spread((), (), words="not told")
    cubes = tuple(
        Part((a, b, c), (1, 1, 1), (4 * a + 2 * b + c,))
        for a in (0, 1)
        for b in (0, 1)
        for c in (0, 1)
    )
    many = tuple(dataclasses.replace(WHOLE, keys=(f"a{n}", f"b{n}")) for n in range(6))
    rows = tuple(Row("x", (stage,)) for stage in ((raised,), (Spread((2, 2, 2), cubes),), many))
    drawn = told(Picture("t", ("only",), rows))
    assert drawn.count("<svg") == 4, "four of six forms, and nothing for the others"
    assert "not told" in drawn
    assert "2 x 2 x 2 · cut along three dimensions: not drawn" in drawn
    assert "and 4 tensors held in other ways" in drawn


def test_every_rank_of_eight_is_written_beside_its_rows() -> None:
    """A page of paper has no words that appear under a mouse."""
    parts = tuple(Part((2 * n, 0), (min(2, 15 - 2 * n), 5), (n,)) for n in range(8))
    drawn = told(Picture("t", ("only",), (Row("fsdp8", ((Spread((15, 5), parts),),)),)))
    assert re.findall(r"<text[^>]*>(\d)<", drawn) == list("01234567"), "the last has half the rows"


def test_html_in_a_browser_and_on_paper(tmp_path: Path) -> None:
    browser = next(
        (
            p
            for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))
            if p
        ),
        None,
    )
    if browser is None:
        pytest.skip("not run: no Chromium is installed")
    page, pdf = tmp_path / "report.html", tmp_path / "report.pdf"

    def browse(report: Report, wanted: str) -> str:
        page.write_text(html.render(report))
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", wanted, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout

    shown = browse(RESHARDED, "--dump-dom")
    assert "keys.total" in shown
    assert shown.count("<figure") == 4
    # The usual seven splits of an adapter have a page of paper to themselves.
    usual = dataclasses.replace(CONVERTED, rows=CONVERTED.rows * 7)
    passed = dataclasses.replace(cell("two", "reshard.shapes", "pass"), pictures=(usual,))
    browse(dataclasses.replace(RESHARDED, cells=(passed,)), f"--print-to-pdf={pdf}")
    assert pdf.read_bytes().startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes())) == 2
