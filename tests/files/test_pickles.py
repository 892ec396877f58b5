"""The allow-list: what real writers pickle is read, everything else is refused, nothing runs."""

from __future__ import annotations

import collections
import contextlib
import datetime
import importlib.util
import io
import json
import os
import pickle
import random
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as md

from torchtitan_ckpt.errors import CheckpointError, DamagedError, RefusedError
from torchtitan_ckpt.formats import pickles
from torchtitan_ckpt.formats.pickle_machine import interpret
from torchtitan_ckpt.formats.pickle_parts import Table, check_plain
from torchtitan_ckpt.formats.pickles import load_metadata, load_object

FIXTURES = Path(__file__).parents[2] / "fixtures"
HOSTILE = FIXTURES / "damaged" / "pickles"


def _attacks() -> dict[str, tuple[bytes, str]]:
    spec = importlib.util.spec_from_file_location("make_dcp", FIXTURES / "make_dcp.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.attacks()


ATTACKS = _attacks()


def archive(value) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def plain(data: bytes):
    return interpret(data, Table(pickles._OBJECTS, pickles.BUILDERS), where="test")


# What real writers write


class Named(collections.OrderedDict):
    pass


VALUES = [
    None,
    True,
    -(2**40),
    2**100,
    1.5,
    "größe",
    b"\x00\xff",
    bytearray(b"ab"),
    (1, 2, 3, 4, 5),
    [1, [2, {"a": ()}]],
    {"a": {1: 2, (3, "x"): 4, 2.5: None}},
    {1, 2},
    frozenset([3]),
    np.random.RandomState(3).get_state(),
    random.Random(5).getstate(),
    np.random.default_rng(0).bit_generator.state,
    np.float64(3),
    np.bool_(True),
    np.array(["ab", "c"]),
    np.arange(6, dtype="<i4").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    torch.Size([1, 2]),
    torch.float8_e4m3fn,
    torch.device("cuda", 1),
    collections.OrderedDict(a=1),
    collections.defaultdict(list, a=[1]),
    collections.deque([1, 2], 5),
    datetime.datetime(2026, 1, 2, 3, 4, 5),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    datetime.date(2026, 1, 2),
    datetime.timedelta(3, 4),
    1 + 2j,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}-{v!r}"[:40])
def test_objects_come_back_as_torch_load_reads_them(value):
    mine = load_object(archive(value))
    theirs = torch.load(io.BytesIO(archive(value)), weights_only=False)
    assert type(mine) is type(theirs)
    assert repr(mine) == repr(theirs)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_protocol(protocol):
    for value in VALUES:
        assert repr(plain(pickle.dumps(value, protocol))) in (
            repr(value),
            repr(tuple(value)) if isinstance(value, torch.Size) else "",
            repr(pickles.DTypeName("float8_e4m3fn")),
        )


def test_tensors_inside_objects_share_their_storage_and_keep_their_strides():
    base = torch.arange(12.0)
    value = {"a": base.reshape(3, 4).t(), "b": [base[4:7], torch.tensor(2, dtype=torch.bfloat16)]}
    back = load_object(archive(value))
    assert torch.equal(back["a"], value["a"])
    assert back["a"].stride() == (1, 4)
    assert torch.equal(back["b"][0], base[4:7])
    back["b"][0][0] = -1
    assert back["a"][0, 1] == -1
    codes = torch.tensor([1, 200], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(load_object(archive(codes)).view(torch.uint8), codes.view(torch.uint8))


def test_a_state_dict_with_its_versions_is_plain():
    state = torch.nn.Linear(2, 3).state_dict()
    back = load_object(archive(state))
    assert list(back) == ["weight", "bias"]
    assert torch.equal(back["bias"], state["bias"])


def test_metadata_of_every_known_form():
    chunk = md.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    entry = md.TensorStorageMetadata(
        md.TensorProperties(dtype=torch.bfloat16), torch.Size([2, 3]), [chunk]
    )
    whole = md.Metadata({"w": entry}, {"w": ("w",)}, {md.MetadataIndex("w", [0, 0], 0): None})
    whole.storage_meta = md.StorageMeta(Path("/data/step-5"))
    whole.version = "1.0.0"
    read = load_metadata(pickle.dumps(whole))
    assert (read.version, read.checkpoint_id) == ("1.0.0", "/data/step-5")
    state = read.state_dict_metadata["w"].state
    assert state["size"] == (2, 3)
    assert state["properties"].state[0] == pickles.DTypeName("bfloat16")
    del whole.__dict__["storage_meta"], whole.__dict__["version"]  # as torch 2.3 had it
    assert load_metadata(pickle.dumps(whole, 2)).version is None


def test_the_path_of_python_3_13():
    data = (FIXTURES / "dcp" / "handmade-python3.13" / ".metadata").read_bytes()
    assert b"pathlib._local" in data
    assert load_metadata(data).checkpoint_id == "/data/step-3"


# What strangers write


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused_by_name_in_bounded_time_and_memory(name):
    data, code = ATTACKS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        load_metadata(data)
    assert caught.value.problems[0].code == code
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_committed_attacks_are_those_of_the_script():
    codes = json.loads((HOSTILE / "expected.json").read_text())
    assert len(codes) > 25
    for name, code in codes.items():
        with pytest.raises(CheckpointError) as caught:
            load_metadata((HOSTILE / f"{name}.pkl").read_bytes())
        assert caught.value.problems[0].code == code, name


class Runs:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: {"a": [r]}, lambda r: {"k": r, "t": 1}])
def test_code_does_not_run_unless_trusted(tmp_path, wrap):
    target = str(tmp_path / "ran")
    with pytest.raises(RefusedError, match=r"posix\.mkdir") as caught:
        load_object(archive(wrap(Runs(target))), where="file: key")
    problem = caught.value.problems[0]
    assert problem.where.startswith("file: key: data.pkl, byte ")
    assert "--trust" in problem.fix
    with pytest.raises(RefusedError):
        load_metadata(pickle.dumps(wrap(Runs(target))))
    assert not os.path.exists(target)
    load_object(archive(wrap(Runs(target))), trust=True)
    assert os.path.exists(target)


