"""Train state, any other object, and RNG: types, growth, ranks, two resumes in a row."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.specimens.odd_optimizers import bits, manifest_of
from torchtitan_ckpt.errors import MismatchError, SaveError
from torchtitan_ckpt.state.objects import load_object_state, object_state_dict, object_template
from torchtitan_ckpt.state.rng import RngState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Train:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "step": 7,
            "ntokens_seen": 2**40,
            "loss": 0.1 + 0.2,
            "flag": True,
            "name": "run",
            "blob": b"\x00\xff",
            "pair": (1, "two", None),
            "history": [{"a": 1}, {"b": [2.5]}],
            "nothing": None,
            "ema": torch.tensor([0.5, float("nan")]),
            "count": torch.tensor(3, dtype=torch.int64),
            "nested": {"x": torch.tensor([1, 2], dtype=torch.int16), "y": 4},
            "np": np.float32(0.1),
            "array": np.arange(6).reshape(2, 3),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def save(folder: Path, obj: Any, **place: Any) -> dict[str, Any]:
    flat = object_state_dict(obj, **place)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save({f"s.{k}": v for k, v in flat.items()}, checkpoint_id=folder, planner=planner)
    return flat


def load(folder: Path, obj: Any, **place: Any) -> list[str]:
    rank = {"rank": place["rank"]} if "rank" in place else {}
    template = object_template(obj, manifest_of(folder), "s.", **rank)
    disk = {f"s.{key}": value for key, value in template.items()}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(disk, checkpoint_id=folder, planner=planner)
    values = {key.removeprefix("s."): value for key, value in disk.items()}
    return load_object_state(obj, values, **place)


def as_bits(obj: Any) -> Any:
    state = obj.state_dict()
    return {
        key: (str(type(v)), v.tobytes()) if isinstance(v, np.ndarray | np.generic) else bits(v)
        for key, v in state.items()
    }


def test_every_type_comes_back(tmp_path: Path) -> None:
    """DAT-07."""
    source, target = Train(), Train()
    save(tmp_path, source)
    for value in target.values.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    target.values.update(step=0, loss=0.0, flag=False, history=[], pair=(), name="", blob=b"")
    assert load(tmp_path, target) == []
    assert as_bits(target) == as_bits(source)
    assert list(object_state_dict(target)) == list(object_state_dict(source))


def test_none_is_not_in_the_dict_and_comes_back() -> None:
    flat = object_state_dict(Train())
    assert all(value is not None for value in flat.values())
    target = Train()
    target.values["nothing"] = 5
    load_object_state(target, flat)
    assert target.values["nothing"] is None


def test_names_that_this_package_uses_may_be_the_objects_own(tmp_path: Path) -> None:
    mine = {"@layout": 3, "@rng": {"x": torch.tensor([1.0])}, "@rng~": 5, "step": 1}
    flat = save(tmp_path, mine)
    assert not any(key.startswith("@rng.") for key in flat)
    found = {"@layout": 0, "@rng": {"x": torch.tensor([0.0])}, "@rng~": 0, "step": 0}
    load(tmp_path, found)
    assert torch.equal(found["@rng"].pop("x"), torch.tensor([1.0]))
    assert found == {**mine, "@rng": {}}


def test_lists_may_grow(tmp_path: Path) -> None:
    """DAT-04: the keys do not depend on what lies in a list."""
    source, target = {"k": [{"a": 1}, {"b": 2}]}, {"k": []}
    save(tmp_path, source)
    load(tmp_path, target)
    assert target == source


def test_two_resumes_in_a_row_are_exact(tmp_path: Path) -> None:
    """REF-05, DAT-02: a load leaves no reference behind that a later save would write."""
    job = Train()
    save(tmp_path / "1", job)
    flat = object_state_dict(job)
    load_object_state(job, flat)
    job.values["step"] += 1
    job.values["history"].append("x")
    job.values["ema"].add_(1)
    assert flat["step"] == 7
    assert flat["history"] == [{"a": 1}, {"b": [2.5]}]
    assert flat["ema"][0] == 0.5
    want = as_bits(job)
    save(tmp_path / "2", job)
    again = Train()
    load(tmp_path / "1", again)
    load(tmp_path / "2", again)
    assert as_bits(again) == want


def test_what_torchtitan_wrote(tmp_path: Path) -> None:
    """Numbers as 0-d tensors, lists key by key."""
    target = {"step": 0, "history": [1], "loss": 0.0}
    dcp.save(
        {"s": {"step": torch.tensor(9, dtype=torch.int32), "history": [4, 5], "loss": 0.5}},
        checkpoint_id=tmp_path,
    )
    load(tmp_path, target)
    assert target == {"step": 9, "history": [4, 5], "loss": 0.5}
    assert type(target["step"]) is int


def test_missing_keys_are_errors_and_extra_ones_are_said(tmp_path: Path) -> None:
    save(tmp_path, {"step": 1, "old": 2})
    with pytest.raises(MismatchError, match="lacks seen"):
        load(tmp_path, {"step": 0, "seen": 0})
    target = {"step": 0}
    assert load(tmp_path, target) == ["dict: old is in the checkpoint only"]
    assert target == {"step": 1, "old": 2}


class Point:
    pass


@pytest.mark.parametrize(
    "value",
    [Point(), Point, lambda: 1, [Point()], {"a": {1: Point}}],
    ids=["object", "class", "lambda", "in-list", "in-dict"],
)
def test_what_no_file_holds_is_refused_by_name(value: Any) -> None:
    with pytest.raises(SaveError, match=r"odd cannot be saved") as caught:
        object_state_dict({"step": 1, "odd": value, "other": value})
    assert len(caught.value.problems) == 2


def test_a_refusing_object_is_named() -> None:
    class Picky(Train):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("tokens")

    with pytest.raises(MismatchError, match=r"Picky refused its state") as caught:
        load_object_state(Picky(), object_state_dict(Train()))
    assert "KeyError" in str(caught.value)


def test_rank_local_objects_keep_their_own(tmp_path: Path) -> None:
    """DAT-05."""

    class Mine(dict[str, Any]):
        rank_local = True

    flat = {}
    for rank in range(12):
        flat.update(object_state_dict(Mine(seen=100 + rank), rank=rank, world_size=12))
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save({f"s.{k}": v for k, v in flat.items()}, checkpoint_id=tmp_path, planner=planner)
    for rank in (1, 11):
        target = Mine(seen=0)
        template = object_template(target, manifest_of(tmp_path), "s.", rank=rank)
        assert set(template) == {f"rank_{rank}.seen", "world_size"}
        load(tmp_path, target, rank=rank, world_size=12)
        assert target == {"seen": 100 + rank}
    with pytest.raises(MismatchError, match="saved on 12") as caught:
        load(tmp_path, Mine(seen=0), rank=1, world_size=2)
    assert caught.value.problems[0].code == "state.world-size"


def test_rng_goes_on_where_it_was(tmp_path: Path) -> None:
    def draw(generator: torch.Generator) -> list[Any]:
        return [
            random.random(),
            np.random.rand(3).tolist(),
            torch.rand(3).tolist(),
            torch.rand(2, generator=generator).tolist(),
            np.random.randn(),
        ]

    generator = torch.Generator().manual_seed(4)
    rng = RngState({"dropout": generator})
    np.random.randn()  # leaves a cached gaussian behind
    save(tmp_path, rng)
    want = [draw(generator), draw(generator)]
    for seed in (5, 6):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        other = torch.Generator().manual_seed(seed)
        load(tmp_path, RngState({"dropout": other}))
        assert [draw(other), draw(other)] == want
