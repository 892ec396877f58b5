"""The verb `verify`: every kind of damage is found, and sound checkpoints pass."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.files.dcp_lab import GOLDEN, bits, edit, some_state, stored, torch_save
from torchtitan_ckpt.adapter import MappingAdapter
from torchtitan_ckpt.cli import main
from torchtitan_ckpt.errors import DamagedError
from torchtitan_ckpt.formats import dcp, read_manifest
from torchtitan_ckpt.verify import check_structure
from torchtitan_ckpt.verify.deep import read_deep
from torchtitan_ckpt.verify.values import judge

QWEN3 = Path(__file__).parents[2] / "fixtures" / "qwen3"


def run(capsys, *words):
    """Exit code and the JSON report."""
    code = main(["verify", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def codes(report):
    return [problem["code"] for problem in report["problems"]]


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir() if p.is_dir()))
def test_golden_dcps_are_sound(capsys, name):
    code, report = run(capsys, GOLDEN / name, "--deep")
    assert (code, codes(report)) == (0, [])
    assert report["deep"]["bytes"] > 0


@pytest.mark.parametrize("name", ["dense-tied", "dense-untied", "moe"])
def test_golden_hf_folders_are_sound_and_complete(capsys, name):
    path = QWEN3 / name
    code, report = run(capsys, path, "--deep", "--against", path)
    assert (code, codes(report)) == (0, [])
    family = "qwen3_moe" if name == "moe" else "qwen3"
    code, report = run(capsys, path, "--against", family)
    assert (code, codes(report)) == (0, [])
    assert report["against"]["expected"] == report["against"]["matched"] > 40


def test_text_says_what_was_and_was_not_checked(capsys):
    assert main(["verify", str(QWEN3 / "moe")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("sound: ")
    assert "values not read (--deep)" in out


# Structure


def copy(name, tmp_path):
    target = tmp_path / "c"
    shutil.copytree(QWEN3 / name, target)
    return target


def test_all_faults_of_an_hf_folder_come_at_once(tmp_path, capsys):
    folder = copy("moe", tmp_path)
    index = folder / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    first = next(iter(tree["weight_map"]))
    tree["weight_map"]["model.layers.9.extra"] = tree["weight_map"].pop(first)
    tree["metadata"]["total_size"] += 8
    index.write_text(json.dumps(tree))
    save_file({"x": torch.ones(2)}, folder / "left-over.safetensors")
    code, report = run(capsys, folder)
    assert code == 1
    assert {"hf.index-key", "hf.file-key", "hf.total-size", "hf.stray-file"} <= set(codes(report))


def test_a_missing_shard_and_a_cut_file_are_findings(tmp_path, capsys):
    folder = copy("moe", tmp_path)
    one, two = sorted(folder.glob("*.safetensors"))[:2]
    one.unlink()
    two.write_bytes(two.read_bytes()[:-5])
    code, report = run(capsys, folder, "--deep")
    assert code == 1
    assert {"hf.shard-absent", "hf.file-cut"} <= set(codes(report))
    # Of a part that could be read the total says nothing.
    assert "hf.total-size" not in codes(report)


def test_all_that_is_wrong_with_a_dcp_is_said_at_once(tmp_path, capsys):
    """A place beyond a file's end hides no stray file, no NaN and no missing tensor."""
    folder = torch_save(some_state() | {"bad": torch.full((3, 4), torch.nan)}, tmp_path / "s")
    edit(folder, lambda md: setattr(stored(md, "half"), "offset", 10**9))
    shutil.copy(folder / "__0_0.distcp", folder / "__7_0.distcp")
    code, report = run(capsys, folder, "--deep", "--against", QWEN3 / "moe")
    assert code == 1
    found = codes(report)
    assert found[:2] == ["dcp.beyond-file", "dcp.stray-file"]
    assert {"verify.missing", "verify.unknown", "verify.not-finite"} <= set(found)
    assert report["skipped"] == ["values and checksums of what cannot be read: half"]
    assert report["deep"]["tensors"] == report["tensors"] - 2  # half, and one without elements


def test_a_missing_file_hides_nothing_of_the_others(tmp_path, capsys):
    folder = tmp_path / "s"
    shutil.copytree(GOLDEN / "torch-2.13-4ranks", folder)
    (folder / "__3_0.distcp").unlink()
    (shard,) = read_manifest(GOLDEN / "torch-2.13-4ranks").tensors["step"].shards
    data = bytearray((folder / shard.file).read_bytes())
    data[data.index(torch.tensor(5.0).numpy().tobytes(), shard.byte_offset)] ^= 0xFF
    (folder / shard.file).write_bytes(data)
    edit(folder, lambda md: setattr(stored(md, "dataloader.dp_rank_0"), "length", 10**9))
    code, report = run(capsys, folder, "--deep")
    assert code == 1
    assert codes(report) == ["dcp.beyond-file", "dcp.file-missing", "checksum.differs"]
    assert "rows" in report["skipped"][0]


