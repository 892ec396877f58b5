"""`map`: a key in both directions, with its operations; unknown keys get the nearest template."""

import json

from torchtitan_ckpt.cli import main


def run(capsys, *argv):
    code = main(["map", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_stacked_tensor_names_its_experts_and_the_operation(capsys):
    key = "layers.3.moe.routed_experts.inner_experts.w1_EFD"
    code, out, _ = run(capsys, key, "--family", "qwen3_moe")
    assert code == 0
    assert "hf model.layers.3.mlp.experts.{expert}.gate_proj.weight" in out
    assert "op unstack {expert} on dim 0" in out


def test_the_other_direction_and_both_generations(capsys):
    key = "model.layers.3.mlp.experts.7.gate_proj.weight"
    code, out, _ = run(capsys, key, "--config", "Qwen3-30B-A3B", "--json")
    rows = {row["generation"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["titan"]["others"] == ["layers.3.moe.routed_experts.inner_experts.w1_EFD"]
    assert rows["npu"]["others"] == ["layers.3.moe.experts.w1"]
    assert rows["npu"]["ops"] == ["stack {expert} on dim 0"]


def test_what_has_no_counterpart_says_why(capsys):
    _, out, _ = run(capsys, "layers.3.moe.expert_bias_E", "--family", "qwen3_moe")
    assert "no counterpart: the load-balancing bias has no Hugging Face key" in out


def test_an_unknown_key_gets_the_nearest(capsys):
    code, _, err = run(capsys, "layers.3.attention.qkv_linear.wq.wieght", "--family", "qwen3")
    assert code == 3
    assert "wq.weight" in err


def test_a_model_must_be_named(capsys):
    code, _, err = run(capsys, "lm_head.weight")
    assert code == 2
    assert "--family" in err
