"""What ranks do together when one of them does not come."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from conformance.ranks import RankPool
from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.errors import RankError


def wait_in_a_fork(members: list[int], patience: float) -> tuple[list[int], str]:
    """The first of a group with a patience of its own waits in a fork, where no other comes."""
    group = dist.new_group(members, timeout=timedelta(seconds=patience))
    everyone, code = [], ""
    if dist.get_rank() in members:
        ranks = Ranks.current(group).fork()
        everyone = ranks.gather(dist.get_rank())
        if ranks.rank == 0:
            try:
                ranks.gather(None)
            except RankError as error:
                code = error.problems[0].code
    dist.barrier()  # the world waits longer
    return everyone, code


def test_a_fork_waits_no_longer_than_the_group_it_comes_from(pool: RankPool) -> None:
    answers = pool.run(wait_in_a_fork, 3, [1, 2], 1.5, timeout=60)
    assert answers == [([], ""), ([1, 2], "ranks.lost"), ([1, 2], "")]
