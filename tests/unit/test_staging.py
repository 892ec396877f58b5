"""Snapshots: what they hold stays what it was, whatever happens to the job afterwards."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.specimens.odd_optimizers import bits, make_net, train
from torchtitan_ckpt.errors import SaveError
from torchtitan_ckpt.state.model import model_state_dict
from torchtitan_ckpt.state.optimizer import optimizer_state_dict
from torchtitan_ckpt.state.staging import Stager, require_storable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def job() -> tuple[Any, Any, dict[str, Any]]:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, [optimizer], 2)
    return net, optimizer, flat_of(net, optimizer)


def flat_of(net: Any, optimizer: Any) -> dict[str, Any]:
    state = {f"optimizer.{k}": v for k, v in optimizer_state_dict(optimizer, net).items()}
    return {**model_state_dict(net), **state, "train_state.step": 2, "train_state.list": [1, {}]}


def snapshot_bits(flat: dict[str, Any]) -> dict[str, Any]:
    return {key: bits(value) for key, value in flat.items()}


@pytest.mark.parametrize("event", ["step", "reassign", "load", "free", "mutate", "zero"])
@pytest.mark.parametrize("pin", [False, True])
def test_holds_the_moment_of_the_call(event: str, pin: bool) -> None:
    """ASY-07: CPU tensors are copied too."""
    net, optimizer, flat = job()
    want = snapshot_bits(flat)
    stager = Stager(pin)
    held = stager.snapshot(flat)
    stager.wait()
    if event == "step":
        train(net, [optimizer], 2, start=2)
    elif event == "reassign":
        for state in optimizer.state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    elif event == "load":
        net.load_state_dict(make_net(seed=9).state_dict())
    elif event == "free":
        del net, optimizer
        flat.clear()
        gc.collect()
    elif event == "mutate":
        flat["train_state.list"].append(3)
        flat["train_state.list"][1]["x"] = 1
    else:
        for value in flat.values():
            if isinstance(value, torch.Tensor):
                with torch.no_grad():
                    value.zero_()
    assert snapshot_bits(held) == want


def test_the_live_dict_is_never_handed_out() -> None:
    """ASY-08."""
    _, _, flat = job()
    held = Stager().snapshot(flat)
    assert held is not flat
    pointers = {v.data_ptr() for v in flat.values() if isinstance(v, torch.Tensor)}
    for key, value in held.items():
        if isinstance(value, torch.Tensor):
            assert value is not flat[key]
            assert value.data_ptr() not in pointers
            assert not value.requires_grad
    assert held["train_state.list"] is not flat["train_state.list"]


def test_buffers_are_used_again() -> None:
    net, optimizer, flat = job()
    stager = Stager()
    first = stager.snapshot(flat)
    places = {k: v.data_ptr() for k, v in first.items() if isinstance(v, torch.Tensor)}
    train(net, [optimizer], 1, start=2)
    flat = flat_of(net, optimizer)
    second = stager.snapshot(flat)
    assert {k: v.data_ptr() for k, v in second.items() if isinstance(v, torch.Tensor)} == places
    assert snapshot_bits(second) == snapshot_bits(flat)


def test_a_state_that_changes_shape_dtype_or_keys_gets_new_buffers() -> None:
    stager = Stager()
    a = torch.arange(6.0)
    stager.snapshot({"a": a, "b": a + 1, "gone": torch.zeros(1000)})
    for flat in (
        {"a": torch.arange(8.0), "b": torch.arange(6)},
        {"a": torch.arange(6.0).reshape(2, 3).t(), "c": torch.tensor(4)},
        {"b": a + 1, "a": a},
    ):
        assert snapshot_bits(stager.snapshot(flat)) == snapshot_bits(flat)
    assert set(stager._buffers) == {"a", "b"}
    stager.close()
    assert not stager._buffers


def test_tied_bytes_are_copied_once() -> None:
    weight = torch.randn(5, 3)
    held = Stager().snapshot({"embed": weight, "head": weight, "alias": weight.view(5, 3)})
    assert held["embed"] is held["head"] is held["alias"]
    stager = Stager()
    stager.snapshot({"embed": weight, "head": weight})
    loose = stager.snapshot({"embed": weight, "head": weight + 1})  # untied between two saves
    assert not torch.equal(loose["embed"], loose["head"])


def test_views_are_right() -> None:
    base = torch.randn(8, 6)
    flat = {
        "all": base,
        "rows": base[2:5],
        "columns": base[:, 1:3],
        "t": base.t(),
        "expanded": torch.tensor([1.5]).expand(4, 3),
        "flip": base[::2],
        "empty": base[:0],
        "scalar": base[3, 4],
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
    }
    stager = Stager()
    for _ in range(2):
        held = stager.snapshot(flat)
        assert snapshot_bits(held) == {k: bits(v.resolve_conj()) for k, v in flat.items()}
    small = held["scalar"].untyped_storage().nbytes()
    assert small == 4  # not the whole of a large storage for a small view of it
    assert held["t"].stride() == base.t().stride()


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.uint16, torch.float64],
)
def test_every_dtype(dtype: torch.dtype) -> None:
    value = torch.arange(7).to(dtype)
    stager = Stager()
    for _ in range(2):
        assert bits(stager.snapshot({"x": value})["x"]) == bits(value)


@dataclass
class Record:
    x: int


REFUSED = [type, Record, Record(1), lambda: 1, object(), threading.Lock(), None]
TAKEN = [
    1,
    2.5,
    True,
    "a",
    b"b",
    1j,
    [1, (2, {"a": {3}})],
    np.float32(0.5),
    np.arange(3),
    torch.int8,
]


@pytest.mark.parametrize("pin", [False, True])
def test_every_mode_takes_and_refuses_the_same(pin: bool) -> None:
    """ASY-02. `require_storable` is what the blocking mode asks; the stager asks it too."""
    for value in REFUSED:
        for ask in (require_storable, Stager(pin).snapshot):
            with pytest.raises(SaveError, match=r"odd cannot be saved") as caught:
                ask({"fine": 1, "odd": value, "list": [value] if value else object()})
            assert [p.where for p in caught.value.problems] == ["odd", "list"]
    for value in TAKEN:
        require_storable({"x": value})
        held = Stager(pin).snapshot({"x": value})["x"]
        assert type(held) is type(value)
        assert np.array_equal(held, value) if isinstance(value, np.ndarray) else held == value


def test_containers_and_arrays_are_copied_deeply() -> None:
    inner = torch.tensor([1.0])
    value = {"a": [np.zeros(2), {"t": inner}], "b": bytearray(b"x")}
    held = Stager().snapshot({"v": value})["v"]
    value["a"][0][:] = 7
    inner.fill_(9)
    value["b"][0] = 0
    assert held["a"][0].tolist() == [0, 0]
    assert held["a"][1]["t"].tolist() == [1.0]
    assert held["b"] == bytearray(b"x")


def test_emptied_tensors_are_refused() -> None:
    value = torch.zeros(4)
    value.untyped_storage().resize_(0)
    with pytest.raises(SaveError, match="elements and no storage"):
        Stager().snapshot({"x": value})


def test_a_snapshot_in_use_is_not_overwritten() -> None:
    """A save that is asked for while another one writes waits for its buffers."""
    stager = Stager()
    held = stager.snapshot({"x": torch.zeros(3)})
    writer: Future[Any] = Future()
    stager.written_by(writer)
    seen: list[Any] = []

    def finish() -> None:
        seen.append(held["x"].tolist())
        writer.set_exception(OSError("disk full"))  # a failed write frees them as well

    timer = threading.Timer(0.2, finish)
    timer.start()
    stager.snapshot({"x": torch.ones(3)})
    timer.join()
    assert seen == [[0.0, 0.0, 0.0]]


def test_dcp_saves_a_snapshot(tmp_path: Path) -> None:
    _, _, flat = job()
    held = Stager().snapshot(flat)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(held, checkpoint_id=tmp_path, planner=planner)
    target = {k: torch.empty_like(v) for k, v in flat.items() if isinstance(v, torch.Tensor)}
    dcp.load(target, checkpoint_id=tmp_path)
    assert snapshot_bits(target) == {
        k: bits(v) for k, v in flat.items() if isinstance(v, torch.Tensor)
    }


class _Late:
    """A device whose stream does its work only when it is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def stream(self) -> Any:
        return self

    def current_stream(self) -> Any:
        return self

    def wait_stream(self, other: Any) -> None:
        self.log.append("wait_stream")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def use(self, stream: Any) -> Any:
        import contextlib

        self.log.append("use")
        return contextlib.nullcontext()


def test_host_tensors_need_no_stream() -> None:
    device = _Late()
    stager = Stager(True, device=device)
    stager.snapshot({"x": torch.ones(3)})
    stager.wait()
    assert device.log == []
