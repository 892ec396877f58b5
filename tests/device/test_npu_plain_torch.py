"""What plain torch and torch_npu do with optimizer states that were swapped out, row by row.

A swapping optimizer empties the storage of its moments, or puts None in their place. Some of what
torch then does is loud, some silent, and some silent with garbage; this table is why the project
refuses such states before it writes anything (`state/`). It is upstream's behaviour, written down:
a row that changes with a new torch is news, not a fault of this project.

The rows run in a process of their own without the caching allocator, where recycled memory is
poisoned: with it, garbage is often the old value, and a test that looks sees nothing.
"""

from __future__ import annotations

import copy
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)

from conformance.ranks import RankPool
from torchtitan_ckpt import device

pytestmark = pytest.mark.skipif(
    device.why_not(device.DeviceKind.NPU) is not None, reason="a table of torch_npu's behaviour"
)

Row = tuple[str, str]  # ("loud", class and message of the cause) or ("silent", what came out)

NO_STORAGE = "its data is not allocated yet"
NULL_COPY = "error code is 100000"

EMPTIED = {
    "get_optimizer_state_dict": ("silent", "storage of 0 bytes"),
    "get_optimizer_state_dict, cpu_offload": ("loud", NULL_COPY),
    "dcp.save": ("loud", NULL_COPY),
    "dcp.save, HuggingFaceStorageWriter": ("loud", NULL_COPY),
    "dcp.async_save": ("loud", "out of bounds for storage of size 0"),
    "dcp.load into it": ("loud", NULL_COPY),
    "clone": ("loud", NO_STORAGE),
    "arithmetic": ("loud", NO_STORAGE),
    "zero_": ("loud", NO_STORAGE),
    "optimizer.step": ("loud", NO_STORAGE),
    "cpu": ("loud", NULL_COPY),
    "copy to pinned memory": ("loud", NULL_COPY),
    "torch.save": ("silent", "a record of 0 bytes"),
    "torch.save of the optimizer": ("silent", "2 records of 0 bytes"),
    "torch.load of that, to the device": ("silent", "garbage of the right shape"),
    "torch.load of that, to the host": ("loud", "not resizable"),
    "copy.deepcopy": ("silent", "garbage of the right shape"),
}

NONE = {
    "get_optimizer_state_dict": ("silent", "None"),
    "get_optimizer_state_dict, flattened": ("loud", "Type is <class 'NoneType'>"),
    "dcp.save": ("silent", "BytesStorageMetadata"),
    "dcp.load of that into a healthy optimizer": ("silent", "None"),
    "dcp.load of a good file into a None": ("loud", "expected BytesStorageMetadata but found"),
    "torch.save": ("silent", "None"),
}


