"""The system's refusals in words: one table, which every reader and writer uses."""

import errno
import os
from pathlib import Path

import pytest

import torchtitan_ckpt
from torchtitan_ckpt.refusals import REFUSALS, meaning_of


@pytest.mark.parametrize("number", sorted(REFUSALS), ids=errno.errorcode.__getitem__)
def test_every_refusal_has_a_cause_and_a_next_step(number):
    cause, fix = meaning_of(OSError(number, os.strerror(number)))
    assert cause
    assert fix
    assert cause != fix


@pytest.mark.parametrize("error", [OSError("no number"), OSError(errno.EBUSY, "busy")])
def test_an_error_outside_the_table_gets_a_next_step_and_no_invented_cause(error):
    cause, fix = meaning_of(error)
    assert cause == ""
    assert "storage" in fix


def test_no_other_module_explains_a_number_of_its_own():
    root = Path(torchtitan_ckpt.__file__).parent
    tables = [path.name for path in root.rglob("*.py") if "errno.ENOSPC:" in path.read_text()]
    assert tables == ["refusals.py"]
