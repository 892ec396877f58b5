"""Save under one split, load under another, bit for bit: one cycle by default, all pairs slow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.degrees import CASES, Case
from conformance.matrix import Matrix, cycle, every_pair, table_of
from conformance.ranks import RankPool

DEFAULT = cycle()
SLOW = [pair for pair in every_pair() if pair not in DEFAULT]


@pytest.fixture(scope="module")
def matrix(
    pool: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
    tables: list[Callable[[], str]],
) -> Matrix:
    found = Matrix(pool, tmp_path_factory.mktemp("matrix"))
    tables.append(lambda: table_of(found.rows))
    return found


def name(case: Case) -> str:
    return case.name.replace(" ", "")


@pytest.mark.parametrize(
    ("source", "target"),
    [*DEFAULT, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)],
    ids=name,
)
def test_saved_under_one_split_and_loaded_under_another(
    matrix: Matrix, source: Case, target: Case
) -> None:
    row = matrix.pair(source, target)
    assert not row.wrong, "\n".join(row.wrong[:10])


def test_the_default_cycle_has_every_split_on_both_sides() -> None:
    assert {source.name for source, _ in DEFAULT} == {case.name for case in CASES}
    assert {target.name for _, target in DEFAULT} == {case.name for case in CASES}
    assert len(SLOW) + len(DEFAULT) == len(CASES) ** 2
    assert not any(source == target for source, target in DEFAULT)


def test_a_difference_is_seen(matrix: Matrix) -> None:
    """The judge can say no: one element changed on disk, in DCP and in safetensors alike."""
    source, target = CASES[0], CASES[2]
    folder = matrix.saved(source)
    spoilt = Matrix(matrix.pool, folder, matrix.table)
    for path in [*folder.glob("dcp/*.distcp"), *folder.glob("hf/*.safetensors")]:
        data = bytearray(path.read_bytes())
        whole = _first_value()
        at = data.find(whole)
        if at >= 0:
            data[at + 3] ^= 0x40
        copy = folder / "spoilt" / path.parent.name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(bytes(data))
    for path in [folder / "dcp" / ".metadata", *folder.glob("hf/*.json")]:
        (folder / "spoilt" / path.parent.name / path.name).write_bytes(path.read_bytes())
    spoilt._saved[source.name] = folder / "spoilt"
    wrong = spoilt.pair(source, target).wrong
    assert "layers.0.attention.sinks" in wrong
    assert "after a step: layers.0.attention.sinks" in wrong
    assert "hf: layers.0.attention.sinks" in wrong


def _first_value() -> bytes:
    from conformance.jobs import small_table, truth

    return truth(small_table(), 2)["layers.0.attention.sinks"].numpy().tobytes()
