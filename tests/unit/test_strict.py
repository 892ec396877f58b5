"""What is said of a checkpoint that does not fit: exact words, the whole before its parts."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.errors import MismatchError
from torchtitan_ckpt.manifest import Manifest, Shard, TensorEntry
from torchtitan_ckpt.strict import _union, compare


def said(wanted, held):
    entries = {
        key: TensorEntry(key, shape, "float32", (Shard((0,) * len(shape), shape, "f", 0, 8),))
        for key, shape in held.items()
    }
    manifest = Manifest(path="out/step-5", format="dcp", tensors=entries)
    with pytest.raises(MismatchError) as caught:
        compare(
            {key: (shape, "float32") for key, shape in wanted.items()},
            manifest,
            list(held),
            Ranks(None, 0, 1),
            casts=False,
            narrow=False,
        )
    return caught.value


def layers(name, shape, count=12):
    return {f"layers.{n}.{name}": shape for n in range(count)}


DENSE = {
    **layers("w1", (80, 48)),
    **layers("w2", (48, 80)),
    **layers("q", (120, 48)),
    **layers("k", (40, 48)),
    "norm": (48,),
    "embed": (208, 48),
}
MOE = {
    **layers("experts.w1", (12, 28, 44), 3),
    **layers("router", (12, 44), 3),
    **layers("q", (72, 44), 3),
    **layers("k", (36, 44), 3),
    "norm": (44,),
    "embed": (184, 44),
}


def test_another_model_is_said_in_one_line_and_its_shapes_in_one_block():
    error = said(MOE, DENSE)
    codes = [problem.code for problem in error.problems]
    assert codes == ["load.another-model", "load.missing", "load.unexpected", "load.shape"]
    assert str(error.problems[0]) == (
        "[load.another-model] another model: of the 14 keys that the job wants, 6 are not in the "
        "checkpoint and 8 have another shape; 42 of its keys have no place in the job.\n"
        "  where    out/step-5\n"
        "  fix      use the configuration that saved it, or name another checkpoint; "
        "torchtitan-ckpt inspect shows what this one holds"
    )
    assert str(error.problems[-1]) == (
        "[load.shape] 8 tensors have another shape in the checkpoint.\n"
        "  where    out/step-5\n"
        "  expected the shapes of the job, which stand first\n"
        "  actual   [36, 44] and [40, 48]: layers.{0..2}.k (3)\n"
        "           [72, 44] and [120, 48]: layers.{0..2}.q (3)\n"
        "           [184, 44] and [208, 48]: embed\n"
        "           [44] and [48]: norm\n"
        "  cause    a model of other sizes\n"
        "  fix      use the configuration that saved it"
    )


def test_a_few_differences_make_no_other_model():
    wanted = {**DENSE, "norm": (50,), "extra": (3,)}
    codes = [problem.code for problem in said(wanted, DENSE).problems]
    assert codes == ["load.missing", "load.shape"]


def test_many_pairs_of_shapes_are_counted_beyond_eight():
    wanted = {f"t{chr(97 + n)}": (n + 2,) for n in range(11)}
    held = {key: (shape[0] + 20,) for key, shape in wanted.items()}
    block = said(wanted, held).problems[-1]
    assert len(block.actual.splitlines()) == 9
    assert block.actual.endswith("… and 3 more pairs of shapes")


class Together(Ranks):
    """Ranks that are threads; counts the specifications that each sends."""

    def gather(self, value):
        sent[self.rank] += sum(len(part) for part in [value] if isinstance(part, dict))
        board[self.rank] = value
        barrier.wait(10)
        seen = list(board)
        barrier.wait(10)
        return seen


board, sent, barrier = [None] * 3, [0] * 3, threading.Barrier(3)


def test_ranks_with_a_loader_entry_each_send_the_rest_once():
    """At thousands of ranks, every rank's whole list to every other would be gigabytes."""
    common = {f"layers.{n}.weight": ((4,), "float32") for n in range(50)}
    with ThreadPoolExecutor(3) as pool:
        mine = [{**common, f"dataloader.dp_rank_{rank}": None} for rank in range(3)]
        ranks = [Together(None, rank, 3) for rank in range(3)]
        found = list(pool.map(_union, mine, ranks))
    assert all(view == mine[0] | mine[1] | mine[2] for view in found)
    assert sorted(sent) == [0, 0, 50]
