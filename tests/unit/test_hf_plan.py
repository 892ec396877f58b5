"""The plan of a save by several ranks: everything once, nothing beyond the window, work for all."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from torchtitan_ckpt.formats.hf_plan import (
    Described,
    Picture,
    assign,
    choose_givers,
    merge,
    rounds,
    segments,
)

WINDOW = 1000
LINE = ((0, 1, 2, 3), (4,), ((0, 0),))  # four ranks, rows
REPLICAS = ((0, 1, 2, 3), (2, 2), ((-1, 0), (0, 0)))  # two replicas of two halves


def picture_of(spec: object, count: int = 13) -> Picture:
    view = [Described(f"layers.{i}.w", (11 + i, 30), "float32", spec) for i in range(count)]  # type: ignore[arg-type]
    found = merge([view, []] if spec is None else [view], [0, 1, 1, 1] if spec is None else [0] * 4)
    assert isinstance(found, Picture)
    return found


def steps_of(found: Picture, ranks: int = 4) -> list:
    files = {f"f{i}": [e] for i, e in enumerate(found.entries.values())}
    owners = assign(files, found, ranks)
    assert set(owners.values()) == set(range(ranks))
    queues: dict[int, list] = {rank: [] for rank in range(ranks)}
    given = [0] * ranks
    for name, entries in files.items():
        queues[owners[name]] += segments(entries, found, owners[name], WINDOW, given)
    return list(rounds(queues, WINDOW))


@pytest.mark.parametrize("spec", [LINE, REPLICAS, None], ids=["rows", "replicas", "one holder"])
def test_every_element_travels_once_and_no_step_exceeds_a_window(spec: object) -> None:
    found = picture_of(spec)
    steps = steps_of(found)
    moved: Counter[str] = Counter()
    for step in steps:
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for segment in step:
            inside = 0
            for giver, _, sizes in segment.pieces:
                nbytes = math.prod(sizes) * 4
                inside += nbytes
                if giver != segment.owner:
                    sent[giver] += nbytes
                    received[segment.owner] += nbytes
            assert inside == segment.nbytes <= WINDOW
            moved[segment.key] += inside
        assert max(sent.values(), default=0) <= WINDOW
        assert max(received.values(), default=0) <= WINDOW
    assert moved == {key: entry.nbytes for key, entry in found.entries.items()}


def test_an_owner_takes_its_own_copy_and_replicas_share_the_giving() -> None:
    found = picture_of(REPLICAS)
    for step in steps_of(found):
        for segment in step:
            for giver, offsets, _ in segment.pieces:
                holders = next(
                    held.ranks
                    for held in found.held[segment.key]
                    if held.offsets[0] <= offsets[0] < held.offsets[0] + held.sizes[0]
                )
                assert giver in holders
                assert segment.owner not in holders or giver == segment.owner
    given: Counter[int] = Counter()
    for rows in choose_givers(found, 4).values():
        for giver, _, sizes in rows:
            given[giver] += math.prod(sizes)
    assert len(given) == 4
    assert max(given.values()) < 1.3 * min(given.values())


def test_a_file_goes_to_the_rank_that_holds_its_tensors() -> None:
    """Pipeline stages: nothing needs to travel."""
    views = [[Described(f"layers.{r}.w", (8, 8), "float32", None)] for r in range(4)]
    found = merge(views, [0, 1, 2, 3])
    assert isinstance(found, Picture)
    files = {f"f{3 - r}": [found.entries[f"layers.{r}.w"]] for r in range(4)}
    assert assign(files, found, 4) == {f"f{3 - r}": r for r in range(4)}


def test_a_rank_of_the_mesh_without_the_tensor_is_named_even_where_another_has_a_copy() -> None:
    view = [Described("norm", (8,), "float32", REPLICAS)]
    problems = merge([view, []], [0, 0, 0, 1])
    assert isinstance(problems, list)
    assert [p.code for p in problems] == ["ranks.coverage"]
    assert "rank 3" in problems[0].actual
