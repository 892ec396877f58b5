"""The verb `diff`: formats, dtypes, splits, names, and the causes of what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.files.dcp_lab import some_state, torch_save
from torchtitan_ckpt.adapter import MappingAdapter
from torchtitan_ckpt.cli import main
from torchtitan_ckpt.diff import Options, diff

QWEN3 = Path(__file__).parents[2] / "fixtures" / "qwen3"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        out |= load_file(file)
    return out


def hf(path: Path, state: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file({k: v.contiguous() for k, v in state.items()}, path / "model.safetensors")
    return path


def run(capsys, *words):
    code = main(["diff", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def counts(report):
    return {k: v for k, v in report["counts"].items() if v}


def group(report, verdict):
    (found,) = [g for g in report["groups"] if g["verdict"] == verdict]
    return found


def pair(tmp_path, a, b):
    return hf(tmp_path / "a", a), hf(tmp_path / "b", b)


# Equal


def test_the_same_in_three_formats_is_equal(tmp_path, capsys):
    state = {k: v for k, v in some_state().items() if isinstance(v, torch.Tensor)}
    paths = [torch_save(state, tmp_path / "dcp"), hf(tmp_path / "hf", state), tmp_path / "x.pt"]
    torch.save(state, paths[2])
    for a in paths:
        for b in paths:
            code, report = run(capsys, a, b)
            assert (code, counts(report)) == (0, {"equal": len(state)}), (a, b)


def test_objects_and_optimizer_states_take_part(tmp_path, capsys):
    state = some_state() | {"optimizer.state.w.exp_avg": torch.ones(5, 3)}
    a = torch_save(state, tmp_path / "a")
    b = torch_save(state, tmp_path / "b")
    code, report = run(capsys, a, b)
    assert (code, counts(report)) == (0, {"equal": len(state)})
    state["train_state.step"] = 4
    state["optimizer.state.w.exp_avg"][2, 1] = 5
    c = torch_save(state, tmp_path / "c")
    code, report = run(capsys, a, c)
    assert (code, counts(report)["different"]) == (1, 2)
    assert "a 3; b 4" in main_text(capsys, a, c)
    assert run(capsys, a, c, "--only", "model")[0] == 0
    code, report = run(capsys, a, c, "--only", "optimizer")
    assert (code, counts(report)) == (1, {"different": 1})


def main_text(capsys, *words):
    main(["diff", *map(str, words)])
    return capsys.readouterr().out


def test_nan_of_the_same_bits_is_equal_and_zeros_of_other_signs_are_not(tmp_path, capsys):
    values = torch.tensor([[1.0, float("nan")], [0.0, float("inf")]])
    a, b = pair(tmp_path, {"w": values}, {"w": values.clone()})
    assert run(capsys, a, b)[0] == 0
    values[1, 0] = -0.0
    c = hf(tmp_path / "c", {"w": values})
    code, report = run(capsys, a, c)
    assert (code, counts(report)) == (1, {"close": 1})
    assert group(report, "close")["first"]["bits_b"] == "0x80000000"


# Different


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("rows", [13, 3001])
def test_first_and_worst_place_with_values_and_bits(tmp_path, capsys, dtype, rows):
    a = (torch.arange(rows * 1009) % 97).reshape(rows, 1009).to(dtype)
    b = a.clone()
    b[3, 7] += 2
    b[rows - 1, 1008] += 64
    code, report = run(capsys, *pair(tmp_path, {"w": a}, {"w": b}), "--window" if 0 else "--ulps=0")
    assert code == 1
    found = group(report, "different")
    assert found["differing"] == 2
    assert found["max_abs"] == 64
    assert (found["first"]["at"], found["worst"]["at"]) == ([3, 7], [rows - 1, 1008])
    assert float(found["first"]["a"]) == float(a[3, 7])
    assert float(found["worst"]["b"]) == float(b[rows - 1, 1008])
    raw = b[3, 7].reshape(1).view(torch.uint8).numpy().tobytes()[::-1].hex()
    assert found["first"]["bits_b"] == "0x" + raw


def test_ulps_and_tolerance(tmp_path, capsys):
    a = torch.linspace(1, 2, 77).reshape(7, 11)
    b = (a.view(torch.int32) + 3).view(torch.float32)
    a_path, b_path = pair(tmp_path, {"w": a}, {"w": b})
    code, report = run(capsys, a_path, b_path)
    assert (code, counts(report)) == (1, {"close": 1})
    assert group(report, "close")["max_ulps"] == 3
    assert counts(run(capsys, a_path, b_path, "--ulps", "3")[1]) == {"close": 1}
    assert run(capsys, a_path, b_path, "--accept", "close")[0] == 0
    assert run(capsys, a_path, b_path, "--accept", "dtype")[0] == 1
    assert counts(run(capsys, a_path, b_path, "--ulps", "2")[1]) == {"different": 1}
    assert counts(run(capsys, a_path, b_path, "--ulps", "2", "--atol", "1e-5")[1]) == {"close": 1}


def test_ulps_are_counted_across_zero(tmp_path, capsys):
    tiny = torch.tensor([1, 2**31 + 1, 5], dtype=torch.int64).to(torch.uint32).view(torch.float32)
    other = torch.tensor([2**31 + 1, 1, 5], dtype=torch.int64).to(torch.uint32).view(torch.float32)
    _, report = run(capsys, *pair(tmp_path, {"w": tiny}, {"w": other}))
    assert group(report, "close")["max_ulps"] == 2


def test_one_nan_is_different_however_wide_the_tolerance(tmp_path, capsys):
    b = torch.ones(4, 3)
    b[2, 1] = float("nan")
    paths = pair(tmp_path, {"w": torch.ones(4, 3)}, {"w": b})
    code, report = run(capsys, *paths, "--atol", "1e30")
    assert (code, group(report, "different")["first"]["at"]) == (1, [2, 1])
    b[0, 2] = 1e20
    (tmp_path / "more").mkdir()
    found = group(run(capsys, *pair(tmp_path / "more", {"w": b}, {"w": b * 0 + 1}))[1], "different")
    assert (found["first"]["at"], found["worst"]["at"]) == ([0, 2], [0, 2])
    clean = torch.where(b.isnan(), 1, b)
    (tmp_path / "last").mkdir()
    found = group(run(capsys, *pair(tmp_path / "last", {"w": b}, {"w": clean * 2}))[1], "different")
    assert (found["first"]["at"], found["worst"]["at"]) == ([0, 0], [2, 1])
    assert found["worst"]["apart"] is None
    text = main_text(capsys, *paths)
    assert "1 of 12 elements (8.333%), at most 0 apart; 1 NaN on one side only" in text
    assert "first w [2, 1]: a 1 0x3f800000, b nan 0x7fc00000" in text


def test_keys_of_one_side_are_grouped(tmp_path, capsys):
    state = {f"layers.{i}.w": torch.randn(3, 5) for i in range(12)}
    a, b = pair(tmp_path, state, {k: v for k, v in state.items() if "layers.1" not in k})
    code, report = run(capsys, a, b)
    assert code == 1
    assert len(report["only_a"]) == 3
    assert "only in a: layers.{1,10,11}.w (3)" in main_text(capsys, a, b)
    assert "only in b: layers.{1,10,11}.w (3)" in main_text(capsys, b, a)


def test_a_state_that_one_side_lacks_is_said_once(tmp_path, capsys):
    state = {"w": torch.ones(3), "optimizer.state.w.exp_avg": torch.ones(3)}
    state |= {f"optimizer.param_groups.{n}.lr": 0.1 for n in "abc"} | {"train_state.step": 3}
    a = torch_save(state, tmp_path / "a")
    b = torch_save({"w": state["w"], "train_state.step": 3}, tmp_path / "b")
    text = main_text(capsys, a, b)
    assert "only in a: all of optimizer (4)" in text
    assert "param_groups" not in text
    # Where both have some of a state, the keys are told.
    c = torch_save({"w": state["w"], "optimizer.param_groups.a.lr": 0.1}, tmp_path / "c")
    assert "only in a: optimizer.state.w.exp_avg" in main_text(capsys, a, c)


def test_shapes_differ(tmp_path, capsys):
    grown = torch.randn(9, 4)
    a, b = pair(tmp_path, {"w": grown[:7].clone()}, {"w": grown})
    code, report = run(capsys, a, b)
    assert (code, counts(report)) == (1, {"shape": 1})
    assert "padded vocabulary" in group(report, "shape")["causes"][0]


# Dtypes


def test_dtype_only_says_whether_values_were_rounded(tmp_path, capsys):
    fine = torch.randn(31, 17)
    a = hf(tmp_path / "a", {"w": fine})
    b = hf(tmp_path / "b", {"w": fine.bfloat16()})
    c = hf(tmp_path / "c", {"w": fine.bfloat16().float()})
    code, report = run(capsys, a, b)
    assert (code, counts(report), group(report, "dtype")["exact"]) == (1, {"dtype": 1}, False)
    assert run(capsys, a, b, "--accept", "dtype")[0] == 0
    assert group(run(capsys, b, c)[1], "dtype")["exact"] is True
    code, report = run(capsys, a, c)
    assert group(report, "different")["causes"] == ["b is a rounded to bfloat16 and widened again"]
    assert group(run(capsys, c, a)[1], "different")["causes"] == [
        "a is b rounded to bfloat16 and widened again"
    ]


def test_an_error_of_a_cast_is_not_dtype_only(tmp_path, capsys):
    fine = torch.randn(31, 17)
    coarse = fine.bfloat16()
    coarse[30, 4] *= 2
    code, report = run(capsys, *pair(tmp_path, {"w": fine}, {"w": coarse}), "--accept", "dtype")
    assert (code, counts(report)) == (1, {"different": 1})
    assert group(report, "different")["first"]["at"] == [30, 4]
    assert group(report, "different")["differing"] == 1


# Names


@pytest.mark.parametrize("name", ["dense-tied", "dense-untied", "moe"])
@pytest.mark.parametrize("generation", ["titan", "npu"])
def test_dcp_against_hugging_face_through_the_family(tmp_path, capsys, name, generation):
    adapter = MappingAdapter(QWEN3 / name, generation=generation)
    native = {k: v.float() for k, v in adapter.from_hf(weights(QWEN3 / name)).items()}
    native["optimizer.state.x.step"] = torch.tensor(1.0)
    folder = torch_save(native, tmp_path / "step-5")
    code, report = run(capsys, folder, QWEN3 / name, "--accept", "dtype")
    assert code == 0
    assert set(counts(report)) <= {"dtype", "equal"}
    assert sum(counts(report).values()) == len(weights(QWEN3 / name))
    stored = {v.dtype for v in weights(QWEN3 / name).values()}
    assert ("dtype" in counts(report)) == (torch.bfloat16 in stored)
    assert any("optimizer (1 entries)" in line for line in report["left_out"])
    assert run(capsys, QWEN3 / name, folder, "--accept", "dtype")[0] == 0

    key = next(k for k in native if k.endswith("wo.weight"))
    native[key] = native[key].clone()
    native[key][2, 5] += 1
    other = torch_save(native, tmp_path / "step-6")
    for words in ((other, QWEN3 / name), (QWEN3 / name, other)):
        code, report = run(capsys, *words, "--accept", "dtype")
        assert code == 1
        found = group(report, "different")
        assert found["name"].endswith("self_attn.o_proj.weight")
        assert found["first"]["at"] == [2, 5]
        hf_side = "b" if words[0] == other else "a"
        real = weights(QWEN3 / name)[found["name"]][2, 5]
        assert float(found["first"][hf_side]) == pytest.approx(float(real))


def test_a_tied_copy_that_differs_and_keys_of_one_side_are_seen_both_ways(tmp_path, capsys):
    source = QWEN3 / "dense-tied"
    native = MappingAdapter(source).from_hf(weights(source))
    folder = torch_save(native | {"stranger": torch.ones(3)}, tmp_path / "s")
    state = weights(source)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][7, 3] = 9.0
    del state["model.norm.weight"]
    exported = hf(tmp_path / "hf", state)
    for words, lacks in (((folder, exported), "only_a"), ((exported, folder), "only_b")):
        code, report = run(capsys, *words, "--config", source)
        assert code == 1
        found = group(report, "different")
        assert (found["name"], found["first"]["at"]) == ("lm_head.weight", [7, 3])
        assert sorted(report[lacks]) == ["model.norm.weight", "stranger"]
        assert report["only_b" if lacks == "only_a" else "only_a"] == []


def test_generations_of_native_names_against_each_other(tmp_path, capsys):
    steps = []
    for generation in ("titan", "npu"):
        adapter = MappingAdapter(QWEN3 / "moe", generation=generation)
        native = adapter.from_hf(weights(QWEN3 / "moe"))
        steps.append(torch_save(native, tmp_path / generation))
    code, report = run(capsys, *steps, "--config", QWEN3 / "moe")
    assert (code, set(counts(report))) == (0, {"equal"})
    assert "->" in report["route"]
    assert main(["diff", *map(str, steps)]) == 2
    assert "--config" in capsys.readouterr().err


def factory():
    return MappingAdapter(QWEN3 / "moe")


def test_an_adapter_instead_of_a_family(tmp_path, capsys):
    native = factory().from_hf(weights(QWEN3 / "moe"))
    folder = torch_save(native, tmp_path / "a")
    words = ("--adapter", "tests.files.test_diff:factory")
    code, report = run(capsys, folder, QWEN3 / "moe", *words)
    assert (code, counts(report)) == (0, {"equal": len(weights(QWEN3 / "moe"))})
    native["norm.weight"] = native["norm.weight"] * 2
    folder = torch_save(native, tmp_path / "b")
    code, report = run(capsys, QWEN3 / "moe", folder, *words)
    assert (code, counts(report)["different"]) == (1, 1)
    first = group(report, "different")["first"]
    assert float(first["b"]) == 2 * float(first["a"])
    assert float(first["a"]) == float(weights(QWEN3 / "moe")["model.norm.weight"][0])


# Causes


def test_a_cause_found_through_a_family_names_the_right_sides(tmp_path, capsys):
    native = factory().from_hf(weights(QWEN3 / "moe"))
    key = next(k for k in native if k.endswith("wq.weight"))
    native[key] = rope(native[key], native[key].shape[0] // 18)
    folder = torch_save(native, tmp_path / "s")
    there = group(run(capsys, folder, QWEN3 / "moe")[1], "different")["causes"][0]
    back = group(run(capsys, QWEN3 / "moe", folder)[1], "different")["causes"][0]
    assert there.endswith("(heads of 18): a is interleaved, b has halves")
    assert back.endswith("(heads of 18): a has halves, b has them interleaved")


def rope(w, heads):
    return w.view(heads, 2, -1, w.shape[1]).transpose(1, 2).reshape(w.shape)


CAUSES = {
    "halves": (lambda w: w.roll(w.shape[0] // 2, 0), "the two halves are exchanged"),
    "rope": (lambda w: rope(w, 4), "the rotary permutation (heads of 12): a has halves"),
    "columns": (lambda w: w.flip(1), "columns are in another order: reversed"),
    "moved": (lambda w: w.roll(-5, 0), "rows are in another order: moved by 5"),
    "two rows": (
        lambda w: w[[0, 1, 9, 3, 4, 5, 6, 7, 8, 2, *range(10, 48)]],
        "row 2 and row 9 are exchanged",
    ),
    "text": (
        lambda w: w[sorted(range(48), key=str)],
        "sorted as text",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_orders_of_rows_and_columns_are_named(tmp_path, capsys, name):
    change, words = CAUSES[name]
    w = torch.randn(48, 31)
    report = run(capsys, *pair(tmp_path, {"w": w}, {"w": change(w)}))[1]
    assert words in group(report, "different")["causes"][0]


def test_a_rotary_part_of_a_head_and_the_way_back(tmp_path, capsys):
    w = torch.randn(3, 16, 31)
    b = w.clone()
    b[:, 10:16] = w[:, 10:16].view(3, 3, 2, 31).transpose(1, 2).reshape(3, 6, 31)
    paths = pair(tmp_path, {"w": w.view(48, 31)}, {"w": b.view(48, 31)})
    cause = group(run(capsys, *paths)[1], "different")["causes"][0]
    assert "a is interleaved, b has halves" in cause
    assert "heads of 16, 6 of them from 10" in cause


@pytest.mark.parametrize("shape", [(21, 21), (21, 34), (11, 21, 21), (11, 21, 34)])
def test_a_transpose_is_named(tmp_path, capsys, shape):
    w = torch.randn(shape)
    report = run(capsys, *pair(tmp_path, {"w": w}, {"w": w.transpose(-1, -2)}))[1]
    verdict = "different" if shape[-1] == shape[-2] else "shape"
    assert group(report, verdict)["causes"] == ["the last two dimensions are transposed"]


def test_experts_in_another_order(tmp_path, capsys):
    w = torch.randn(12, 5, 7)
    order = sorted(range(12), key=str)
    report = run(capsys, *pair(tmp_path, {"w": w}, {"w": w[order]}))[1]
    assert (
        "the first dimension is in another order: sorted as text"
        in (group(report, "different")["causes"][0])
    )


def test_exchanged_tensors_are_named_each(tmp_path, capsys):
    state = {f"layers.{i}.{n}": torch.randn(13, 9) for i in range(3) for n in ("w1", "w3")}
    other = dict(state)
    other["layers.1.w1"], other["layers.1.w3"] = state["layers.1.w3"], state["layers.1.w1"]
    report = run(capsys, *pair(tmp_path, state, other))[1]
    causes = {g["name"]: g["causes"] for g in report["groups"] if g["verdict"] == "different"}
    assert causes == {
        "layers.1.w1": ["it is a's layers.1.w3"],
        "layers.1.w3": ["it is a's layers.1.w1"],
    }


def test_noise_has_no_cause_and_causes_can_be_left_out(tmp_path, capsys):
    paths = pair(tmp_path, {"w": torch.randn(9, 7)}, {"w": torch.randn(9, 7)})
    assert group(run(capsys, *paths)[1], "different")["causes"] == []
    w = torch.randn(48, 31)
    (tmp_path / "x").mkdir()
    paths = pair(tmp_path / "x", {"w": w}, {"w": w.flip(0)})
    assert group(run(capsys, *paths)[1], "different")["causes"]
    assert group(run(capsys, *paths, "--no-causes")[1], "different")["causes"] == []


def test_windows_change_nothing(tmp_path):
    w = torch.randn(90, 33)
    b = w[:, [*range(1, 33), 0]].clone()
    b[88, 3] = 7
    paths = pair(tmp_path, {"w": w, "v": w.clone()}, {"w": b, "v": w.roll(3, 0)})
    reports = []
    for window, threads in ((2**21, 1), (1000, 1), (1000, 4)):
        out = diff(Options(a=str(paths[0]), b=str(paths[1]), window=window, threads=threads))
        reports.append(out.groups)
    assert reports[0] == reports[1] == reports[2]
    assert reports[0][0].worst is not None


def test_another_shape_of_the_same_elements_is_named_in_any_window(tmp_path):
    w = torch.randn(60, 40)
    paths = pair(tmp_path, {"w": w}, {"w": w.reshape(80, 30)})
    for window in (2**21, 1300):
        (found,) = diff(Options(a=str(paths[0]), b=str(paths[1]), window=window)).groups
        assert found.causes == ("the same elements in the same order, in another shape",)


def test_a_transpose_is_named_in_any_window(tmp_path):
    w = torch.randn(60, 40)
    paths = pair(tmp_path, {"w": w}, {"w": w.t()})
    (found,) = diff(Options(a=str(paths[0]), b=str(paths[1]), window=1300)).groups
    assert found.causes == ("the last two dimensions are transposed",)


def test_a_nan_is_the_worst_in_any_window(tmp_path):
    a, b = torch.ones(60, 40), torch.ones(60, 40)
    b[0, 0], b[59, 39] = 1e30, float("nan")
    paths = pair(tmp_path, {"w": a}, {"w": b})
    (found,) = diff(Options(a=str(paths[0]), b=str(paths[1]), window=1300)).groups
    assert found.worst is not None
    assert found.worst[1].at == (59, 39)


# Quantized


def test_quantized_files_are_compared_by_value_with_plain_ones(tmp_path, capsys):
    from torchtitan_ckpt.formats import hf as hf_format
    from torchtitan_ckpt.formats.quantized_math import quantize_fp8

    codes, scale = quantize_fp8(torch.randn(200, 300), key="w")
    a = hf(tmp_path / "a", {"x.weight": codes, "x.weight_scale_inv": scale})
    with hf_format.open_reader(a, dequantize=True) as reader:
        plain = reader.read("x.weight")
    b = hf(tmp_path / "b", {"x.weight": plain})
    code, report = run(capsys, a, b)
    assert code == 0
    assert "fp8 128x128 blocks (1 tensors), compared by the values" in report["notes"][0]
    assert counts(run(capsys, a, a)[1]) == {"equal": 2}


def test_codes_without_a_scale_are_compared_as_they_are(tmp_path, capsys):
    """No value can be made of them, which is no reason not to compare; the keys differ besides."""
    codes = torch.randn(20, 30).to(torch.float8_e4m3fn)
    other = codes.clone()
    other.view(torch.int8)[3, 4] += 3
    a, b = pair(tmp_path, {"x.weight": codes, "y": torch.ones(2)}, {"x.weight": other})
    code, report = run(capsys, a, b)
    assert (code, counts(report), report["only_a"]) == (1, {"close": 1}, ["y"])
    assert group(report, "close")["max_ulps"] == 3
    assert "compared by their codes" in report["notes"][0]


# Places and refusals


def test_remote_folders(capsys):
    from torchtitan_ckpt.formats import dcp

    state = {"layers.0.w": torch.randn(300, 401), "step": torch.tensor(3.0), "lr": 0.5}
    for name in ("a", "b"):
        dcp.save(state, f"memory://test-diff/{name}/step-7")
        state["layers.0.w"] = state["layers.0.w"] + 1
    a, b = (f"memory://test-diff/{name}/step-7" for name in "ab")
    assert run(capsys, a, a)[0] == 0
    assert counts(run(capsys, a, b)[1]) == {"different": 1, "equal": 2}
    assert main(["verify", a, "--deep"]) == 0
    assert main(["inspect", a, "--tensor", "layers.0.w"]) == 0
    assert main(["inspect", a]) == 0
    assert "step         7" in capsys.readouterr().out


def test_exit_codes(tmp_path, capsys):
    a = hf(tmp_path / "a", {"w": torch.ones(3)})
    assert main(["diff", str(a), str(tmp_path / "none")]) == 3
    assert main(["diff", str(a), str(a), "--only", "weights"]) == 2
    assert main(["diff", str(a), str(a), "--threads", "0"]) == 2
    empty = hf(tmp_path / "e", {})
    assert main(["diff", str(empty), str(empty)]) == 5
    assert main(["diff", str(a), str(a)]) == 0
