"""Saves from one process, and the streaming writer: the library's own bytes, atomic, re-read."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from torchtitan_ckpt.errors import ConfigError, InputError, RefusedError, SaveError
from torchtitan_ckpt.formats import hf, hf_file, hf_layout
from torchtitan_ckpt.formats.hf_io import NAMES
from torchtitan_ckpt.formats.hf_layout import parse_size, plan_layout
from torchtitan_ckpt.manifest import TensorEntry

INDEX = "model.safetensors.index.json"


def state() -> dict[str, torch.Tensor]:
    out = {f"layers.{i}.w": torch.randn(3 + i, 5) for i in range(12)}
    return out | {
        "half": torch.randn(7, 3).to(torch.bfloat16),
        "ids": torch.arange(11) - 5,
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "scalar16": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "exponents": torch.arange(5, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "codes": torch.arange(6, dtype=torch.uint8).view(2, 3).view(torch.float8_e4m3fn),
        "pairs": torch.arange(6, dtype=torch.uint8).view(2, 3).view(torch.float4_e2m1fn_x2),
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "double": torch.randn(3, dtype=torch.float64),
        "u64": torch.arange(3).to(torch.uint64),
    }


def entries(tensors: dict[str, torch.Tensor]) -> list[TensorEntry]:
    return [TensorEntry(k, tuple(v.shape), NAMES[v.dtype]) for k, v in tensors.items()]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_holds(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    out = {}
    for key, value in tensors.items():
        out[key] = torch.empty_like(value, memory_format=torch.contiguous_format)
        raw(out[key]).fill_(0x5A) if value.dtype != torch.bool else out[key].fill_(True)
    hf.load(folder, out, raw=True)
    for key, value in tensors.items():
        assert torch.equal(raw(out[key]), raw(value)), key


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_file_has_the_librarys_own_bytes(tmp_path: Path) -> None:
    tensors = state()
    hf.save(tensors, tmp_path / "m")
    assert names(tmp_path / "m") == ["model.safetensors"]
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert_holds(tmp_path / "m", tensors)


def test_many_files_and_an_index_that_is_exact(tmp_path: Path) -> None:
    tensors = state()
    hf.save(tensors, tmp_path / "m", max_shard_size=300, metadata={"a": "b"})
    found = names(tmp_path / "m")
    count = len(found) - 1
    assert count > 3
    assert found == [
        *(f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)),
        INDEX,
    ]
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(
        v.numel() * v.element_size() for v in tensors.values()
    )
    for name in found[:-1]:
        with safe_open(tmp_path / "m" / name, framework="pt") as file:
            assert file.metadata() == {"a": "b"}
            keys = list(file.keys())
            size = sum(tensors[k].numel() * tensors[k].element_size() for k in keys)
            assert size <= 300 or len(keys) == 1
            assert all(index["weight_map"][k] == name for k in keys)
    assert hf.survey(tmp_path / "m").notes == ()
    assert_holds(tmp_path / "m", tensors)


def test_strided_views_and_halves_of_one_tensor(tmp_path: Path) -> None:
    base = torch.arange(48.0).view(6, 8)
    tensors = {"w1": base[:, ::2], "w3": base[:, 1::2], "t": base.t(), "base": base, "row": base[2]}
    hf.save(tensors, tmp_path / "m")
    assert_holds(tmp_path / "m", {k: v.contiguous() for k, v in tensors.items()})
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert size < 4 * sum(v.numel() for v in tensors.values()) + 1000, "only the slices are stored"


def test_two_keys_of_one_tensor_are_refused_by_name_or_written_twice(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    tensors = {"embed.weight": weight, "lm_head.weight": weight, "other": torch.ones(2)}
    with pytest.raises(SaveError, match=r"'embed.weight' and 'lm_head.weight' are one tensor"):
        hf.save(tensors, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    hf.save(tensors, tmp_path / "m", allow_aliases=True)
    assert_holds(tmp_path / "m", tensors)
    hf.save({"a": weight, "b": weight.clone()}, tmp_path / "equal")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"x": 1}, "dict"),
        (None, "NoneType"),
        (3, "int"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, value: object, named: str) -> None:
    with pytest.raises(SaveError, match=named) as caught:
        hf.save({"good": torch.ones(2), "bad.key": value}, tmp_path / "m")
    assert "bad.key" in str(caught.value)
    assert not (tmp_path / "m").exists()


def test_an_empty_state_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="nothing to save"):
        hf.save({}, tmp_path / "m")


def test_an_unknown_ownership(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor or bytes"):
        hf.save({"a": torch.ones(1)}, tmp_path / "m", ownership="file")


# --- files --------------------------------------------------------------------------------------


def test_a_file_map_by_name_and_by_number(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}
    by_name = {"a": "x.safetensors", "b": "consolidated-00003.safetensors", "c": "x.safetensors"}
    hf.save(tensors, tmp_path / "n", file_map=by_name)
    assert json.loads((tmp_path / "n" / INDEX).read_text())["weight_map"] == by_name
    hf.save(tensors, tmp_path / "i", file_map={"a": 1, "b": 3, "c": 1, "gone": 2})
    assert names(tmp_path / "i") == [
        "model-00001-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        INDEX,
    ]
    hf.save(tensors, tmp_path / "one", file_map=dict.fromkeys(tensors, 1))
    assert names(tmp_path / "one") == ["model.safetensors"]
    for folder in ("n", "i", "one"):
        assert_holds(tmp_path / folder, tensors)


def test_a_file_map_that_lists_absent_keys_leaves_no_broken_file(tmp_path: Path) -> None:
    """TIE-03: torch writes a file of 78 bytes that nothing opens."""
    hf.save(
        {"a": torch.ones(2)},
        tmp_path / "m",
        file_map={"a": "a.safetensors", "lm_head": "b.safetensors"},
    )
    assert names(tmp_path / "m") == ["a.safetensors", INDEX]
    assert list(hf.read_manifest(tmp_path / "m").tensors) == ["a"]


def test_keys_beyond_the_file_map_go_with_their_neighbours_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"a": torch.ones(2), "a.bias": torch.ones(2), "b": torch.ones(2)}
    hf.save(tensors, tmp_path / "m", file_map={"a": 1, "b": 2})
    weight_map = json.loads((tmp_path / "m" / INDEX).read_text())["weight_map"]
    assert weight_map["a.bias"] == weight_map["a"]
    assert "a.bias" in caplog.text


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "x", ".x.safetensors", 0, -1]
)
def test_a_file_map_stays_in_the_folder(tmp_path: Path, name: object) -> None:
    with pytest.raises(SaveError, match="file map"):
        hf.save({"a": torch.ones(2)}, tmp_path / "m", file_map={"a": name})


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 200), st.integers(1, 9)
)
def test_files_by_size(sizes: list[int], limit: int, writers: int) -> None:
    rows = [TensorEntry(f"k{i}", (n,), "uint8") for i, n in enumerate(sizes)]
    old, hf_layout.SMALLEST_FILE = hf_layout.SMALLEST_FILE, 1
    try:
        layout = plan_layout(rows, max_shard_size=limit, writers=writers)
    finally:
        hf_layout.SMALLEST_FILE = old
    flat = [e.key for es in layout.files.values() for e in es]
    assert flat == [e.key for e in rows]
    for group in layout.files.values():
        assert len(group) == 1 or sum(e.nbytes for e in group) <= limit
    assert len(layout.files) >= min(writers, sum(1 for n in sizes if n)) // 2


def test_sizes_in_words() -> None:
    assert [parse_size(s) for s in (7, "7", "5GB", "2 GiB", "1.5kb", "3m")] == [
        7,
        7,
        5 * 10**9,
        2 << 30,
        1500,
        3 * 10**6,
    ]
    for bad in ("", "x", "-1", "0", 0, "5 apples"):
        with pytest.raises(ConfigError, match="5GB"):
            parse_size(bad)


# --- the folder ---------------------------------------------------------------------------------


def test_a_second_save_is_refused_or_replaces_everything(tmp_path: Path) -> None:
    """HFS-01: the values read after it are the new ones, and no old file is left."""
    old = {"a": torch.zeros(2), "b": torch.zeros(3)}
    hf.save(old, tmp_path / "m", file_map={"a": 1, "b": 2})
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(SaveError, match="already holds a checkpoint"):
        hf.save({"a": torch.ones(2)}, tmp_path / "m")
    assert_holds(tmp_path / "m", old)
    hf.save({"a": torch.ones(2)}, tmp_path / "m", overwrite=True)
    assert names(tmp_path / "m") == ["config.json", "model.safetensors"]
    assert_holds(tmp_path / "m", {"a": torch.ones(2)})
    hf.save(old, tmp_path / "m", file_map={"a": 1, "b": 2}, overwrite=True)
    assert names(tmp_path / "m") == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    assert_holds(tmp_path / "m", old)


@pytest.mark.parametrize("source", ["single", "sharded"])
@pytest.mark.parametrize("target", ["single", "sharded"])
def test_a_replacement_stopped_anywhere_is_all_old_or_nothing_or_all_new(
    tmp_path: Path, source: str, target: str
) -> None:
    maps = {"single": None, "sharded": {"a": 1, "b": 2, "c": 3}}
    old = {k: torch.zeros(3) for k in "abc"}
    new = {k: torch.ones(3) for k in "abc"}
    seen = set()
    for stop in range(40):
        folder = tmp_path / str(stop)
        hf.save(old, folder, file_map=maps[source])
        calls = [0]

        def counted(original, calls=calls, stop=stop):
            def call(*args, **kwargs):
                calls[0] += 1
                if calls[0] > stop:
                    raise KeyboardInterrupt
                return original(*args, **kwargs)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("pwrite", "replace", "unlink", "fsync"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                hf.save(new, folder, file_map=maps[target], overwrite=True)
                done = True
            except KeyboardInterrupt:
                done = False
        try:
            found = hf.read_manifest(folder)
        except InputError:
            seen.add("nothing")
        else:
            out = {k: torch.full((3,), 7.0) for k in found.tensors}
            hf.load(folder, out)
            values = {float(v[0]) for v in out.values()}
            assert len(values) == 1, "never a mixture"
            seen.add("new" if values == {1.0} else "old")
        if done:
            break
    assert {"old", "new"} <= seen


def test_leftovers_of_an_interrupted_save_are_removed_and_never_read(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / ".model.safetensors.partial").write_bytes(b"junk")
    (folder / ".notes").write_text("mine")
    hf.save({"a": torch.ones(2)}, folder)
    assert names(folder) == [".notes", "model.safetensors"]


def test_unfinished_names_hold_no_step_number(tmp_path: Path) -> None:
    """torchtitan looks for step-<digits> anywhere in a name."""
    import re

    assert not re.search(r"step-(\d+)", hf_file.partial_name("model-00001-of-00002.safetensors"))


def test_a_full_disk_and_a_lying_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.randn(1000), "b": torch.randn(1000)}
    hf.save({"a": torch.zeros(2)}, tmp_path / "m")
    original_read = os.preadv

    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    def wrong(fd, buffers, offset):
        got = original_read(fd, buffers, offset)
        buffers[0][5] ^= 1
        return got

    for name, fake, said in (
        ("pwrite", full, "disk is full"),
        ("preadv", wrong, "reads back differently"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fake)
            with pytest.raises(SaveError, match=said):
                hf.save(tensors, tmp_path / "m", overwrite=True)
        assert names(tmp_path / "m") == ["model.safetensors"], "what lay there is untouched"
        assert_holds(tmp_path / "m", {"a": torch.zeros(2)})


def test_a_disk_without_room_is_said_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SaveError, match="not enough space"):
        hf.save({"a": torch.randn(1000)}, tmp_path / "m")
    assert names(tmp_path / "m") == []


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("x")
    with pytest.raises(SaveError, match="could not be made"):
        hf.save({"a": torch.ones(1)}, tmp_path / "m")


def test_files_are_synchronised_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(fd), original(fd))[1])
    hf.save(
        {"a": torch.ones(1), "b": torch.ones(1)},
        tmp_path / "x",
        file_map={"a": 1, "b": 2},
        sync_files=False,
    )
    assert calls == []
    hf.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "y", file_map={"a": 1, "b": 2})
    assert len(calls) >= 4, "two files, the index, the folder"


# --- the streaming writer -----------------------------------------------------------------------


def test_slices_in_any_order(tmp_path: Path) -> None:
    tensors = state() | {"big": torch.randn(40, 70), "cube": torch.randn(5, 6, 7)}
    with hf.open_writer(tmp_path / "m", entries(tensors), max_shard_size=2000) as writer:
        pieces = [(k, None) for k in tensors if k not in ("big", "cube")]
        pieces += [("big", (r, c)) for r in range(0, 40, 8) for c in range(0, 70, 14)]
        pieces += [("cube", (0, 0, k)) for k in range(7)]
        torch.manual_seed(0)
        for i in torch.randperm(len(pieces)).tolist():
            key, at = pieces[i]
            if at is None:
                part = tensors[key]
            elif key == "big":
                part = tensors[key][at[0] : at[0] + 8, at[1] : at[1] + 14]
            else:
                part = tensors[key][:, :, at[2] : at[2] + 1]
            writer.write(key, part, at)
        assert writer.missing() == []
        manifest = writer.finish()
    assert set(manifest.tensors) == set(tensors)
    assert_holds(tmp_path / "m", tensors)
    assert all(n.startswith("model") for n in names(tmp_path / "m"))


def test_what_is_not_written_exactly_once_is_refused(tmp_path: Path) -> None:
    rows = [TensorEntry("a", (4, 3), "float32"), TensorEntry("b", (2,), "float32")]
    with hf.open_writer(tmp_path / "m", rows, file_map={"a": 1, "b": 2}) as writer:
        writer.write("a", torch.ones(2, 3))
        assert writer.missing() == ["a", "b"]
        with pytest.raises(SaveError, match="not written exactly once"):
            writer.finish()
        with pytest.raises(SaveError, match="nearest declared: a"):
            writer.write("aa", torch.ones(1))
        for bad in (
            torch.ones(2, 3, dtype=torch.float16),
            torch.ones(3, 3),
            torch.ones(2),
            torch.ones(4, 4),
        ):
            with pytest.raises(SaveError, match="does not fit"):
                writer.write("a", bad, (2, 0) if bad.dim() == 2 else None)
        with pytest.raises(SaveError, match="overlap"):
            writer.write("a", torch.ones(2, 3), (1, 0))
    assert names(tmp_path / "m") == []


def _leave_early(folder: Path, rows: list[TensorEntry]) -> None:
    with hf.open_writer(folder, rows, file_map={"a": 1, "b": 2}) as writer:
        writer.write("a", torch.ones(4))
        assert len(names(folder)) == 1
        with pytest.raises(InputError, match="no safetensors"):
            hf.read_manifest(folder)
        raise ZeroDivisionError


def test_leaving_early_leaves_nothing(tmp_path: Path) -> None:
    rows = [TensorEntry("a", (4,), "float32"), TensorEntry("b", (2,), "float32")]
    with pytest.raises(ZeroDivisionError):
        _leave_early(tmp_path / "m", rows)
    assert names(tmp_path / "m") == []


def test_a_killed_run_is_resumed_with_the_same_word_only(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4), "b": torch.randn(5), "c": torch.randn(6)}
    file_map = {"a": 1, "b": 2, "c": 3}

    def begin(word: str | None) -> hf.HfWriter:
        return hf.open_writer(tmp_path / "m", entries(tensors), file_map=file_map, resume=word)

    writer = begin("source-1")
    writer.write("a", tensors["a"])
    writer.write("c", tensors["c"])
    writer.write("b", tensors["b"][:2])
    writer.abort()
    assert begin("source-1").done == {"a", "c"}
    writer = begin("source-1")
    with pytest.raises(SaveError, match="completed by an earlier run"):
        writer.write("a", tensors["a"])
    writer.write("b", tensors["b"])
    writer.finish()
    assert_holds(tmp_path / "m", tensors)
    assert len(names(tmp_path / "m")) == 4
    with hf.open_writer(tmp_path / "n", entries(tensors), file_map=file_map, resume="x") as first:
        first.write("a", tensors["a"])
    for word in ("y", None):
        assert (
            hf.open_writer(tmp_path / "n", entries(tensors), file_map=file_map, resume=word).done
            == frozenset()
        )


def test_a_completed_file_of_another_layout_is_not_kept(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4), "b": torch.randn(5)}
    with hf.open_writer(
        tmp_path / "m", entries(tensors), file_map={"a": 1, "b": 2}, resume="w"
    ) as writer:
        writer.write("a", tensors["a"])
    tensors["a"] = torch.randn(6)
    with hf.open_writer(
        tmp_path / "m", entries(tensors), file_map={"a": 1, "b": 2}, resume="w"
    ) as writer:
        assert writer.done == frozenset()


def test_a_lora_checkpoint_can_be_written_but_not_read_as_a_model(tmp_path: Path) -> None:
    hf.save({"x.lora_A.weight": torch.ones(2)}, tmp_path / "m")
    with pytest.raises(RefusedError):
        hf.read_manifest(tmp_path / "m")


def test_an_open_writer_takes_little_memory(tmp_path: Path) -> None:
    """Sixteen times more data, no more memory."""
    import subprocess
    import sys

    script = """
import sys, torch
from pathlib import Path
from torchtitan_ckpt.formats import hf
from torchtitan_ckpt.manifest import TensorEntry
count, folder = int(sys.argv[1]), sys.argv[2]
def anon():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) / 1024
part = torch.ones(1024, 1024)
rows = [TensorEntry(f"layers.{i}.w", (2048, 1024), "float32") for i in range(count)]
with hf.open_writer(folder, rows, max_shard_size="50MB", sync_files=False) as writer:
    before = peak = anon()
    for row in rows:
        for at in (0, 1024):
            writer.write(row.key, part, (at, 0))
            peak = max(peak, anon())
    writer.finish()
print(max(peak, anon()) - before)
"""
    above = []
    for count in (2, 32):
        out = subprocess.run(
            [sys.executable, "-c", script, str(count), str(tmp_path / str(count))],
            capture_output=True,
            text=True,
            check=True,
        )
        above.append(float(out.stdout))
    assert above[1] < 24, above
    assert above[1] < above[0] + 12, above
