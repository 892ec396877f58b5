"""`convert` killed, interrupted, shared by ranks, short of memory, and reading back wrong bytes."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.files.convert_lab import (
    FIXTURES,
    dcp_tensors,
    full_step,
    go,
    hf_tensors,
    native_of,
    same_dict,
    save_dcp,
)
from tests.files.memory_lab import ALLOCATOR
from torchtitan_ckpt.convert import engine, workspace
from torchtitan_ckpt.errors import CheckpointError, SaveError
from torchtitan_ckpt.formats import detect, page_cache

ROOT = Path(__file__).parents[2]
MOE = FIXTURES / "moe"
TARGETS = [("dcp", "step-1"), ("hf", "out"), ("pt", "out.pt")]


def command(*words):
    return [sys.executable, "-m", "torchtitan_ckpt", "convert", *map(str, words)]


def stopping_after(count, *words):
    """The command in a process that kills itself, as the system would, at its n-th piece."""
    code = (
        "import os, signal, sys\n"
        "from torchtitan_ckpt.convert import run\n"
        "from torchtitan_ckpt.cli import main\n"
        "left = [int(sys.argv[1])]\n"
        "old = run._quietly\n"
        "def quietly(job):\n"
        "    left[0] -= 1\n"
        "    if left[0] < 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return old(job)\n"
        "run._quietly = quietly\n"
        "sys.exit(main(sys.argv[2:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(count), "convert", *map(str, words)], cwd=ROOT, check=False
    )
    return done.returncode


@pytest.mark.parametrize("after", [1, 100])
def test_hugging_face_output_goes_on_after_a_kill(after, tmp_path):
    go(MOE, tmp_path / "dcp")
    dst = tmp_path / "step-5"
    words = (tmp_path / "dcp", dst, "--config", MOE, "--max-shard-size", "40KB", "--threads", "1")
    assert stopping_after(after, *words) == -signal.SIGKILL
    assert not dst.exists()
    left = [p.name for p in tmp_path.iterdir() if p.name != "dcp"]
    assert left
    assert not any("step-" in name for name in left)
    assert all(detect(tmp_path / name).format is None for name in left)
    finished = [p for p in tmp_path.rglob("model-*.safetensors") if p.is_file()]
    before = {p.name: p.stat().st_mtime_ns for p in finished}
    assert bool(before) == (after > 1)
    done = subprocess.run(
        command(*words, "--json"), cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout)["resumed"] is True
    assert same_dict(hf_tensors(dst), hf_tensors(MOE))
    assert all((dst / name).stat().st_mtime_ns == when for name, when in before.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "step-5"]


def test_dcp_output_goes_on_after_a_kill(tmp_path, monkeypatch):
    from torchtitan_ckpt.convert import engine, run
    from torchtitan_ckpt.formats import dcp_stream

    class Small(dcp_stream.DcpStreamWriter):
        def __init__(self, *args, **options):
            super().__init__(*args, **options, max_file_bytes=40_000)

    monkeypatch.setattr(engine, "DcpStreamWriter", Small)
    old, made = run._quietly, []

    class Stop(BaseException):
        pass

    def quietly(job):
        made.append(job)
        if len(made) == 20:
            raise Stop
        return old(job)

    monkeypatch.setattr(run, "_quietly", quietly)
    with pytest.raises(Stop):
        go(MOE, tmp_path / "step-1", threads=1)
    assert not (tmp_path / "step-1").exists()
    kept = {p.name for p in tmp_path.rglob("*.distcp")}
    assert kept
    made.clear()
    monkeypatch.setattr(run, "_quietly", lambda job: made.append(job) or old(job))
    done = go(MOE, tmp_path / "step-1", threads=1, no_verify=True)
    assert done.resumed
    assert len(made) < done.tensors
    assert kept < {p.name for p in (tmp_path / "step-1").iterdir()}
    assert same_dict(dcp_tensors(tmp_path / "step-1", tmp_path / "x.pt"), native_of("moe"))


def test_another_command_does_not_go_on_from_what_was_left(tmp_path):
    go(MOE, tmp_path / "dcp")
    words = (tmp_path / "dcp", tmp_path / "hf", "--config", MOE, "--max-shard-size", "40KB")
    assert stopping_after(90, *words) == -signal.SIGKILL
    done = go(
        tmp_path / "dcp",
        tmp_path / "hf",
        config=str(MOE),
        max_shard_size="40KB",
        export_dtype="float32",
    )
    assert not done.resumed
    assert all(v.dtype == torch.float32 for v in hf_tensors(tmp_path / "hf").values())


@pytest.mark.parametrize("after", [1, 40])
def test_pt_output_goes_on_after_a_kill(after, tmp_path, monkeypatch):
    """And ends as the same file, byte for byte, as without the interruption."""
    from torchtitan_ckpt.convert import run
    from torchtitan_ckpt.formats import torch_file_write

    monkeypatch.setattr(torch_file_write, "_NOTED", 3000)
    save_dcp(full_step(), tmp_path / "dcp")
    whole = go(tmp_path / "dcp", tmp_path / "whole.pt", threads=1)
    old, made = run._quietly, []

    class Stop(BaseException):
        pass

    def quietly(job):
        made.append(job)
        if len(made) == after:
            raise Stop
        return old(job)

    monkeypatch.setattr(run, "_quietly", quietly)
    with pytest.raises(Stop):
        go(tmp_path / "dcp", tmp_path / "x.pt", threads=1)
    assert not (tmp_path / "x.pt").exists()
    # What a kill leaves in the middle of a write: bytes without a line, and half a line.
    for name, junk in ((".checkpoint.pt.partial", b"z" * 999), ("journal/checkpoint.pt", b'["lay')):
        (path,) = tmp_path.glob(f".convert-*/**/{name}" if after > 1 else f".convert-*/out/{name}")
        with path.open("ab") as file:
            file.write(junk)
        if after == 1:
            break
    made.clear()
    monkeypatch.setattr(run, "_quietly", lambda job: made.append(job) or old(job))
    done = go(tmp_path / "dcp", tmp_path / "x.pt", threads=1, no_verify=True)
    assert done.resumed
    assert (len(made) < whole.tensors) == (after > 1)
    assert (tmp_path / "x.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()
    assert torch.load(tmp_path / "x.pt", weights_only=True)["train_state"]["ntokens"] == 12345
    assert not list(tmp_path.glob(".convert-*"))


def test_pt_output_goes_on_after_sigkill(tmp_path):
    save_dcp(full_step(), tmp_path / "dcp")
    assert stopping_after(40, tmp_path / "dcp", tmp_path / "x.pt") == -signal.SIGKILL
    assert not (tmp_path / "x.pt").exists()
    assert go(tmp_path / "dcp", tmp_path / "x.pt").resumed
    assert torch.load(tmp_path / "x.pt", weights_only=True)["train_state"]["ntokens"] == 12345


def test_pt_with_a_wrong_part_of_an_earlier_run_is_not_put_in_place(tmp_path, monkeypatch):
    """What an earlier run has written is made again and compared."""
    from torchtitan_ckpt.convert import run
    from torchtitan_ckpt.formats import torch_file_write

    monkeypatch.setattr(torch_file_write, "_NOTED", 3000)
    save_dcp(full_step(), tmp_path / "dcp")
    old, made = run._quietly, []

    def quietly(job):
        made.append(job)
        if len(made) == 40:
            raise KeyboardInterrupt
        return old(job)

    monkeypatch.setattr(run, "_quietly", quietly)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "dcp", tmp_path / "x.pt", threads=1)
    monkeypatch.undo()
    (path,) = tmp_path.glob(".convert-*/out/.checkpoint.pt.partial")
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        go(tmp_path / "dcp", tmp_path / "x.pt", threads=1)
    assert [p.name for p in tmp_path.iterdir()] == ["dcp"]


def test_a_second_conversion_to_one_target_is_told(tmp_path):
    from torchtitan_ckpt.convert.workspace import Workspace

    with (
        Workspace(tmp_path / "dcp", "w").locked(),
        pytest.raises(SaveError, match="another conversion"),
    ):
        go(MOE, tmp_path / "dcp")
    go(MOE, tmp_path / "dcp")


KEY = "layers.2.attention.wo.weight"


@pytest.mark.parametrize("to", ["hf", "dcp", "pt"])
def test_wrong_bytes_are_found_and_nothing_is_put_in_place(to, tmp_path, monkeypatch):
    """A byte changes on its way to the disk."""
    go(MOE, tmp_path / "dcp")
    pattern = bytes(native_of("moe")[KEY].view(torch.uint8).flatten()[:64].tolist())
    changed = []

    def flipping(real):
        def write(file, data, *offset):
            data = bytearray(data)
            at = data.find(pattern)
            if at >= 0:
                data[at + 5] ^= 1
                changed.append(at)
            return real(file, data, *offset)

        return write

    for function in ("write", "pwrite"):
        monkeypatch.setattr(os, function, flipping(getattr(os, function)))
    with pytest.raises(CheckpointError) as caught:
        go(tmp_path / "dcp", tmp_path / "out", to=to, config=str(MOE))
    assert changed
    assert caught.value.problems[0].code in ("convert.verify", "dcp.checksum")
    assert [p.name for p in tmp_path.iterdir()] == ["dcp"]
    go(tmp_path / "dcp", tmp_path / "out", to=to, config=str(MOE), no_verify=True)


@pytest.mark.parametrize(("to", "name"), TARGETS)
def test_what_was_compared_is_not_read_again(to, name, tmp_path, monkeypatch):
    from torchtitan_ckpt.convert import run

    go(MOE, tmp_path / "dcp")
    again = []
    real = run.digest

    def counting(fill, place, dtype):
        again.append(place)
        return real(fill, place, dtype)

    monkeypatch.setattr(run, "digest", counting)
    assert go(tmp_path / "dcp", tmp_path / name, to=to, config=str(MOE)).verified
    assert not again


def test_right_bytes_in_a_place_where_no_reader_finds_them(tmp_path, monkeypatch):
    """Two tensors of one shape change places in the metadata, after they were compared."""
    go(MOE, tmp_path / "src")
    other = KEY.replace("layers.2", "layers.1")
    names = {KEY: other, other: KEY}

    def swapped(folder, entries, items, **options):
        items = [replace(item, key=names.get(item.key, item.key)) for item in items]
        return write_metadata(folder, entries, items, **options)

    write_metadata = engine.write_metadata
    monkeypatch.setattr(engine, "write_metadata", swapped)
    with pytest.raises(SaveError) as caught:
        go(tmp_path / "src", tmp_path / "out", to="dcp")
    (problem,) = caught.value.problems
    assert problem.code == "convert.verify"
    assert "layers.{1..2}.attention.wo.weight" in problem.where
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("to", ["hf", "dcp", pytest.param("pt", marks=pytest.mark.slow)])
def test_ranks_share_the_work(to, tmp_path):
    go(MOE, tmp_path / "dcp")
    dst = tmp_path / ("x.pt" if to == "pt" else "out")
    words = command(
        tmp_path / "dcp", dst, "--to", to, "--config", MOE, "--max-shard-size", "40KB", "--json"
    )
    port = str(20000 + os.getpid() % 20000)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert json.loads(outputs[0])["verified"] is True
    assert outputs[1:] == ["", ""]
    if to == "hf":
        assert same_dict(hf_tensors(dst), hf_tensors(MOE))
    elif to == "dcp":
        assert {p.name for p in dst.iterdir()} >= {f"__{n}_0.distcp" for n in range(3)}
        assert same_dict(dcp_tensors(dst, tmp_path / "y.pt"), native_of("moe"))
    else:
        assert same_dict(torch.load(dst, weights_only=True), native_of("moe"))


def in_two_processes(words, port):
    """(exit code, stdout, stderr) of the same program as two ranks."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [(rank, *rank.communicate(timeout=120)) for rank in ranks]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_every_rank_fails_when_one_does(tmp_path):
    """And leaves no thread of the process group behind: one that outlived the interpreter would
    abort the process, now and then, after the error was said."""
    go(MOE, tmp_path / "dcp")
    (tmp_path / "out").write_text("taken")
    code = (
        "import sys, pathlib\n"
        "from torchtitan_ckpt.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "tasks = pathlib.Path('/proc/self/task').glob('*/comm')\n"
        "print(*(path.read_text().strip() for path in tasks))\n"
        "sys.exit(code)\n"
    )
    words = ("convert", str(tmp_path / "dcp"), str(tmp_path / "out"), "--to", "dcp")
    ranks = in_two_processes(
        [sys.executable, "-c", code, *words], 20000 + (os.getpid() + 7) % 20000
    )
    assert [process.returncode for process, _, _ in ranks] == [3, 3]
    assert all("exists already" in error for _, _, error in ranks)
    assert not [out for _, out, _ in ranks if "gloo" in out]