def test_damage_beside_a_missing_shard_is_found(tmp_path, capsys):
    """Of a tensor whose other shards are gone, the one that is there is read all the same."""
    folder = tmp_path / "s"
    shutil.copytree(GOLDEN / "torch-2.13-4ranks", folder)
    (folder / "__3_0.distcp").unlink()
    shards = read_manifest(GOLDEN / "torch-2.13-4ranks").tensors["rows"].shards
    assert len(shards) > 1
    shard = next(s for s in shards if s.file != "__3_0.distcp")
    data = bytearray((folder / shard.file).read_bytes())
    item = bytes(data[shard.byte_offset :][: shard.byte_length])
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        payload = next(archive.read(n) for n in archive.namelist() if n.endswith("/data/0"))
    data[shard.byte_offset + item.index(payload)] ^= 1
    (folder / shard.file).write_bytes(data)
    code, report = run(capsys, folder, "--deep")
    assert code == 1
    assert codes(report) == ["dcp.file-missing", "checksum.differs"]
    assert "rows" in report["problems"][1]["where"]
    assert "rows" in report["skipped"][0]


def test_stray_dcp_files_are_named(tmp_path, capsys):
    folder = torch_save(some_state(), tmp_path / "s")
    shutil.copy(folder / "__0_0.distcp", folder / "__7_0.distcp")
    code, report = run(capsys, folder)
    assert (code, codes(report)) == (1, ["dcp.stray-file"])
    assert "__7_0.distcp" in report["problems"][0]["actual"]


def test_unreadable_and_refused_are_3(tmp_path, capsys):
    folder = torch_save(some_state(), tmp_path / "s")
    whole = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedError):
        check_structure(folder)
    assert main(["verify", str(folder)]) == 3
    attack = Path(__file__).parents[2] / "fixtures/damaged/pickles/reduce-os-system.pkl"
    shutil.copy(attack, folder / ".metadata")
    assert main(["verify", str(folder), "--json"]) == 3
    out = json.loads(capsys.readouterr().out)
    assert out["error"] == "RefusedError"
    assert main(["verify", str(tmp_path / "nothing")]) == 3


