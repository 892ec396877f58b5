"""The pool itself: results, speed, and every way in which a rank can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from conformance import rank_worker, ranks
from conformance.ranks import RankPool, RanksFailed
from torchtitan_ckpt.errors import MismatchError, Problem

FREED = 50.0  # seconds; on a quiet machine it takes one


def add_up(base: int, *, factor: int = 1) -> tuple[int, int, int]:
    value = torch.tensor(base + dist.get_rank() * factor)
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), int(value)


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to fail")
        raise MismatchError(Problem(code="a.b", what=f"rank {rank} fails on purpose"))
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()
    dist.barrier()


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        sys.exit(3)
    dist.barrier()


def threads() -> int:
    return torch.get_num_threads()


def unpicklable() -> object:
    return threading.Lock()


def pid() -> int:
    return os.getpid()


def split_and_die() -> None:
    """The failing rank's peers wait in a group to which it does not belong."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        raise ValueError("outside")
    dist.barrier(group)
    dist.barrier()


@pytest.fixture
def patient(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> RankPool:
    """The pool with so long a grace that ranks which end within FREED were freed by their peers."""
    monkeypatch.setattr(pool, "_grace", 3 * FREED)
    return pool


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_results_in_rank_order(pool: RankPool, n: int) -> None:
    total = sum(10 + 3 * rank for rank in range(n))
    assert pool.run(add_up, n, 10, factor=3) == [(rank, n, total) for rank in range(n)]


def test_processes_are_kept_and_calls_are_quick(pool: RankPool) -> None:
    first = pool.run(pid, 8)
    begin = time.monotonic()
    for _ in range(5):
        assert pool.run(pid, 8) == first
    assert time.monotonic() - begin < 5
    assert len(set(first)) == 8


def test_ranks_compute_with_one_thread(pool: RankPool) -> None:
    assert pool.run(threads, 2) == [1, 1]


def test_a_rank_that_raises_is_the_first_cause(patient: RankPool) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 2 fails on purpose") as caught:
        patient.run(raise_on, 4, 2)
    assert time.monotonic() - begin < FREED
    first = caught.value.first
    assert (first.rank, first.kind) == (2, "raised")
    assert "raise_on" in first.traceback
    assert "about to fail" in first.output
    assert isinstance(first.error, MismatchError)
    assert first.error.problems[0].code == "a.b"
    assert {f.rank for f in caught.value.failures} == {0, 1, 2, 3}
    assert patient.run(add_up, 4, 0) == [(rank, 4, 6) for rank in range(4)]


def test_a_rank_that_dies(patient: RankPool) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="killed by SIGKILL") as caught:
        patient.run(die_on, 3, 1)
    assert time.monotonic() - begin < FREED
    assert (caught.value.first.rank, caught.value.first.kind) == (1, "died")
    assert patient.run(add_up, 3, 0) == [(rank, 3, 3) for rank in range(3)]


def test_a_rank_that_exits(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="SystemExit: 3") as caught:
        pool.run(exit_on, 2, 0)
    assert caught.value.first.rank == 0
    assert pool.run(add_up, 2, 0) == [(0, 2, 1), (1, 2, 1)]


def test_a_rank_that_hangs_shows_its_stack_in_time(pool: RankPool) -> None:
    pool.run(add_up, 3, 0)  # imports this module, which takes a busy machine seconds
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"no answer in 3 s") as caught:
        pool.run(hang_on, 3, 1, timeout=3)
    assert time.monotonic() - begin < 15
    first = caught.value.first
    assert (first.rank, first.kind) == (1, "hung")
    assert "hang_on" in first.traceback
    assert pool.run(add_up, 3, 0) == [(rank, 3, 3) for rank in range(3)]


def test_peers_in_another_group_are_freed(patient: RankPool) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="ValueError: outside"):
        patient.run(split_and_die, 3)
    assert time.monotonic() - begin < FREED
    assert len(patient.run(pid, 3)) == 3


def test_only_the_ranks_of_a_failed_call_are_replaced(pool: RankPool) -> None:
    before = pool.run(pid, 5)
    pool.outcomes(raise_on, 2, 0)
    after = pool.run(pid, 5)
    assert after[2:] == before[2:]
    assert not set(after[:2]) & set(before[:2])


def test_outcomes_tell_who_succeeded(pool: RankPool) -> None:
    outcomes = pool.outcomes(alone, 3)
    assert [o.value for o in outcomes] == [0, None, 2]
    failure = outcomes[1].failure
    assert failure is not None
    assert failure.summary == "RuntimeError: alone"


def alone() -> int:
    if dist.get_rank() == 1:
        raise RuntimeError("alone")
    return dist.get_rank()


def test_a_result_that_cannot_be_sent_is_said(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="cannot pickle"):
        pool.run(unpicklable, 2)


def test_a_function_that_cannot_be_sent_is_refused_at_once(pool: RankPool) -> None:
    with pytest.raises((AttributeError, Exception), match="lambda"):
        pool.run(lambda: 1, 2)


def test_asking_for_more_than_there_are(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="9 ranks of a pool of 8"):
        pool.run(pid, 9)


def test_two_pools_do_not_meet(pool: RankPool) -> None:
    with RankPool(2) as other:
        assert other.run(add_up, 2, 5) == [(0, 2, 11), (1, 2, 11)]
        assert not set(other.run(pid, 2)) & set(pool.run(pid, 2))


def test_what_is_forgotten_between_calls_leaves_no_words_in_the_output() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rank_worker._forget_meshes()


def test_processes_that_start_too_late_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool(2) as pool:
        with monkeypatch.context() as hurry:
            hurry.setattr(ranks, "_START_LIMIT", 0.0)
            with pytest.raises(RuntimeError, match=r"rank process [01] did not start in 0 s"):
                pool.run(pid, 2)
        assert pool.run(add_up, 2, 3) == [(0, 2, 7), (1, 2, 7)]
        assert pool.started == 4


def test_a_process_that_ends_at_its_start_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool(1) as pool:
        with monkeypatch.context() as broken:
            broken.setattr(ranks.rank_worker, "serve", sys.exit)
            with pytest.raises(RuntimeError, match="rank process 0 ended at its start"):
                pool.run(pid, 1)
        assert pool.run(add_up, 1, 3) == [(0, 1, 3)]


def test_spawned_ranks_do_the_same() -> None:
    with RankPool(1, start_method="spawn") as spawned:
        assert spawned.run(add_up, 1, 5) == [(0, 1, 5)]


def test_ranks_end_with_their_parent(tmp_path: object) -> None:
    """A parent that is killed leaves no rank behind, even one that hangs."""
    script = textwrap.dedent(
        """
        import os, signal, threading, time
        from conformance.ranks import RankPool
        if __name__ == "__main__":
            pool = RankPool(2)
            print(*pool.run(os.getpid, 2), flush=True)
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            pool.run(time.sleep, 2, 1000)
        """
    )
    path = f"{tmp_path}/script.py"
    with open(path, "w") as file:
        file.write(script)
    done = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 8
    while any(_alive(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(p) for p in pids)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
