"""One lab for the chapter, what every step should hold, and prepared folders."""

import os
import shutil

import pytest

from tests.faults import jobs, scenarios, shim
from tests.faults.lab import Lab

STEPS = 64


def pytest_report_header():
    found = shim.compiler()
    return None if found else f"tests/faults: {shim.NO_COMPILER}"


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="session")
def truth(lab, tmp_path_factory):
    """By `wide`: (digest of the state, digest of the model) after each step."""
    folder = str(tmp_path_factory.mktemp("truth"))
    return {
        False: lab.run(jobs.record, folder, STEPS),
        True: lab.run(jobs.record, folder, 6, wide=True),
    }


@pytest.fixture(scope="session")
def prepared(lab, tmp_path_factory):
    """A function that gives a scenario a folder of its own, with what should lie there before."""
    root = tmp_path_factory.mktemp("scenarios")
    bases, count = {}, iter(range(1 << 30))

    def make(scenario):
        scene = scenarios.SCENARIOS[scenario]
        kind = (scene["base"], scene.get("wide", False))
        folder = root / str(next(count))
        if kind not in bases:
            bases[kind] = root / f"base-{kind[0]}-{kind[1]}"
            bases[kind].mkdir()
            if kind[0]:
                lab.run(jobs.prepare, str(bases[kind]), *kind)
        shutil.copytree(bases[kind], folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def calls(lab, prepared):
    """A function that gives the file system calls of an undisturbed scenario."""
    known = {}

    def of(scenario):
        if scenario not in known:
            known[scenario] = lab.run(scenarios.count, prepared(scenario), scenario)
        return known[scenario]

    return of


@pytest.fixture(scope="session")
def seed():
    """What random choices come from; FAULTS_SEED repeats a run that failed."""
    value = int(os.environ.get("FAULTS_SEED", "20261129"))
    print(f"FAULTS_SEED={value}")
    return value


needs_shim = pytest.mark.skipif(shim.compiler() is None, reason=shim.NO_COMPILER)


def points(calls):
    """Numbers (from 1) of the calls worth a fault: of equal neighbours the ends and the middle."""
    starts = [i for i, call in enumerate(calls) if i == 0 or calls[i - 1] != call]
    ends = [*(i - 1 for i in starts[1:]), len(calls) - 1]
    return sorted({n + 1 for a, b in zip(starts, ends, strict=True) for n in (a, (a + b) // 2, b)})