def test_nothing_to_check_is_5(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    assert main(["verify", str(tmp_path)]) == 5


def test_usage_is_2(capsys):
    assert main(["verify", str(QWEN3 / "moe"), "--threads", "0"]) == 2
    assert main(["verify", str(QWEN3 / "moe"), "--against", "qwen9"]) == 2


# Completeness


def test_missing_unknown_and_misshapen_tensors_are_grouped(tmp_path, capsys):
    tensors = {}
    for file in (QWEN3 / "dense-untied").glob("*.safetensors"):
        tensors |= load_file(file)
    for layer in range(3):
        del tensors[f"model.layers.{layer}.self_attn.q_norm.weight"]
    tensors["model.layers.1.self_attn.q_norms.weight"] = torch.ones(20)
    tensors["model.norm.weight"] = torch.ones(57)
    save_file(tensors, tmp_path / "model.safetensors")
    code, report = run(capsys, tmp_path, "--against", QWEN3 / "dense-untied")
    assert code == 1
    assert codes(report) == ["verify.missing", "verify.unknown", "verify.shape"]
    missing = report["problems"][0]
    assert "model.layers.{0..2}.self_attn.q_norm.weight (3)" in missing["what"]
    assert "looks like model.layers.1.self_attn.q_norms.weight" in missing["actual"]
    assert report["problems"][2]["expected"] == "[48]"
    config = QWEN3 / "dense-untied" / "config.json"
    assert codes(run(capsys, tmp_path, "--against", config)[1]) == codes(report)
    assert codes(run(capsys, tmp_path, "--against", "qwen3", "--config", config)[1]) == codes(
        report
    )


def test_a_smaller_model_is_not_called_renamed(tmp_path, capsys):
    """What looks like a missing tensor has its shape and stands in its layer, or is another."""
    code, report = run(capsys, QWEN3 / "moe", "--against", "Qwen3-0.6B")
    assert code == 1
    missing, unknown, _ = report["problems"]
    assert "incomplete" in missing["cause"]
    assert missing["actual"] == unknown["actual"] == ""


def test_an_index_says_which_keys_there_must_be(tmp_path, capsys):
    tensors = {"model.norm.weight": torch.arange(5.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    index = QWEN3 / "moe" / "model.safetensors.index.json"
    code, report = run(capsys, tmp_path, "--against", index)
    assert (code, codes(report)) == (1, ["verify.missing"])
    assert report["against"] == {
        "name": "the index model.safetensors.index.json",
        "expected": 104,
        "matched": 1,
    }


@pytest.mark.parametrize("generation", ["titan", "npu"])
def test_native_names_of_either_generation_are_complete(tmp_path, capsys, generation):
    adapter = MappingAdapter(QWEN3 / "moe", generation=generation)
    entries = adapter.native_entries().items()
    state = {k: torch.randn(e.shape).to(getattr(torch, e.dtype)) for k, e in entries}
    state["optimizer.state.x.step"] = torch.tensor(1.0)
    folder = torch_save(state, tmp_path / "s")
    code, report = run(capsys, folder, "--against", QWEN3 / "moe")
    assert (code, codes(report)) == (0, [])
    gone = next(iter(state))
    del state[gone]
    folder = torch_save(state, tmp_path / "t")
    assert codes(run(capsys, folder, "--against", QWEN3 / "moe")[1]) == ["verify.missing"]


def test_a_family_without_sizes_is_a_usage_error(tmp_path, capsys):
    save_file({"model.norm.weight": torch.ones(5)}, tmp_path / "model.safetensors")
    assert main(["verify", str(tmp_path), "--against", "qwen3"]) == 2
    assert "alone has no sizes" in capsys.readouterr().err


# Deep


@pytest.mark.parametrize("size", [9, 200_000])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("form", ["dcp", "hf", "pt"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_found_with_their_place(tmp_path, capsys, size, place, form, bad):
    values = torch.randn(size, 3)
    values.view(-1)[place] = bad
    state = {"a": torch.randn(7, 5), "w": values}
    path = tmp_path / "c"
    if form == "dcp":
        torch_save(state, path)
    elif form == "hf":
        path.mkdir()
        save_file(state, path / "model.safetensors")
    else:
        path = tmp_path / "c.pt"
        torch.save(state, path)
    code, report = run(capsys, path, "--deep")
    assert (code, codes(report)) == (1, ["verify.not-finite"])
    at = [0, 0] if place == 0 else [size - 1, 2]
    assert report["problems"][0]["where"].endswith(f"w, at {at}")
    assert report["problems"][0]["actual"] == ("1 NaN, 0 Inf" if bad != bad else "0 NaN, 1 Inf")


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_floating_dtype_is_known(tmp_path, dtype):
    values = torch.linspace(-4, 4, 40).to(dtype).reshape(8, 5)
    folder = torch_save({"w": values}, tmp_path / "good")
    assert judge(read_manifest(folder), read_deep(read_manifest(folder)).values) == ([], [])
    values = values.clone()
    values[6, 2] = float("nan")
    folder = torch_save({"w": values}, tmp_path / "bad")
    problems, _ = judge(read_manifest(folder), read_deep(read_manifest(folder)).values)
    assert [p.code for p in problems] == ["verify.not-finite"]
    assert problems[0].where.endswith("[6, 2]")


def test_all_patterns_of_small_floats_are_judged_as_torch_judges_them():
    from torchtitan_ckpt.scan import Values

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16):
        words = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
        kind = torch.uint8 if dtype.itemsize == 1 else torch.uint16
        raw = words.to(kind)
        wide = raw.view(dtype).float()
        seen = Values(str(dtype)[6:])
        seen.add(memoryview(raw.numpy()).cast("B"))
        assert seen.nans == int(wide.isnan().sum()), dtype
        assert seen.infs == int(wide.isinf().sum()), dtype
        assert seen.first_bad == int((~wide.isfinite()).nonzero()[0]), dtype


def test_constant_weights_are_findings_and_constant_vectors_are_notes(tmp_path, capsys):
    state = {
        "layers.0.w": torch.zeros(6, 7),
        "layers.1.w": torch.full((300, 1001), 0.5),
        "layers.2.w": torch.randn(6, 7),
        "norm.weight": torch.ones(9),
        "bias": torch.zeros(9),
        "optimizer.state.w.exp_avg": torch.zeros(6, 7),
        "one": torch.zeros(1, 1),
    }
    code, report = run(capsys, torch_save(state, tmp_path / "s"), "--deep")
    assert (code, codes(report)) == (1, ["verify.constant"])
    assert "layers.{0..1}.w (2)" in report["problems"][0]["what"]
    assert "every element is 1: norm.weight" in report["notes"]
    assert "every element is 0: bias, optimizer.state.w.exp_avg" in report["notes"]


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("key", ["half", "big", "train_state.note"])
def test_one_flipped_bit_of_a_dcp_is_found(tmp_path, capsys, checksums, key):
    state = some_state() | {"big": torch.randn(700, 301), "train_state.note": "x" * 500}
    folder = tmp_path / "s"
    dcp.save(state, folder, checksums=checksums)
    assert run(capsys, folder, "--deep")[0] == 0
    manifest = read_manifest(folder)
    entry = manifest.tensors[key].shards[0] if key in manifest.tensors else manifest.objects[key]
    path = folder / entry.file
    data = bytearray(path.read_bytes())
    value = state[key]
    data[data.index(value.encode() if isinstance(value, str) else bits(value)) + 40] ^= 0x10
    path.write_bytes(data)
    code, report = run(capsys, folder, "--deep")
    assert code == 1
    found = {"checksum.differs"} if checksums or key != "train_state.note" else {"zip.damaged"}
    assert found <= set(codes(report))


def test_a_flipped_bit_of_the_metadata_is_found_by_its_checksum(tmp_path, capsys):
    folder = tmp_path / "s"
    dcp.save({"layers.0.w": torch.randn(5, 3)}, folder, checksums=True)
    raw = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(raw + b"\0")
    code, report = run(capsys, folder, "--deep")
    assert code == 1
    assert "checksum.size" in codes(report)


def test_a_flipped_bit_of_a_torch_file_is_found(tmp_path, capsys):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.randn(500, 301)}, path)
    assert run(capsys, path, "--deep")[0] == 0
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert codes(run(capsys, path, "--deep")[1]) == ["checksum.differs"]


def test_bytes_behind_the_items_are_found_by_the_checksums(tmp_path, capsys):
    folder = tmp_path / "s"
    dcp.save({"layers.0.w": torch.randn(5, 3)}, folder, checksums=True)
    with (folder / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    assert codes(run(capsys, folder, "--deep")[1]) == ["checksum.size"]


def test_parts_of_other_constants_are_no_constant():
    from torchtitan_ckpt.scan import Values

    total = Values("float32")
    for value in (2.0, 3.0):
        part = Values("float32")
        part.add(memoryview(torch.full((4,), value).numpy()).cast("B"))
        assert part.constant
        total.merge(part)
    assert not total.constant
    assert total.count == 8


def test_a_storage_that_two_tensors_share_is_read_once(tmp_path):
    whole = torch.randn(40, 9)
    torch.save({"a": whole, "b": whole[3:7], "c": whole}, tmp_path / "x.pt")
    deep = read_deep(read_manifest(tmp_path / "x.pt"))
    assert deep.bytes_read == 40 * 9 * 4
    assert deep.problems == []


def test_places_are_right_in_every_stretch(tmp_path, monkeypatch):
    import torchtitan_ckpt.verify.deep as module

    monkeypatch.setattr(module, "_STRETCH", 2**20)
    values = torch.ones(1000, 1001)
    values[999, 5] = float("nan")
    save_file({"w": values}, tmp_path / "model.safetensors")
    manifest = read_manifest(tmp_path)
    assert read_deep(manifest).values["w"].first_bad == 999 * 1001 + 5


def test_statistics_only_with_stats(tmp_path, capsys):
    folder = torch_save({"layers.0.w": torch.randn(50, 30)}, tmp_path / "s")
    assert "stats" not in run(capsys, folder, "--deep")[1]["deep"]
    stats = run(capsys, folder, "--stats")[1]["deep"]["stats"]["layers.0.w"]
    assert sum(stats["exponents"].values()) == 1500
    assert main(["verify", str(folder), "--stats"]) == 0
    assert "powers of two" in capsys.readouterr().out


def test_more_threads_find_the_same(tmp_path):
    folder = torch_save(some_state() | {"big": torch.randn(900, 1001)}, tmp_path / "s")
    manifest = read_manifest(folder)
    one, four = (read_deep(manifest, threads=n) for n in (1, 4))
    for key, seen in one.values.items():
        other = four.values[key]
        assert (seen.count, seen.varied) == (other.count, other.varied), key
        assert seen.varied or seen.pattern == other.pattern
    assert one.bytes_read == four.bytes_read
    assert set(one.values) == {k for k, e in manifest.tensors.items() if e.numel}
