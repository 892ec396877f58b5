"""A job on the CPU of a machine with an accelerator leaves the accelerator alone.

The accelerator is a fake: torch says that it is there, and to work with it is an error.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.files.toy import Job, same_state
from torchtitan_ckpt.state import rng
from torchtitan_ckpt.state.staging import Stager


@pytest.fixture
def beside(monkeypatch):
    """An accelerator that torch offers and nobody asked for."""

    def touched(*_args, **_options):
        raise AssertionError("the accelerator was touched")

    found = torch.device("mtia")  # of a kind that torch's own optimizers do not ask about
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(torch.accelerator, "synchronize", touched)
    monkeypatch.setattr(torch, "get_device_module", touched)
    plain = torch.empty_like

    def unpinned(*args, pin_memory=False, **options):
        return touched() if pin_memory else plain(*args, **options)

    monkeypatch.setattr(torch, "empty_like", unpinned)


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_saves_and_loads(beside, tmp_path, mode):
    with Job(tmp_path, 1, async_mode=mode) as first:
        first.train(2)
    with Job(tmp_path, 7, async_mode=mode) as second:
        assert second.manager.load()
        assert same_state(first, second) == []


def test_pins_nothing_that_lies_on_the_host(beside):
    held = Stager(pin=True).snapshot({"x": torch.ones(3)})
    assert torch.equal(held["x"], torch.ones(3))


class Drawing:
    """What torch has for a kind of device, as far as its random numbers go."""

    def __init__(self):
        self.state = torch.arange(16, dtype=torch.uint8)

    def get_rng_state(self):
        return self.state

    def set_rng_state(self, state):
        self.state = state


def test_the_generator_of_the_device_in_use_is_saved_and_restored(monkeypatch):
    devices = {"npu": Drawing()}
    monkeypatch.setattr(torch, "get_device_module", devices.__getitem__)
    saved = rng.RngState(accelerator="npu").state_dict()
    devices["npu"].state = torch.zeros(16, dtype=torch.uint8)
    rng.RngState().load_state_dict(saved)
    assert not devices["npu"].state.any(), "a job on the CPU leaves the device's as it is"
    rng.RngState(accelerator="npu").load_state_dict(saved)
    assert torch.equal(devices["npu"].state, torch.arange(16, dtype=torch.uint8))


def test_which_device_a_job_computes_on():
    host, meta = torch.empty(2), torch.empty(2, device="meta")
    there = SimpleNamespace(device=SimpleNamespace(type="npu"))
    assert rng.accelerator_of([]) == ""
    assert rng.accelerator_of([host, meta]) == ""
    assert rng.accelerator_of([host, there]) == "npu"


def test_offloaded_parameters_are_computed_on_the_device_of_their_mesh(monkeypatch):
    """FSDP2 with `CPUOffloadPolicy` keeps its shards on the host, on a mesh of accelerators."""
    mesh = SimpleNamespace(device_type="cuda")
    offloaded = SimpleNamespace(device=torch.device("cpu"), device_mesh=mesh)
    monkeypatch.setattr(rng, "DTensor", SimpleNamespace)
    assert rng.accelerator_of([offloaded]) == "cuda"
