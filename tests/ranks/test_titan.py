"""With torchtitan 0.3.0: its manager's files in ours and the reverse, on two ranks, full state."""

import importlib.util

import pytest

from tests.ranks import titan_cases

pytestmark = [
    pytest.mark.needs_titan,
    pytest.mark.skipif(
        not importlib.util.find_spec("torchtitan"), reason="the extra 'titan' is not installed"
    ),
]


@pytest.mark.parametrize(
    ("writer", "reader", "mode"),
    [
        ("theirs", "ours", "disabled"),
        ("ours", "theirs", "disabled"),
        ("ours", "ours", "async_with_pinned_mem"),
        ("theirs", "ours", "async"),
        ("ours", "theirs", "async"),
    ],
)
def test_full_state_from_one_manager_to_the_other(pool, tmp_path, writer, reader, mode):
    case = titan_cases.saved_by_one_loaded_by_the_other
    assert pool.run(case, 2, str(tmp_path), writer, reader, mode, timeout=120) == [[], []]


def test_a_resume_equals_the_run_that_was_never_stopped(pool, tmp_path):
    case = titan_cases.resumed_equals_uninterrupted
    assert pool.run(case, 2, str(tmp_path), timeout=120) == [[], []]


def test_an_export_through_torchtitans_own_adapter_comes_back(pool, tmp_path):
    assert pool.run(titan_cases.last_save_in_hf, 2, str(tmp_path), timeout=120) == [[], []]
