"""Flipped and cut bytes of DCP and `.pt` files: only the error tree, and no wrong load unseen.

`TORCHTITAN_CKPT_FUZZ=100000` is the long mode: so many examples of each kind.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.files.dcp_lab import nan_like, same, some_state, torch_save
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.formats import torch_file
from torchtitan_ckpt.formats.dcp import load

EXAMPLES = int(os.environ.get("TORCHTITAN_CKPT_FUZZ", "300"))
fuzz = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    state = {k: v for k, v in some_state().items() if k not in ("layers.9.w", "layers.10.w")}
    folder = torch_save(state, tmp_path_factory.mktemp("fuzz") / "step")
    files = {name: (folder / name).read_bytes() for name in (".metadata", "__0_0.distcp")}
    return folder, state, files


def blank(state):
    return {k: nan_like(v) if isinstance(v, torch.Tensor) else 0 for k, v in state.items()}


def read_all(folder, state):
    return load(folder, blank(state), threads=1)


CHANGES = st.lists(st.tuples(st.integers(0, 2**30), st.integers(1, 255)), min_size=1, max_size=4)


@fuzz
@given(changes=CHANGES)
def test_flips_of_metadata(step, changes):
    folder, state, files = step
    data = bytearray(files[".metadata"])
    for at, mask in changes:
        data[at % len(data)] ^= mask
    (folder / ".metadata").write_bytes(data)
    try:
        loaded = read_all(folder, state)
    except CheckpointError:
        return
    finally:
        (folder / ".metadata").write_bytes(files[".metadata"])
    for key, value in state.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert same(loaded[key], value) if is_tensor else loaded[key] == value, key


@fuzz
@given(changes=CHANGES)
def test_flips_of_data_files(step, changes):
    folder, state, files = step
    path = folder / "__0_0.distcp"
    data = bytearray(files["__0_0.distcp"])
    for at, mask in changes:
        data[at % len(data)] ^= mask
    path.write_bytes(data)
    try:
        loaded = read_all(folder, state)
    except CheckpointError:
        return
    finally:
        path.write_bytes(files["__0_0.distcp"])
    for key, value in state.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert same(loaded[key], value) if is_tensor else loaded[key] == value, key


@fuzz
@given(
    share=st.floats(0, 1, exclude_max=True), which=st.sampled_from([".metadata", "__0_0.distcp"])
)
def test_cuts(step, share, which):
    folder, state, files = step
    (folder / which).write_bytes(files[which][: int(share * len(files[which]))])
    try:
        with pytest.raises(CheckpointError):
            read_all(folder, state)
    finally:
        (folder / which).write_bytes(files[which])


@fuzz
@given(changes=CHANGES, cut=st.one_of(st.none(), st.floats(0, 1)))
def test_flips_and_cuts_of_torch_files(tmp_path_factory, changes, cut):
    path = tmp_path_factory.getbasetemp() / "fuzz.pt"
    state = {"a": torch.arange(12.0).reshape(3, 4), "n": {"b": torch.ones(5).bfloat16()}, "s": 3}
    torch.save(state, path)
    data = bytearray(path.read_bytes())
    for at, mask in changes:
        data[at % len(data)] ^= mask
    path.write_bytes(data if cut is None else data[: int(cut * len(data))])
    try:
        manifest = torch_file.read_manifest(path)
        target = {
            key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for key, entry in manifest.tensors.items()
            if entry.nbytes < 10_000
        }
        torch_file.load(path, target | dict.fromkeys(manifest.objects))
    except CheckpointError:
        pass
