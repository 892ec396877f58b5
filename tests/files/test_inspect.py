"""The verb `inspect`: what it says of each format, of one tensor, of a folder of steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.files.dcp_lab import GOLDEN, some_state, torch_save
from tests.files.toy import Job
from torchtitan_ckpt.cli import main
from torchtitan_ckpt.guess import guess_family
from torchtitan_ckpt.inspection import inspect
from torchtitan_ckpt.scan import Stats, Values
from torchtitan_ckpt.tensor_look import look_at_tensor

QWEN3 = Path(__file__).parents[2] / "fixtures" / "qwen3"


def said(capsys, *words) -> str:
    assert main([str(w) for w in words]) == 0
    return capsys.readouterr().out


def test_a_dcp_is_shown_with_its_groups_shards_files_and_states(capsys):
    out = said(capsys, "inspect", GOLDEN / "torch-2.13-4ranks")
    assert "not hf       it has no .safetensors file and no index" in out
    assert "states       dataloader, model, train_state" in out
    assert "step         5" in out
    row = next(line for line in out.splitlines() if line.startswith("rows "))
    assert row.split() == ["rows", "1", "float32", "[10,", "3]", "120", "B", "4", "4"]
    assert "split        4 files of" in out
    below = out.partition("tensors   ")[2].partition("objects        ")[2]
    assert "  dataloader.dp_rank_0" in below


def test_keys_are_grouped_by_number_shape_and_dtype(tmp_path):
    found = inspect(str(torch_save(some_state(), tmp_path / "step-12")))
    groups = {(g.name, g.shape): g.count for g in found.groups}
    assert groups["layers.{0,3,6,9}.w", (5, 7)] == 4
    assert groups["half", (9, 4)] == 1
    assert found.step == "12 by its name, 3 by its train_state"


def test_hugging_face_folders_name_their_family_by_config_or_by_keys(tmp_path, capsys):
    out = said(capsys, "inspect", QWEN3 / "moe")
    assert "family       qwen3_moe, by its config.json" in out
    assert "model.layers.{0,2}.mlp.experts.{0..11}.down_proj.weight" in out
    for name in ("dense-tied", "moe"):
        bare = tmp_path / "bare" / name
        shutil.copytree(QWEN3 / name, bare)
        (bare / "config.json").unlink()
        family = "qwen3_moe" if name == "moe" else "qwen3"
        assert inspect(str(bare)).family.startswith(f"probably {family}, Hugging Face names")


def test_a_guess_tells_families_and_generations_apart():
    from torchtitan_ckpt import families
    from torchtitan_ckpt.mapping.keys import hf_entries, native_entries

    tiny = json.loads((Path(QWEN3).parent / "published" / "tiny_configs.json").read_text())
    seen = set()
    for config in tiny.values():
        family = families.of_config(config)
        mapping = family.mapping(config, family.generations[0])
        assert guess_family(hf_entries(mapping)).family == family.name
        guess = guess_family(native_entries(mapping))
        assert guess.family == family.name or family.name.startswith(guess.family[:8])
        seen.add(family.name)
    assert len(seen) >= 5
    assert guess_family(["some.weight", "other.bias"]) is None


def test_json_has_everything(capsys):
    out = json.loads(said(capsys, "inspect", QWEN3 / "dense-tied", "--json", "--all"))
    assert out["format"] == "hf"
    assert out["tensors"] == 46
    assert len(out["keys"]) == 46
    assert out["keys"]["model.norm.weight"]["shape"] == [56]
    assert {g["name"] for g in out["groups"]} >= {"model.layers.{0..3}.mlp.up_proj.weight"}


def test_a_tree_has_a_branch_for_a_range_of_layers(capsys):
    lines = said(capsys, "inspect", QWEN3 / "dense-tied", "--tree").splitlines()
    assert any(line.endswith("{0..3}") for line in lines)
    assert any("weight  bfloat16 [88, 56] x 4" in line for line in lines)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16])
def test_a_tensor_is_shown_with_statistics_and_a_corner(tmp_path, capsys, dtype):
    values = (torch.arange(15 * 11).reshape(15, 11) % 23 - 9).to(dtype)
    save_file({"w": values}, tmp_path / "model.safetensors")
    out = json.loads(said(capsys, "inspect", tmp_path, "--tensor", "w", "--json"))
    wide = values.to(torch.float64)
    assert out["corner"] == wide[:4, :6].tolist()
    assert out["zeros"] == int((wide == 0).sum())
    assert out["mean"] == pytest.approx(float(wide.mean()))
    assert out["std"] == pytest.approx(float(wide.std(correction=0)))
    assert (out["min"], out["max"]) == (float(wide.min()), float(wide.max()))


def test_statistics_count_denormals_nan_inf_and_powers_of_two():
    values = torch.tensor([1.0, -3.0, 1e-40, 0.0, -0.0, float("nan"), float("-inf"), float("inf")])
    seen = Values("float32", stats=Stats())
    seen.add(memoryview(values.numpy()).cast("B"))
    assert (seen.nans, seen.infs, seen.first_bad) == (1, 2, 5)
    assert (seen.stats.zeros, seen.stats.denormals) == (2, 1)
    assert seen.stats.exponents == {0: 1, 1: 1}


def test_the_first_bad_value_is_placed_beyond_the_first_window(tmp_path, capsys, monkeypatch):
    import torchtitan_ckpt.tensor_look as look

    monkeypatch.setattr(look, "WINDOW", 256)
    values = torch.ones(50, 7)
    values[41, 3] = values[44, 0] = float("inf")
    save_file({"w": values}, tmp_path / "model.safetensors")
    out = json.loads(said(capsys, "inspect", tmp_path, "--tensor", "w", "--json"))
    assert (out["first_bad"], out["inf"]) == ([41, 3], 2)
    text = said(capsys, "inspect", tmp_path, "--tensor", "w")
    assert "the first NaN or Inf at [41, 3]" in text
    assert "max 1 of finite elements" in text


def test_the_guess_does_not_depend_on_the_order_of_the_families(monkeypatch):
    from torchtitan_ckpt import families
    from torchtitan_ckpt.mapping.keys import hf_entries

    tiny = json.loads((Path(QWEN3).parent / "published" / "tiny_configs.json").read_text())
    backwards = tuple(reversed(families.names()))
    keys = {}
    for config in tiny.values():
        family = families.of_config(config)
        keys[family.name] = list(hf_entries(family.mapping(config, family.generations[0])))
    monkeypatch.setattr(families, "names", lambda: backwards)
    assert {name: guess_family(row).family for name, row in keys.items()} == {n: n for n in keys}


def test_a_sharded_tensor_is_read_across_files():
    whole = look_at_tensor(str(GOLDEN / "torch-2.13-4ranks"), "columns")
    assert len(whole.shards) == 3
    assert whole.values.count == 36


def test_a_tensor_that_is_not_there_is_named_with_the_nearest(capsys):
    assert main(["inspect", str(QWEN3 / "moe"), "--tensor", "model.norm.weights"]) == 3
    assert "nearest: model.norm.weight" in capsys.readouterr().err


def test_a_folder_of_steps_shows_each_kind(tmp_path, capsys):
    torch_save(some_state(), tmp_path / "step-100")
    torch_save({"w": torch.ones(3)}, tmp_path / "step-50")
    shutil.copytree(QWEN3 / "dense-tied", tmp_path / "step-200")
    (tmp_path / "step-300").mkdir()
    out = said(capsys, "inspect", tmp_path)
    lines = [line.split()[:2] for line in out.splitlines() if line.startswith("  step-")]
    assert [line[0] for line in lines] == ["step-300", "step-200", "step-100", "step-50"]
    assert "step-300      no complete checkpoint" in out
    assert "step-200      Hugging Face weights" in out
    assert "step-100      a full, resumable checkpoint" in out
    assert "step-50       the model only (DCP)" in out
    rows = json.loads(said(capsys, "inspect", tmp_path, "--json"))["steps"]
    assert [row["kind"] for row in rows] == ["broken", "hf", "full", "model-only"]


def test_a_torch_file_is_shown(tmp_path, capsys):
    torch.save({"model": {"w": torch.ones(3, 4)}, "step": 7}, tmp_path / "all.pt")
    out = said(capsys, "inspect", tmp_path / "all.pt")
    assert "a torch.save archive" in out
    assert "model.w" in out


def bytes_read(work):
    """What this process asked the kernel for while `work` ran, by whatever call."""

    def count():
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))

    work()  # modules that are read on first use
    start = count()
    work()
    return count() - start


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel counts, on Linux")
@pytest.mark.parametrize("form", ["dcp", "hf", "pt"])
def test_the_kernel_sees_no_byte_read_that_is_not_shown(tmp_path, capsys, form):
    state = {f"layers.{i}.w": torch.full((500, 701), i + 0.5) for i in range(11)}
    path = tmp_path / {"dcp": "s", "hf": "m.safetensors", "pt": "m.pt"}[form]
    {"dcp": torch_save, "hf": save_file, "pt": torch.save}[form](state, path)
    assert bytes_read(lambda: said(capsys, "inspect", path, "--json")) < 100_000
    words = ("inspect", path, "--tensor", "layers.7.w", "--json")
    wanted = state["layers.7.w"].nbytes
    assert wanted < bytes_read(lambda: said(capsys, *words)) < wanted + 100_000
    assert json.loads(said(capsys, *words))["mean"] == 7.5


def test_what_is_no_checkpoint_exits_3_with_the_reasons(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("x")
    assert main(["inspect", str(tmp_path)]) == 3
    assert "it has no .metadata" in capsys.readouterr().err


def test_tensors_come_first_and_hyperparameters_are_one_group_each(tmp_path, capsys):
    with Job(tmp_path) as job:
        job.train(2)
    out = said(capsys, "inspect", tmp_path / "checkpoint" / "step-2")
    head, _, objects = out.partition("objects        326\n")
    assert "layers.{0..11}.weight" in head
    assert "optimizer.param_groups" not in head
    rows = objects.splitlines()
    assert rows[0] == "  optimizer.param_groups.*.lr (29)"
    assert rows[11:14] == [
        "  lr_scheduler.last_epoch",
        "  dataloader.dp_rank_0",
        "  dataloader.world_size",
    ]


def damage_dcp(folder, how):
    torch_save(some_state(), folder)
    data, marker = folder / "__0_0.distcp", folder / ".metadata"
    match how:
        case "file missing":
            data.unlink()
        case "file cut":
            data.write_bytes(data.read_bytes()[:1000])
        case "metadata cut":
            marker.write_bytes(marker.read_bytes()[:100])
        case "metadata missing":
            marker.unlink()


def damage_hf(folder, how):
    shutil.copytree(QWEN3 / "moe", folder)
    shard, index = min(folder.glob("*.safetensors")), folder / "model.safetensors.index.json"
    match how:
        case "file missing":
            shard.unlink()
        case "file cut":
            shard.write_bytes(shard.read_bytes()[:-5])
        case "metadata cut":
            index.write_text(index.read_text()[:100])
        case "metadata missing":
            index.unlink()


@pytest.mark.parametrize("damage", [damage_dcp, damage_hf])
@pytest.mark.parametrize("how", ["file missing", "file cut", "metadata cut", "metadata missing"])
def test_damage_has_the_exit_code_and_the_findings_that_verify_gives_it(
    tmp_path, capsys, damage, how
):
    folder = tmp_path / "step-3"
    damage(folder, how)
    codes, found = [], []
    for verb in ("inspect", "verify"):
        codes.append(main([verb, str(folder), "--json"]))
        found.append(
            {problem["code"] for problem in json.loads(capsys.readouterr().out)["problems"]}
        )
    assert codes[0] == codes[1]
    assert found[0] == found[1] != set()
    assert codes[0] == (1 if how.startswith("file") else 3)
