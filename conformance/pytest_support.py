"""`parametrize(subjects)`: the checks of the contract as tests of a third party's own file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from conformance.subject import Subject


def parametrize(
    subjects: Subject | str | Iterable[Subject | str],
    *,
    checks: Iterable[str] = (),
    level: int | None = None,
    version: str | None = None,
) -> Callable[[Any], Any]:
    """Parametrize a test with `cell`: one test for each subject and check, as `check` has them.

    The test calls `cell()`, which passes, skips, xfails or fails with the findings:

        @parametrize([Subject("mine", adapter=MyAdapter, native=...)])
        def test_contract(cell):
            cell()
    """
    import pytest

    from conformance.contract import VERSION, select
    from conformance.plugin import Runner

    found = [subjects] if isinstance(subjects, Subject | str) else list(subjects)
    version = version or VERSION
    chosen = select(tuple(checks), level=level, version=version)
    runners = [
        pytest.param(Runner(subject, clause, version), id=f"{_name(subject)}::{clause.id}")
        for subject in found
        for clause in chosen
    ]
    return pytest.mark.parametrize("cell", runners)


def _name(subject: Subject | str) -> str:
    return subject if isinstance(subject, str) else subject.name
