"""Files from strangers: what is no regular file, what has no end, and names that steer a terminal.

Each is told in words, in a moment, whichever part of a checkpoint it stands for.
"""

import json
import os
import shutil
import signal
import struct
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.files.dcp_lab import GOLDEN
from torchtitan_ckpt.assets import assets_of
from torchtitan_ckpt.cli import main
from torchtitan_ckpt.errors import DamagedError, Problem, printable
from torchtitan_ckpt.formats import dcp, hf

QWEN3 = Path(__file__).parents[2] / "fixtures" / "qwen3"
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00002.safetensors"


class Stuck(BaseException):
    """Nothing that the code under test would take for a failing file."""


@contextmanager
def within(seconds):
    def stop(*_):
        raise Stuck

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def codes(capsys, *words):
    with within(20):
        code = main([*map(str, words), "--json"])
    report = json.loads(capsys.readouterr().out)
    return code, [problem["code"] for problem in report.get("problems", ())]


def hf_folder(tmp_path):
    return Path(shutil.copytree(QWEN3 / "moe", tmp_path / "hf"))


def dcp_folder(tmp_path):
    folder = tmp_path / "step-1"
    dcp.save({"w": torch.arange(6.0).reshape(2, 3)}, folder, checksums=True)
    return folder


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def loop(path):
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


@pytest.mark.parametrize("put", [pipe, loop])
@pytest.mark.parametrize("name", [SHARD, INDEX, "config.json"])
def test_of_a_hugging_face_folder(tmp_path, capsys, put, name):
    folder = hf_folder(tmp_path)
    put(folder / name)
    if name == "config.json":
        assert codes(capsys, "inspect", folder)[0] == (0 if put is pipe else 3)
        assert codes(capsys, "verify", folder, "--against", "qwen3_moe")[0] in (2, 3)
        return
    code, found = codes(capsys, "verify", folder)
    assert code in (1, 3)
    assert found[0] in ("hf.unsafe-name", "hf.index-json", "hf.shard-absent", "detect.unreadable")
    with within(20), pytest.raises(DamagedError):
        hf.read_manifest(folder)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (".metadata", (3, ["dcp.unfinished"])),
        ("__0_0.distcp", (1, ["dcp.file-missing", "file.unreadable"])),
        # A sidecar that is no file is none: the archives have checksums of their own.
        (".checksums.jsonl", (0, [])),
    ],
)
def test_of_a_dcp(tmp_path, capsys, name, found):
    folder = dcp_folder(tmp_path)
    pipe(folder / name)
    assert codes(capsys, "verify", folder, "--deep") == found
    loop(folder / name)
    assert codes(capsys, "verify", folder, "--deep") == (3, ["detect.unreadable"])


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_of_a_single_file(tmp_path, capsys, name):
    os.mkfifo(tmp_path / name)
    assert codes(capsys, "verify", tmp_path / name) == (3, ["detect.foreign"])


def test_a_file_that_becomes_a_pipe_after_it_was_looked_at(tmp_path):
    """What was a file at the first look may be none when it is opened."""
    folder = hf_folder(tmp_path)
    with hf.open_reader(folder) as reader:
        pipe(folder / SHARD)
        key = next(k for k, e in reader.manifest.tensors.items() if e.shards[0].file == SHARD)
        with within(20), pytest.raises(DamagedError, match="not a regular file"):
            reader.read(key)


def test_json_without_end(tmp_path, capsys):
    folder = hf_folder(tmp_path)
    (folder / "config.json").write_bytes(b"[" * 1_000_000)
    assert codes(capsys, "inspect", folder)[0] == 0
    assert codes(capsys, "verify", folder, "--against", "qwen3_moe") == (
        2,
        ["mapping.unreadable-config"],
    )
    (folder / INDEX).write_bytes(b'{"weight_map":' + b'{"a":' * 1_000_000)
    assert codes(capsys, "verify", folder) == (3, ["hf.index-json"])
    assert codes(capsys, "verify", QWEN3 / "moe", "--against", folder / INDEX)[1] == [
        "verify.index"
    ]
    (folder / "config.json").write_bytes(b"{")
    os.truncate(folder / "config.json", 1 << 40)
    assert codes(capsys, "inspect", folder)[0] == 3


def test_an_index_of_files_without_end(tmp_path):
    folder = hf_folder(tmp_path)
    names = {f"k{i}": f"m{i}.safetensors" for i in range(150_000)}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    with within(20), pytest.raises(DamagedError, match="too many files"):
        hf.read_manifest(folder)
    for pattern, code, count in (
        ("m{}.safetensors", "hf.shard-absent", 1),
        ("../{}", "hf.more", 0),
    ):
        names = {f"k{i}": pattern.format(i) for i in range(900)}
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
        with within(20), pytest.raises(DamagedError) as caught:
            hf.read_manifest(folder)
        found = [problem.code for problem in caught.value.problems]
        assert code in found
        assert found.count("hf.shard-absent") == count
        assert len(found) < 30


def test_reading_a_file_whole_takes_its_size_once(tmp_path):
    folder = tmp_path / "s"
    shutil.copytree(GOLDEN / "torch-2.13-1rank", folder)
    size = 64 * 2**20
    os.truncate(folder / ".metadata", size)  # a hole of zeros behind it
    tracemalloc.start()
    try:
        dcp.read_manifest(folder)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1.5 * size


EVIL = "w\x1b[2J\x1b[31m\r\nsound: all is well\u202e"


def test_names_cannot_steer_a_terminal(tmp_path, capsys):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({EVIL: torch.ones(2), "x": torch.ones(3)}, a)
    save_file({EVIL: torch.tensor([1.0, float("nan")]), EVIL + "2": torch.ones(1)}, b)
    header = json.dumps({EVIL: {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}).encode()
    lie = tmp_path / "c.safetensors"
    lie.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    for words in (
        ("inspect", a),
        ("inspect", a, "--all"),
        ("inspect", a, "--tree"),
        ("inspect", a, "--tensor", EVIL),
        ("diff", a, b),
        ("verify", b, "--stats"),
        ("verify", lie),
        ("verify", a, "--against", b),
    ):
        main([*map(str, words)])
        out, err = capsys.readouterr()
        text = out + err
        assert not any(mark in text for mark in "\x1b\r\u202e"), words
        assert not any(line.startswith("sound: all") for line in text.splitlines()), words


def test_what_is_printable_stays(capsys):
    assert printable("layers.{0..3}.w — 层 é") == "layers.{0..3}.w — 层 é"
    assert "\n" in str(Problem(code="a.b", what="one\ntwo"))


def test_assets_do_not_leave_the_folder(tmp_path):
    """A link to a file of the reader's is not copied into what he publishes."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    folder = hf_folder(tmp_path)
    (folder / "tokenizer.json").symlink_to(secret)
    (folder / "vocab.json").symlink_to("config.json")
    names = [path.name for path in assets_of(folder)]
    assert "tokenizer.json" not in names
    assert {"config.json", "vocab.json"} <= set(names)
    # As the Hugging Face cache has it.
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1234").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to(Path("../../blobs/1234"))
    assert [path.name for path in assets_of(snapshot)] == ["tokenizer.json"]
