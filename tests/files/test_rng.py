"""Random number generators are part of a full checkpoint: resumed dropout goes on as it was."""

import random

import numpy as np
import pytest
import torch

from tests.files.toy import Job, Toy, same_state
from torchtitan_ckpt.formats import dcp
from torchtitan_ckpt.job import JobState
from torchtitan_ckpt.state import rng


class Noisy(Toy):
    """Dropout by torch, a skipped layer by Python, a scale by numpy: all three must go on."""

    def forward(self, tokens):
        x = torch.nn.functional.dropout(self.embed(tokens), 0.5)
        for layer in self.layers:
            if random.random() < 0.7:
                x = torch.tanh(layer(x))
        return self.head(x) * float(1 + np.random.randint(4))


def job(folder, seed, **options):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return Job(folder, seed, model=Noisy(), **options)


def notes(caplog):
    return [r.message for r in caplog.records if "random number generators" in r.message]


def test_two_resumes_in_a_row_equal_the_run_that_never_stopped(tmp_path):
    with job(tmp_path / "whole", 1) as whole:
        losses = whole.train(6)
    with job(tmp_path / "cut", 1) as first:
        assert first.train(2) == losses[:2]
    for seed, until in ((7, 4), (8, 6)):
        with job(tmp_path / "cut", seed) as later:
            assert later.manager.load()
            assert later.train(until) == losses[until - 2 : until]
    assert same_state(whole, later) == []


def test_without_them_the_resumed_run_is_another(tmp_path, monkeypatch, caplog):
    """As with a checkpoint of torchtitan, which holds none: no error, and it is said."""
    with job(tmp_path, 1) as whole:
        losses = whole.train(4)
    monkeypatch.setattr(JobState, "generator_targets", lambda *_: {})
    with job(tmp_path, 7, load_step=2) as later, caplog.at_level("INFO"):
        assert later.manager.load()
        assert later.train(3) != losses[2:3]
    (note,) = notes(caplog)
    assert "the checkpoint has none" in note


def test_they_are_excluded_with_the_train_state(tmp_path):
    with job(tmp_path, 1) as first:
        first.train(2)
    with job(tmp_path, 7, exclude_from_loading=["train_state"]) as later:
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
        assert later.manager.load()
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_generators_handed_in_by_name_come_back():
    own = torch.Generator().manual_seed(3)
    state = rng.RngState({"noise": own})
    saved = state.state_dict()
    drawn = torch.rand(5, generator=own)
    torch.rand(7, generator=own)
    state.load_state_dict(saved)
    assert torch.equal(torch.rand(5, generator=own), drawn)


def test_one_value_a_rank_beside_the_train_state(tmp_path):
    with job(tmp_path, 1) as first:
        first.train(2)
    keys = dcp.read_manifest(tmp_path / "checkpoint/step-2").keys
    assert {key for key in keys if rng.is_key(key)} == {
        "train_state.@rng.rank_0.state",
        "train_state.@rng.world_size",
    }


@pytest.mark.parametrize(
    ("values", "size", "word"),
    [
        ({}, 1, "the checkpoint has none"),
        ({"world_size": 4, "rank_0.state": {"split": "a"}}, 2, "saved by 4 ranks"),
        ({"world_size": 2, "rank_0.state": {"split": "b"}}, 2, "split otherwise (b; now a)"),
        ({"world_size": 2, "rank_0.state": b"damaged"}, 2, "split otherwise"),
        ({"world_size": 2}, 2, "split otherwise"),
        ({"world_size": 2, "rank_0.state": {"split": "a"}}, 2, ""),
    ],
)
def test_which_generators_fit(values, size, word):
    said = rng.RngState(split="a").unfit(values, size)
    assert word in said
    assert bool(said) == bool(word)
