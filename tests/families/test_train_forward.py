"""The job's Qwen3 computes what transformers computes, on weights that transformers wrote.

The map from file names to parameters is written out here, apart from the package's own rules, so
that a mistake in either shows.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torchtitan_ckpt.adapter import MappingAdapter
from torchtitan_ckpt.train import registry
from torchtitan_ckpt.train.models.config import read_hf_config
from torchtitan_ckpt.train.models.qwen3 import Qwen3Model

FIXTURES = Path(__file__).parents[2] / "fixtures" / "qwen3"
MAKE = FIXTURES.parent / "make_qwen3.py"
NAMES = ("dense-untied", "dense-tied", "moe")
# Sums of a few dozen products in another order: float32 rounding over thirteen layers.
TOLERANCE = 1e-5

RENAMED = {
    "self_attn.q_proj.weight": "attention.qkv_linear.wq.weight",
    "self_attn.k_proj.weight": "attention.qkv_linear.wk.weight",
    "self_attn.v_proj.weight": "attention.qkv_linear.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "mlp.gate.weight": "moe.router.gate.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
STACKED = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}


def hf_weights(name: str) -> dict[str, torch.Tensor]:
    folder = FIXTURES / name
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    out: dict[str, torch.Tensor] = {}
    for file in files:
        out.update(load_file(folder / file))
    return out


def native(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for key, value in weights.items():
        value = value.float()
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", key)
        if match is None:
            key = key.replace("model.embed_tokens", "tok_embeddings").removeprefix("model.")
            out[key] = value
            continue
        layer, rest = match.groups()
        expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)\.weight", rest)
        if expert is None:
            out[f"layers.{layer}.{RENAMED[rest]}"] = value
        else:
            target = f"layers.{layer}.moe.routed_experts.inner_experts.{STACKED[expert[2]]}"
            experts.setdefault(target, {})[int(expert[1])] = value
    for target, rows in experts.items():
        out[target] = torch.stack([rows[index] for index in range(len(rows))])
    return out


def loaded(name: str) -> Qwen3Model:
    config = read_hf_config(FIXTURES / name)
    model = Qwen3Model(config).eval()
    state = native(hf_weights(name))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    allowed = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert {key for key in missing if not key.endswith("expert_bias_E")} == allowed
    return model


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    scale = theirs.abs().max().item()
    worst = (ours - theirs).abs().max().item()
    assert worst <= TOLERANCE * scale, f"off by {worst} at logits up to {scale}"


def golden(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    stored = load_file(FIXTURES / "golden" / f"{name}.safetensors")
    return stored["tokens"], stored["logits"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_stored_ones_of_transformers(name: str) -> None:
    tokens, expected = golden(name)
    with torch.no_grad():
        assert_close(loaded(name)(tokens), expected)


@pytest.mark.needs_hf
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="wants the extra 'hf'")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        FIXTURES / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model = loaded(name)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(model.config.vocab_size, (3, 41), generator=generator)
    with torch.no_grad():
        assert_close(model(tokens), theirs(input_ids=tokens, use_cache=False).logits)


@pytest.mark.parametrize(
    ("name", "key", "change"),
    [
        ("dense-untied", "layers.10.attention.q_norm.weight", lambda w: w.flip(0)),
        ("dense-untied", "layers.12.attention.qkv_linear.wk.weight", lambda w: w.roll(20, 0)),
        ("dense-tied", "layers.3.ffn_norm.weight", lambda w: torch.ones_like(w)),
        (
            "moe",
            "layers.2.moe.routed_experts.inner_experts.w3_EFD",
            lambda w: w[[0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]],
        ),
        ("moe", "layers.0.moe.router.gate.weight", lambda w: w.roll(1, 0)),
    ],
)
def test_a_wrong_weight_shows(name: str, key: str, change) -> None:  # type: ignore[no-untyped-def]
    """The golden logits catch a swapped head, a skipped norm and experts in text order."""
    model = loaded(name)
    with torch.no_grad():
        weight = model.get_parameter(key)
        weight.copy_(change(weight.clone()))
        tokens, expected = golden(name)
        with pytest.raises(AssertionError, match="off by"):
            assert_close(model(tokens), expected)


def test_the_fixtures_are_the_models_of_the_registry() -> None:
    assert read_hf_config(FIXTURES / "dense-untied") == registry.DENSE
    assert read_hf_config(FIXTURES / "dense-tied") == registry.TIED
    assert read_hf_config(FIXTURES / "moe") == registry.MOE


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_pairwise_different(name: str) -> None:
    config = read_hf_config(FIXTURES / name)
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    sizes = [
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.head_dim,
        heads * config.head_dim,
        keys * config.head_dim,
        *([config.num_experts, config.moe_intermediate_size] if config.num_experts else []),
    ]
    assert len(set(sizes)) == len(sizes)
    assert config.head_dim * heads != config.hidden_size


def test_a_model_can_be_built_on_meta() -> None:
    with torch.device("meta"):
        model = Qwen3Model(registry.MOE)
    assert all(value.is_meta for value in model.state_dict().values())
    assert set(model.state_dict()) == set(Qwen3Model(registry.MOE).state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_the_family_s_table_says_what_the_model_holds(name: str) -> None:
    """Keys, shapes and dtypes of the table equal those of the live model, and weights that the
    table renamed compute the stored logits."""
    config = read_hf_config(FIXTURES / name)
    adapter = MappingAdapter(config.to_hf(), str(FIXTURES / name))
    model = Qwen3Model(config).eval()
    live = {key: (tuple(v.shape), str(v.dtype)[6:]) for key, v in model.state_dict().items()}
    assert {key: (e.shape, e.dtype) for key, e in adapter.native_entries().items()} == live
    model.load_state_dict(adapter.from_hf(hf_weights(name)), strict=False)
    tokens, expected = golden(name)
    with torch.no_grad():
        assert_close(model(tokens), expected)


def test_the_fixtures_are_those_of_the_list() -> None:
    done = subprocess.run(
        [sys.executable, MAKE, "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert sum(path.stat().st_size for path in FIXTURES.rglob("*")) < 4_000_000


@pytest.mark.slow
@pytest.mark.needs_hf
def test_the_script_makes_the_same_fixtures_again(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="wants the extra 'hf'")
    made_by = json.loads((FIXTURES / "moe" / "config.json").read_text())["transformers_version"]
    if transformers.__version__ != made_by:
        pytest.skip(f"the fixtures were made by transformers {made_by}")
    command = [sys.executable, MAKE, "--to", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    # Logits may differ in their last bits on another processor; weights and configs may not.
    changed = [line for line in done.stdout.splitlines() if "golden/" not in line]
    assert changed == [], done.stderr
