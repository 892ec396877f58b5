"""pytest entry point of the conformance suite; light to import.

`pytest --pyargs conformance --ckpt-subject SUBJECT` runs the contract on subjects by name. This
module imports neither torch nor the checks; both come with the first test that runs. It keeps one
bench for each subject and process, so conversions are shared between the tests of a worker.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from conformance import pytest_report

if TYPE_CHECKING:
    from conformance.bench import Bench
    from conformance.contract import Check
    from conformance.subject import Subject
    from conformance.verdict import Cell, Report
    from torchtitan_ckpt.device import Device

_BENCHES: dict[int | str, Bench] = {}
_CHOSEN: dict[str, str | None] = {"device": None}
# Of subjects that cannot be used: why, and the check that says so; those after it are blocked.
_UNUSABLE: dict[int | str, dict[str, str]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("checkpoint conformance")
    group.addoption(
        "--ckpt-subject",
        action="append",
        default=[],
        metavar="SUBJECT",
        help="a subject of the conformance suite (repeatable): pkg.mod:NAME, a shipped "
        "family, or titan:<model>/<flavor>",
    )
    group.addoption(
        "--ckpt-check",
        action="append",
        default=[],
        metavar="GLOB",
        help="only checks whose id matches (repeatable)",
    )
    group.addoption(
        "--ckpt-level", type=int, default=None, metavar="N", help="only checks up to this level"
    )
    group.addoption(
        "--ckpt-contract",
        default=None,
        metavar="VERSION",
        help="the contract's version; a later one asks for its previews",
    )
    group.addoption(
        "--ckpt-device",
        default=None,
        choices=("cpu", "npu", "cuda", "npu-sim"),
        help="where the tensors of the checks lie; npu-sim runs all of pytest in a fresh process "
        "on the simulated Ascend device",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """`--ckpt-device npu-sim`: the same command line again, on the simulated device."""
    if config.getoption("--ckpt-device") != "npu-sim":
        return None
    from conformance import ascend_sim
    from torchtitan_ckpt.errors import CheckpointError

    try:
        return ascend_sim.again("pytest", config.invocation_params.args, "--ckpt-device")
    except CheckpointError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(pytest_report, "ckpt-report")
    _CHOSEN["device"] = config.getoption("--ckpt-device")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Where the checks run, if somebody said so."""
    if config.getoption("--ckpt-device") is None:
        return None
    from conformance.engine import device_under_test

    return f"checkpoint conformance on: {device_under_test(_CHOSEN['device']).describe()}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cells of the subjects named on the command line, for the suite's own test."""
    if "ckpt_cell" not in metafunc.fixturenames:
        return
    from conformance.contract import VERSION, select
    from torchtitan_ckpt.errors import CheckpointError

    config = metafunc.config
    version = config.getoption("--ckpt-contract") or VERSION
    try:
        chosen = select(
            config.getoption("--ckpt-check"),
            level=config.getoption("--ckpt-level"),
            version=version,
        )
    except CheckpointError as error:
        raise pytest.UsageError(str(error)) from error
    names = list(dict.fromkeys(_spread(config.getoption("--ckpt-subject"))))
    if not names or not chosen:
        raise pytest.UsageError(
            "nothing would be checked: name a subject with --ckpt-subject (pkg.mod:NAME, a shipped "
            "family, or titan:<model>/<flavor>), and a level that has checks"
        )
    metafunc.parametrize(
        "ckpt_cell",
        [
            pytest.param(Runner(name, clause, version), id=f"{name}::{clause.id}")
            for name in names
            for clause in chosen
        ],
    )


def _spread(names: list[str]) -> Iterator[str]:
    """The names, those of lists as one for each subject; a wrong one is told by its tests."""
    from conformance.subjects import spread
    from torchtitan_ckpt.errors import CheckpointError

    for name in names:
        try:
            yield from spread(name)
        except CheckpointError:
            yield name


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """The exit code of `torchtitan-ckpt check`, where every cell is n/a, or a check that was not
    asked for fails and blocks those that were."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus != pytest.ExitCode.OK or reporter is None:
        return
    if pytest_report.unasked(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif _nothing_ran(reporter, session.config):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def _nothing_ran(reporter: Any, config: pytest.Config) -> bool:
    """Whether subjects were named on the command line, and all that was run is skipped."""
    if not config.getoption("--ckpt-subject"):
        return False
    found = {kind for kind, reports in reporter.stats.items() if kind and reports}
    return "skipped" in found and not found & {"passed", "failed", "error", "xfailed", "xpassed"}


class Runner:
    """One cell as a callable: what a parametrized test calls."""

    def __init__(self, subject: Subject | str, clause: Check, version: str) -> None:
        self.subject = subject
        self.clause = clause
        self.version = version

    def __call__(self) -> Cell:
        report = self.report()
        pytest_report.ran(report)
        cell = report.cells[0]
        if cell.verdict in ("n/a", "blocked"):
            pytest.skip(f"{cell.verdict}: {cell.reason}")
        if cell.verdict == "xfail":
            pytest.xfail(cell.reason)
        if cell.bad:
            pytest.fail(self._text(cell), pytrace=False)
        return cell

    def report(self) -> Report:
        """Run the check on this process's bench for the subject: its cell, and what blocks it."""
        from conformance.bench import SEED, one_thread, seldom_collected, unusable
        from conformance.engine import device_under_test
        from conformance.subject import place_of
        from conformance.verdict import Report
        from conformance.versions import versions
        from torchtitan_ckpt.errors import CheckpointError

        device = device_under_test(_CHOSEN["device"])
        name = self.subject if isinstance(self.subject, str) else self.subject.name
        notes: tuple[str, ...] = ()
        behind: tuple[Cell, ...] = ()
        try:
            bench = self._bench(device)
            with one_thread(), seldom_collected():
                cell = bench.run(self.clause)
            notes, behind = bench.notes, bench.behind(cell)
        except CheckpointError as error:
            again = f"torchtitan-ckpt check {shlex.quote(name)} --check {self.clause.id}"
            cell = unusable(error, name, self.clause, _UNUSABLE.setdefault(self._key, {}), again)
        if not isinstance(self.subject, str) and not place_of(self.subject):
            cell = _by_its_test(cell)
        return Report(
            cells=(cell, *behind),
            seed=SEED,
            contract=self.version,
            device=device.label,
            versions=versions(),
            notes=notes,
        )

    def _bench(self, device: Device) -> Bench:
        from conformance.bench import Bench
        from conformance.subjects import resolve

        given = self.subject
        if self._key not in _BENCHES:
            _BENCHES[self._key] = Bench(
                resolve(given) if isinstance(given, str) else given,
                device=device,
                called=given if isinstance(given, str) else "",
            )
        return _BENCHES[self._key]

    @property
    def _key(self) -> int | str:
        return self.subject if isinstance(self.subject, str) else id(self.subject)

    @staticmethod
    def _text(cell: Cell) -> str:
        from conformance.report_text import cell_text

        return cell_text(cell)

    def __repr__(self) -> str:
        return f"<{self.clause.id}>"


def _by_its_test(cell: Cell) -> Cell:
    """A subject that no command line can name is repeated by the test that holds it."""
    # pytest sets it to `file::test[parameter] (call)`.
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    again = f"pytest {shlex.quote(test)}"
    return replace(cell, findings=tuple(replace(one, again=again) for one in cell.findings))