def test_the_offset_is_that_of_the_refused_global():
    data = pickle.dumps({"a": Runs("x")}, 4)
    with pytest.raises(RefusedError) as caught:
        plain(data)
    offset = int(caught.value.problems[0].where.rsplit(" ", 1)[1])
    assert data[offset : offset + 1] == pickle.STACK_GLOBAL


def test_trust_reads_foreign_classes_of_metadata():
    whole = md.Metadata({}, {"x": collections.Counter("aab")}, {})
    data = pickle.dumps(whole)
    with pytest.raises(RefusedError, match=r"collections\.Counter"):
        load_metadata(data)
    assert load_metadata(data, trust=True).planner_data["x"] == collections.Counter("aab")


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Linear(1, 1),
        torch.ones(2).to_sparse(),
        np.array([object()], dtype=object),
        np.zeros(2, dtype=[("a", "i4")]),
        print,
        collections.Counter("ab"),
        type,
    ],
    ids=["module", "sparse", "objects", "structured", "function", "counter", "class"],
)
def test_other_objects_are_refused_by_name(value):
    with pytest.raises(RefusedError) as caught:
        load_object(archive(value))
    assert caught.value.problems[0].code == "pickle.refused"


def test_values_that_harm_their_user_are_refused():
    deep: list = []
    for _ in range(1000):
        deep = [deep]
    doubled: tuple = ()
    for _ in range(60):
        doubled = (doubled, doubled)
    circular: list = []
    circular.append(circular)
    for value in (deep, doubled, circular):
        with pytest.raises(RefusedError):
            check_plain(value, where="test")
    check_plain([[1, 2], {"a": (3, [4])}], where="test")


@pytest.mark.parametrize(
    "state",
    [
        (1, (2**40, 2**40), "dtype", False, b""),
        (1, (3,), "dtype", False, b"12"),
        (1, (-1,), "dtype", False, b""),
        (1, (1,), "dtype", False, [1]),
        (1, (1,), None, False, b"1234"),
        (1,),
    ],
)
def test_numpy_states_that_lie(state):
    state = tuple(np.dtype("i4") if part == "dtype" else part for part in state)
    head = pickle.dumps(np.arange(3, dtype="i4"), 2)
    made = head[: head.index(b"R") + 1]

    class Fake:
        def __reduce__(self):
            return (np.arange(0).__reduce__()[0], (np.ndarray, (0,), b"b"), state)

    assert made
    with pytest.raises(CheckpointError):
        plain(pickle.dumps(Fake(), 2))


@pytest.mark.parametrize("close", [b"\x90", b"\x91"], ids=["set", "frozenset"])
def test_members_of_sets_are_checked_before_they_are_hashed(close):
    open_ = b"\x8f(" if close == b"\x90" else b"("
    deep = b"\x80\x04" + open_ + b")" + b"\x85" * 200_000 + close + b"."
    with pytest.raises(RefusedError, match="nested"):
        plain(deep)
    assert plain(b"\x80\x04" + open_ + b"K\x01K\x02" + close + b".") == {1, 2}


def _small_metadata() -> bytes:
    return (FIXTURES / "dcp" / "handmade-2.4" / ".metadata").read_bytes()


@pytest.mark.parametrize("protocol", [2, 4])
def test_cut_at_every_byte(protocol):
    whole = md.Metadata({"a": md.BytesStorageMetadata()}, {"a": ("a",)}, {md.MetadataIndex("a"): 1})
    data = _small_metadata() if protocol == 4 else pickle.dumps(whole, 2)
    load_metadata(data)
    for n in range(len(data)):
        with pytest.raises(DamagedError) as caught:
            load_metadata(data[:n])
        assert caught.value.problems[0].code in ("pickle.cut", "pickle.empty"), n


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_overwritten_bytes_lead_into_the_error_tree(changes):
    data = bytearray(_small_metadata())
    for at, byte in changes:
        data[at % len(data)] = byte
    with contextlib.suppress(CheckpointError):
        load_metadata(bytes(data))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_lead_into_the_error_tree(data):
    for table in (Table(pickles._METADATA, pickles.BUILDERS), Table(pickles._OBJECTS)):
        with contextlib.suppress(CheckpointError):
            interpret(b"\x80\x04" + data, table, where="test")


def test_hundreds_of_thousands_of_keys_take_seconds():
    data = pickle.dumps({f"k{i}": i for i in range(300_000)}, 4)
    start = time.process_time()
    assert len(plain(data)) == 300_000
    assert time.process_time() - start < 10
