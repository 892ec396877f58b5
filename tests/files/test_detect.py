"""Which format lies at a path, and in words why it is no other."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from tests.files.dcp_lab import GOLDEN, some_state, torch_save
from torchtitan_ckpt import formats
from torchtitan_ckpt.errors import NotFoundError, RefusedError
from torchtitan_ckpt.formats import detect


def make(tmp_path, *names):
    folder = tmp_path / "f"
    folder.mkdir()
    for name in names:
        if name.endswith("/"):
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(b"x")
    return folder


@pytest.mark.parametrize(
    ("names", "format", "kind"),
    [
        ([".metadata", "__0_0.distcp"], "dcp", "folder"),
        ([".metadata", "model.safetensors"], "dcp", "folder"),
        (["model.safetensors"], "hf", "single"),
        (["model.safetensors.index.json", "model-00001-of-00002.safetensors"], "hf", "indexed"),
        (["a.safetensors", "b.safetensors", "config.json"], "hf", "sharded"),
        (["adapter_config.json", "adapter_model.safetensors"], None, "adapter"),
        ([], None, "empty"),
        (["__0_0.distcp", "__1_0.distcp"], None, "unfinished"),
        ([".metadata.tmp"], None, "unfinished"),
        (["__0.metadata", "__0_0.distcp"], None, "rank-local"),
        (["__0_1.metadata"], None, "rank-local"),
        (["metadata.pkl", "model"], None, "torch-checkpointing"),
        (["step-10/", "step-20/"], None, "steps"),
        (["step-10"], None, "foreign"),
        (["notes.txt"], None, "foreign"),
        (["pytorch_model.bin"], None, "foreign"),
    ],
)
def test_folders(tmp_path, names, format, kind):
    found = detect(make(tmp_path, *names))
    assert (found.format, found.kind) == (format, kind)
    assert set(found.refused) == set(formats.FORMATS) - {format} or (
        format == "hf" and set(found.refused) == {"dcp", "torch"}
    )
    assert all(found.refused.values())


def test_files(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "new.anything")
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").write_bytes(b"")
    kinds = {p.name: (detect(p).format, detect(p).kind) for p in tmp_path.iterdir()}
    assert kinds == {
        "new.anything": ("torch", "file"),
        "old.pt": ("torch", "file"),
        "one.safetensors": ("hf", "single"),
        "text.pt": (None, "foreign"),
        "empty.pt": (None, "unfinished"),
    }


def test_missing_and_unreadable(tmp_path, monkeypatch):
    assert detect(tmp_path / "none").kind == "missing"
    assert isinstance(detect(tmp_path / "none").error(), NotFoundError)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(formats.os, "scandir", refuse)
    found = detect(tmp_path)
    assert found.kind == "unreadable"
    assert "Permission denied" in found.refused["dcp"]


def test_every_kind_without_a_format_has_an_error_in_words(tmp_path):
    for kind in ("steps", "adapter", "unfinished", "foreign", "rank-local", "torch-checkpointing"):
        error = formats.Detection("x", None, kind, {"dcp": "because"}).error()
        problem = error.problems[0]
        assert problem.code == f"detect.{kind}"
        assert problem.fix
        assert problem.actual == "because"


def test_the_error_names_what_was_meant(tmp_path):
    steps = make(tmp_path, "step-9/", "step-10/", "step-11", "seed/")
    problem = detect(steps).error().problems[0]
    assert (problem.code, problem.actual[:4]) == ("detect.steps", "dcp:")
    assert problem.fix.endswith(f"the newest in it is {steps}/step-10")
    problem = detect(tmp_path).error().problems[0]  # the dump folder of a job
    assert problem.code == "detect.foreign"
    assert problem.fix.endswith(f"the newest in it is {steps}/step-10")
    problem = detect(steps / "step-12").error().problems[0]
    assert (problem.code, problem.actual) == ("detect.missing", "nothing is there")
    assert problem.fix.endswith(("step-10", "step-11"))
    assert detect(steps / "seed").error().problems[0].code == "detect.empty"


def test_torch_checkpointing_as_its_package_writes_it(tmp_path):
    pytest.importorskip("torch_checkpointing", reason="wants the package torch_checkpointing")
    from torch_checkpointing.metadata_serialization import METADATA_FILE_NAME

    found = detect(make(tmp_path, METADATA_FILE_NAME, "model"))
    assert found.kind == "torch-checkpointing"
    assert isinstance(found.error(), RefusedError)


def test_urls(tmp_path):
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    url = f"memory://detect-{tmp_path.name}/step-1"
    save({"a": torch.ones(1)}, storage_writer=FsspecWriter(url, sync_files=False), no_dist=True)
    assert detect(url).format == "dcp"
    assert detect("memory://detect-none/x").kind == "missing"
    assert detect("nosuchscheme://x/y").kind == "unreadable"


def test_manifests_of_every_format(tmp_path):
    assert formats.read_manifest(GOLDEN / "handmade-2.4").format == "dcp"
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    assert formats.read_manifest(tmp_path / "a.pt").format == "torch"
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "hf" / "model.safetensors")
    assert formats.read_manifest(tmp_path / "hf").format == "hf"
    with pytest.raises(RefusedError) as caught:
        formats.read_manifest(tmp_path)
    assert caught.value.problems[0].code == "detect.foreign"
    assert "name the file itself, such as a.pt" in str(caught.value)


def test_neither_detect_nor_a_dcp_manifest_imports_torch(tmp_path):
    step = torch_save(some_state(), tmp_path / "s")
    code = (
        "import sys; from torchtitan_ckpt.formats import detect, read_manifest;"
        f"assert detect({str(step)!r}).format == 'dcp'; read_manifest({str(step)!r});"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