def make() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    model = torch.nn.Linear(64, 48, bias=False).to("npu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return model, optimizer


def swap_out(optimizer: torch.optim.Optimizer) -> None:
    """The first generation's trick: pinned copies, then no storage on the device."""
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            kept = torch.empty(state[key].shape, pin_memory=True)
            kept.copy_(state[key])
            state[key].untyped_storage().resize_(0)


def _cause(error: BaseException) -> str:
    """All texts of an error, those of DCP's ranks included."""
    texts = [str(error)]
    for failure in getattr(error, "failures", {}).values():
        texts.append(str(failure[0]))
    return " ".join(texts)


def _rows(calls: dict[str, Callable[[], str]]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for name, call in calls.items():
        try:
            rows[name] = ("silent", call())
        # DCP's CheckpointException is no Exception.
        except BaseException as error:
            rows[name] = ("loud", _cause(error))
    return rows


def _records(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        empty = [i for i in archive.infolist() if "/data/" in i.filename and i.file_size == 0]
    return "a record of 0 bytes" if len(empty) == 1 else f"{len(empty)} records of 0 bytes"


def _what(tensor: torch.Tensor) -> str:
    if tensor.untyped_storage().nbytes() == 0:
        return "storage of 0 bytes"
    expected = (1 - 0.9) * torch.ones(48, 64)
    same = torch.allclose(tensor.cpu(), expected)
    return "the value" if same else "garbage of the right shape"


def _emptied_rows() -> dict[str, Row]:
    device.current().select(0)
    folder = Path(tempfile.mkdtemp())
    good_model, good_optimizer = make()
    good = {"o": get_optimizer_state_dict(good_model, good_optimizer)}
    dcp.save(good, checkpoint_id=folder / "good")

    model, optimizer = make()
    swap_out(optimizer)
    moment = optimizer.state[model.weight]["exp_avg"]

    def states(**options: Any) -> Any:
        return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))

    def saved_with_torch(value: Any, name: str) -> str:
        torch.save(value, folder / name)
        return _records(folder / name)

    def saved_as_hf() -> str:
        writer = dcp.HuggingFaceStorageWriter(folder / "hf", fqn_to_index_mapping={"x": 1})
        dcp.save({"x": moment}, storage_writer=writer)
        return "saved"

    def loaded() -> str:
        dcp.load({"o": states()}, checkpoint_id=folder / "good")
        return "loaded"

    pinned = torch.empty(moment.shape, pin_memory=True)
    return _rows(
        {
            "get_optimizer_state_dict": lambda: _what(states()["state"]["weight"]["exp_avg"]),
            "get_optimizer_state_dict, cpu_offload": lambda: str(states(cpu_offload=True)),
            "dcp.save": lambda: str(dcp.save({"o": states()}, checkpoint_id=folder / "a")),
            "dcp.save, HuggingFaceStorageWriter": saved_as_hf,
            "dcp.async_save": lambda: str(
                dcp.async_save({"o": states()}, checkpoint_id=folder / "b").result()
            ),
            "dcp.load into it": loaded,
            "clone": lambda: str(moment.clone().shape),
            "arithmetic": lambda: str((moment + 1).shape),
            "zero_": lambda: str(moment.zero_().shape),
            "optimizer.step": lambda: str(optimizer.step()),
            "cpu": lambda: str(moment.cpu().shape),
            "copy to pinned memory": lambda: str(pinned.copy_(moment).shape),
            "torch.save": lambda: saved_with_torch(moment, "moment.pt"),
            "torch.save of the optimizer": lambda: saved_with_torch(optimizer.state_dict(), "o.pt"),
            "torch.load of that, to the device": lambda: _what(torch.load(folder / "moment.pt")),
            "torch.load of that, to the host": lambda: _what(
                torch.load(folder / "moment.pt", map_location="cpu")
            ),
            "copy.deepcopy": lambda: _what(
                copy.deepcopy(optimizer.state_dict())["state"][0]["exp_avg"]
            ),
        }
    )


def _none_rows() -> dict[str, Row]:
    device.current().select(0)
    folder = Path(tempfile.mkdtemp())
    good_model, good_optimizer = make()
    good = {"o": get_optimizer_state_dict(good_model, good_optimizer)}
    dcp.save(good, checkpoint_id=folder / "good")
    model, optimizer = make()
    optimizer.state[model.weight]["exp_avg"] = None
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def states() -> dict[str, Any]:
        return {"o": get_optimizer_state_dict(model, optimizer)}

    def saved() -> str:
        metadata = dcp.save(states(), checkpoint_id=folder / "none")
        return type(metadata.state_dict_metadata["o.state.weight.exp_avg"]).__name__

    def lost() -> str:
        dcp.load(good, checkpoint_id=folder / "none")
        return str(good["o"]["state"]["weight"]["exp_avg"])

    def with_torch() -> str:
        torch.save(optimizer.state_dict(), folder / "o.pt")
        return str(torch.load(folder / "o.pt")["state"][0]["exp_avg"])

    return _rows(
        {
            "get_optimizer_state_dict": lambda: str(states()["o"]["state"]["weight"]["exp_avg"]),
            "get_optimizer_state_dict, flattened": lambda: str(
                get_optimizer_state_dict(model, optimizer, options=flat)
            ),
            "dcp.save": saved,
            "dcp.load of a good file into a None": lambda: str(
                dcp.load(states(), checkpoint_id=folder / "good")
            ),
            "dcp.load of that into a healthy optimizer": lost,
            "torch.save": with_torch,
        }
    )


@pytest.fixture(scope="module")
def tables() -> dict[str, dict[str, Row]]:
    found = device.current()
    name = "PYTORCH_NO_NPU_MEMORY_CACHING"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with RankPool(1, backend=found.backend, start_method="spawn") as pool:
            return {
                "emptied": pool.run(_emptied_rows, 1, timeout=120)[0],
                "None": pool.run(_none_rows, 1, timeout=120)[0],
            }
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


CASES = [("emptied", k, v) for k, v in EMPTIED.items()] + [("None", k, v) for k, v in NONE.items()]


@pytest.mark.parametrize(("state", "operation", "expected"), CASES, ids=lambda v: str(v)[:60])
def test_row(
    tables: dict[str, dict[str, Row]], state: str, operation: str, expected: tuple[str, str]
):
    loudness, fragment = expected
    got = tables[state][operation]
    assert got[0] == loudness, got
    assert fragment in got[1], got


def test_the_table_is_complete(tables: dict[str, dict[str, Row]]):
    assert set(tables["emptied"]) == set(EMPTIED)
    assert set(tables["None"]) == set(NONE)
