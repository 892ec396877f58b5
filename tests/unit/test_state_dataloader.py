"""The data loader's position: one entry a rank, the degree compared, replicas kept apart."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from torchtitan_ckpt.errors import MismatchError, SaveError
from torchtitan_ckpt.manifest import Manifest, ObjectEntry
from torchtitan_ckpt.state.dataloader import (
    dataloader_state_dict,
    dataloader_template,
    load_dataloader_state,
)


class Titan:
    """Names its entry itself, as torchtitan's loader."""

    def __init__(self, rank: int, degree: int) -> None:
        self.rank, self.degree, self.taken = rank, degree, 0

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.rank}": pickle.dumps(self.taken), "world_size": self.degree}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["world_size"] == self.degree
        self.taken = pickle.loads(state[f"dp_rank_{self.rank}"])


class Plain:
    def __init__(self) -> None:
        self.taken: dict[str, Any] = {"epoch": 0, "buffer": []}

    def state_dict(self) -> dict[str, Any]:
        return self.taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state


class Divides(Titan):
    def load_resharded_state(self, states: Any, dp_rank: int, degree: int) -> None:
        total = sum(pickle.loads(value) for value in states.values())
        self.taken = total // degree


def manifest(keys: Any) -> Manifest:
    names = {f"dataloader.{key}" for key in keys} | {"tok.weight"}
    return Manifest("", "dcp", {}, {k: ObjectEntry(k, "", 0, 0) for k in names})


def saved(degree: int, kind: Any = Titan) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for rank in range(degree):
        loader = kind(rank, degree)
        loader.taken = 100 + rank
        flat.update(dataloader_state_dict(loader))
    return flat


def test_names_are_torchtitans() -> None:
    flat = saved(12)
    assert set(flat) == {f"dp_rank_{r}" for r in range(12)} | {"world_size"}
    assert type(flat["dp_rank_11"]) is bytes
    assert flat["world_size"] == 12


@pytest.mark.parametrize("rank", [1, 11])
def test_each_rank_takes_its_own(rank: int) -> None:
    flat = saved(12)
    loader = Titan(rank, 12)
    wanted = dataloader_template(loader, manifest(flat), "dataloader.")
    assert set(wanted) == {f"dp_rank_{rank}", "world_size"}
    load_dataloader_state(loader, {key: flat[key] for key in wanted})
    assert loader.taken == 100 + rank


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_another_degree_is_refused_with_the_remedy(before: int, after: int) -> None:
    """DAT-01: DCP is silent here, and positions are lost."""
    flat = saved(before)
    loader = Titan(0, after)
    wanted = dataloader_template(loader, manifest(flat), "dataloader.")
    with pytest.raises(MismatchError, match="exclude_from_loading") as caught:
        load_dataloader_state(loader, {key: flat[key] for key in wanted})
    problem = caught.value.problems[0]
    assert (problem.expected, problem.actual) == (f"{after} ranks", f"{before} ranks")
    assert loader.taken == 0


def test_a_file_without_the_degree_is_counted() -> None:
    flat = saved(4)
    del flat["world_size"]
    with pytest.raises(MismatchError, match="another data-parallel degree"):
        load_dataloader_state(Titan(0, 2), flat)


def test_a_loader_that_can_reshard_gets_all_positions() -> None:
    flat = saved(4)
    loader = Divides(1, 2)
    wanted = dataloader_template(loader, manifest(flat), "dataloader.")
    assert set(wanted) == set(flat)
    notes = load_dataloader_state(loader, flat)
    assert loader.taken == (100 + 101 + 102 + 103) // 2
    assert "from 4 to 2" in notes[0]


def test_any_other_loader_gets_its_ranks_name_and_no_shared_references() -> None:
    loader = Plain()
    loader.taken = {"epoch": 3, "buffer": [1, 2]}
    flat = dataloader_state_dict(loader, dp_rank=5, degree=6)
    assert set(flat) == {"dp_rank_5", "world_size"}
    other = Plain()
    wanted = dataloader_template(other, manifest(flat), "dataloader.", dp_rank=5)
    assert set(wanted) == set(flat)
    load_dataloader_state(other, flat, dp_rank=5, degree=6)
    other.taken["buffer"].append(3)
    assert flat["dp_rank_5"]["buffer"] == [1, 2]
    with pytest.raises(MismatchError, match="degree"):
        load_dataloader_state(Plain(), flat, dp_rank=5, degree=4)


def test_replicas_do_not_take_each_others_data() -> None:
    flat = dataloader_state_dict(Titan(0, 1), replica_id="3")
    load_dataloader_state(Titan(0, 1), flat, replica_id="3")
    with pytest.raises(MismatchError, match="replica 3, not of 4"):
        load_dataloader_state(Titan(0, 1), flat, replica_id="4")


def test_no_state_is_legal_and_said() -> None:
    class Bare(Plain):
        def state_dict(self) -> dict[str, Any]:
            return {}

    assert dataloader_state_dict(Bare()) == {}
    assert "from the beginning" in load_dataloader_state(Bare(), {})[0]


def test_unstorable_state_is_refused() -> None:
    loader = Plain()
    loader.taken = {"worker": object()}
    with pytest.raises(SaveError, match="dp_rank_0 cannot be saved"):
        dataloader_state_dict(loader)


def test_a_refusing_loader_is_reported() -> None:
    flat = saved(2)
    flat["dp_rank_1"] = b"junk"
    with pytest.raises(MismatchError, match="Unpickling"):
        load_dataloader_state(Titan(1, 2), flat)


def test_a_loader_that_cannot_divide_says_so_and_is_as_it_was() -> None:
    class Fails(Divides):
        def load_resharded_state(self, states: Any, dp_rank: int, degree: int) -> None:
            self.taken = -1
            raise RuntimeError("an odd number of samples")

    loader = Fails(1, 2)
    before = loader.taken
    with pytest.raises(MismatchError) as caught:
        load_dataloader_state(loader, saved(3))
    (problem,) = caught.value.problems
    assert problem.code == "dataloader.refused"
    assert problem.actual == "RuntimeError: an odd number of samples"
    assert "Fails.load_resharded_state" in problem.where
    assert loader.taken == before
