"""Check an adapter or a manager against the contract.

Looks back at the package `conformance`, lazily: everything else of this project is below it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from conformance.engine import Progress


@dataclass(frozen=True)
class Args:
    """Options of `torchtitan-ckpt check`."""

    subjects: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SUBJECT [SUBJECT ...]")
    ]
    """pkg.mod:NAME (a Subject or a list of them), a shipped family, titan:<model>/<flavor>,
    manager:ours, manager:titan, a folder of safetensors, or main:<fixture>; without any, the main
    job: three Qwen3 checkpoints through real jobs."""
    check: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Only checks whose id matches this glob (repeatable)."""
    level: int | None = None
    """Only checks up to this level (1 keys, 2 values, 3 files, 4 forward, 5 ranks)."""
    contract: str | None = None
    """The contract's version; a later one asks for its checks, which are previews until then."""
    degrees: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Parallel degrees for the chapters reshard and seed, e.g. "fsdp2 x tp2" (repeatable)."""
    device: Literal["cpu", "npu", "cuda", "npu-sim"] | None = None
    """Where the tensors of the checks lie; npu-sim starts again on the simulated Ascend device.
    Without it the environment variable TORCHTITAN_CKPT_DEVICE decides, else cpu."""
    seed: int = 20261201
    """Seed of all values; the report prints it."""
    example: str = ""
    """Only this case of a check that searches, as its finding printed it."""
    max_elements: int = 48_000_000
    """Check values on at most this many elements: on all of a model that has no more, and on some
    layers of a larger one. What each tensor is made from is checked on all layers of both."""
    json: Path | None = None
    """Write the report as JSON; `-` prints it instead of the text."""
    junit: Path | None = None
    """Write the report as JUnit XML."""
    html: Path | None = None
    """Write the report as one HTML file."""
    markdown: Path | None = None
    """Write the report as Markdown."""
    verbose: bool = False
    """List every check that did not run."""


def run(args: Args) -> int:
    """Run the contract; 0 clean, 1 findings, 2 usage, 5 nothing was checked."""
    if args.device == "npu-sim":
        from conformance import ascend_sim

        return ascend_sim.again("torchtitan_ckpt", ["check", *_words(args)], "--device")
    # Large pages, when torch first allocates: a sixth less time for large models.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from conformance import report_github, report_json, report_text
    from conformance.contract import VERSION
    from conformance.engine import check
    from conformance.subjects import main

    subjects = args.subjects or main.NAMES
    reports = _reports(args)
    as_json = args.json is not None and str(args.json) == "-"
    # What a subject prints is no part of the report.
    stdout = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with contextlib.suppress(AttributeError, ValueError, OSError):  # a stream without a file
        faulthandler.enable()  # of a crash below Python, at least the place is known
    with _progress() as progress, stdout:
        report = check(
            subjects,
            checks=args.check,
            level=args.level,
            version=args.contract or VERSION,
            seed=args.seed,
            max_elements=args.max_elements,
            degrees=args.degrees,
            device=args.device,
            example=args.example,
            progress=progress,
        )
    parts = (main.proofs(report), report_text.render(report, verbose=args.verbose))
    text = "\n\n".join(part for part in parts if part)
    print(report_json.render(report) if as_json else text)
    if report_github.active():
        print(report_github.annotations(report), file=sys.stderr if as_json else sys.stdout)
        report_github.write_summary(report)
    for path, module in reports:
        with _writing(path):
            path.write_text(module.render(report), encoding="utf-8")
    return report.exit_code


def _reports(args: Args) -> list[tuple[Path, Any]]:
    """The files that are asked for and what writes each; ConfigError, before any check has run,
    for one that has no folder."""
    from conformance import report_html, report_json, report_junit, report_markdown

    found = [
        (path, module)
        for path, module in (
            (args.json, report_json),
            (args.junit, report_junit),
            (args.html, report_html),
            (args.markdown, report_markdown),
        )
        if path is not None and str(path) != "-"
    ]
    for path, _ in found:
        with _writing(path):
            os.stat(path.parent)
    return found


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    from torchtitan_ckpt.errors import ConfigError, Problem

    try:
        yield
    except OSError as error:
        raise ConfigError(
            Problem(
                code="check.no-report",
                what="a report cannot be written",
                where=str(path),
                cause=error.strerror or str(error),
                fix="name a file in a folder that exists",
            )
        ) from error


def _words(args: Args) -> list[str]:
    """The command line of these options, without what is as it is anyway."""
    words = list(args.subjects)
    for option in dataclasses.fields(args):
        value = getattr(args, option.name)
        if option.name == "subjects" or value == option.default:
            continue
        flag = "--" + option.name.replace("_", "-")
        if value is True:
            words.append(flag)
        else:
            words += [f"{flag}={one}" for one in (value if isinstance(value, tuple) else (value,))]
    return words


@contextmanager
def _progress() -> Iterator[Progress]:
    """On stderr, which check runs, and how many of them are done: on a terminal a line that
    changes, elsewhere a line for each chapter of a subject."""
    if not sys.stderr.isatty():
        from torchtitan_ckpt.progress import Lines

        lines = Lines()

        def told(cell: str, done: int, total: int) -> None:
            subject, _, check = cell.rpartition("::")
            lines.at(f"{subject} {check.partition('.')[0]}", f"{check}, {done} of {total} done")

        try:
            yield told
        finally:
            lines.stop()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Line

    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Line(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task("")
        yield lambda cell, done, total: line.update(
            task, description=cell, completed=done, total=total
        )