PEAK = """
import sys
import torch, torch.distributed.checkpoint
from tests.files.memory_lab import peak
from torchtitan_ckpt import convert
from torchtitan_ckpt.convert.options import Options

src, dst, window, to, config = sys.argv[1:]
options = Options(src=src, dst=dst, window=int(window), threads=2, no_sync=True, to=to,
                  config=config)
print(peak(lambda: convert.convert(options)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("to", ["hf", "dcp", "pt"])
def test_a_stacked_expert_tensor_larger_than_the_window(to, tmp_path):
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "moe_intermediate_size": 1024,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 128,
        "vocab_size": 24,
        "expert_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    from torchtitan_ckpt.adapter import MappingAdapter

    entries = MappingAdapter(tmp_path).native_entries()
    state = {k: torch.full(e.shape, float(i)) for i, (k, e) in enumerate(entries.items())}
    assert max(t.nbytes for t in state.values()) == 64 * 2**20
    save_dcp(state, tmp_path / "dcp")
    del state
    done = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "dcp", tmp_path / "out", str(2**23), to, tmp_path],
        cwd=ROOT,
        env=os.environ | ALLOCATOR,
        check=True,
        capture_output=True,
        text=True,
    )
    # The window, the stages of reading and writing, and libraries that are touched for the first
    # time.
    assert int(done.stdout) < 40 * 2**20


def test_interrupted_by_hand(tmp_path):
    save_dcp({f"layers.{i}.w": torch.zeros(256, 1024) for i in range(64)}, tmp_path / "dcp")
    for _ in range(8):  # a conversion that ends before the signal reaches it says nothing
        process = subprocess.Popen(
            command(tmp_path / "dcp", tmp_path / "x.pt", "--window", "64KiB"),
            cwd=ROOT,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        limit = time.monotonic() + 60
        while not list(tmp_path.glob(".convert-*/out")) and time.monotonic() < limit:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
        if process.returncode != 0:
            break
        (tmp_path / "x.pt").unlink()
    assert process.returncode == 130, error
    assert "interrupted" in error
    assert not (tmp_path / "x.pt").exists()


def on_disk(path: Path) -> int:
    return sum(p.stat().st_size for p in (path.rglob("*") if path.is_dir() else [path]))


@pytest.mark.parametrize(("to", "name"), TARGETS)
def test_room_is_asked_for_what_a_result_really_takes(to, name, tmp_path, monkeypatch):
    """Headers and archives too, which are most of a small checkpoint."""
    asked = []
    monkeypatch.setattr(workspace.Workspace, "refuse_full", lambda _, needed: asked.append(needed))
    save_dcp(full_step("moe"), tmp_path / "dcp")
    go(tmp_path / "dcp", tmp_path / name, to=to, config=str(MOE), window=2**20)
    assets = sum((MOE / f).stat().st_size for f in ("config.json", "generation_config.json"))
    taken = on_disk(tmp_path / name) - (assets if to == "hf" else 0)
    assert taken <= asked[0] <= 1.5 * taken


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(("to", "name"), TARGETS)
def test_a_disk_that_fills_up_is_said_and_leaves_nothing(to, name, after, tmp_path, monkeypatch):
    save_dcp(full_step("moe"), tmp_path / "dcp")
    calls = itertools.count()

    def filling(real):
        def write(*args):
            if next(calls) >= after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        return write

    monkeypatch.setattr(page_cache, "_BUFFER", 4096)

    with monkeypatch.context() as patch:
        for function in ("write", "pwrite"):
            patch.setattr(os, function, filling(getattr(os, function)))
        with pytest.raises(SaveError) as caught:
            go(tmp_path / "dcp", tmp_path / name, to=to, config=str(MOE))
    (problem,) = caught.value.problems
    assert problem.cause == "the disk is full"
    assert problem.fix.startswith("free space")
    assert problem.where.startswith(str(tmp_path))
    assert not (tmp_path / name).exists()
