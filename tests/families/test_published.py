"""Full size, without memory: what the tables write is exactly what is published."""

from __future__ import annotations

import time

import pytest
import torch

from conformance.subjects.published import tensors as published
from tests.families.facts import CONFIGS, EXPORTS, KEYS, meta
from torchtitan_ckpt.families import get
from torchtitan_ckpt.mapping import keys
from torchtitan_ckpt.mapping.planner import plan_to_hf
from torchtitan_ckpt.mapping.rule import NATIVE

SCALES = (".weight_scale_inv", ".scale", "_scales")


def mapping_of(name: str, emit: tuple[str, ...] | None = None):
    family = get(CONFIGS[name]["family"])
    generation, switches = EXPORTS[name]
    config = CONFIGS[name]["config"]
    return family, family.mapping(config, generation, emit=switches if emit is None else emit)


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_manifest_is_the_published_one(name: str) -> None:
    family, mapping = mapping_of(name)
    config = CONFIGS[name]["config"]
    if family.quantized(config):
        entries = keys.stored_entries(mapping, family.layouts_for(config))
    else:
        entries = keys.hf_entries(mapping)
    assert {key: (e.shape, e.dtype) for key, e in entries.items()} == published(name)
    assert sum(e.nbytes for e in entries.values()) == KEYS[name]["bytes"]


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_to_hf_on_meta_gives_the_published_keys(name: str) -> None:
    began = time.process_time()  # of this process: other work on the machine does not count
    family, mapping = mapping_of(name)
    state = meta(keys.native_entries(mapping, dtype=None))
    hf = mapping.to_hf(state)
    logical = keys.hf_entries(mapping)
    assert {k: (tuple(v.shape), str(v.dtype)[6:]) for k, v in hf.items()} == {
        k: (e.shape, e.dtype) for k, e in logical.items()
    }
    found = published(name)
    quantized = {k.removesuffix("_blocks") for k in found if not k.endswith(SCALES)}
    assert set(hf) == quantized
    # Tensors that are stored as they are have the very dtype and shape of the file.
    plain = [k for k in hf if k in found and found[k][1] not in ("float8_e4m3fn", "int8", "uint8")]
    assert len(plain) > 10
    assert all((tuple(hf[k].shape), str(hf[k].dtype)[6:]) == found[k] for k in plain)
    back = mapping.from_hf(hf)
    assert {k: (v.shape, v.dtype) for k, v in back.items()} == {
        k: (v.shape, v.dtype) for k, v in state.items()
    }
    keys.coverage(mapping, state, hf)
    assert time.process_time() - began < 20
    assert family.name == CONFIGS[name]["family"]


LEFT_OUT = {
    "DeepSeek-V3.2": {
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight",
    },
    "DeepSeek-V3": {
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight",
    },
    "Qwen3-0.6B": {"lm_head.weight"},
}


@pytest.mark.parametrize("name", sorted(LEFT_OUT))
def test_what_is_left_out_is_declared_counted_and_can_be_switched_on(name: str) -> None:
    _, plain = mapping_of(name, emit=())
    _, full = mapping_of(name)
    hf = keys.hf_entries(plain)
    assert set(keys.hf_entries(full)) - set(hf) == LEFT_OUT[name]
    said = plain.left_out(keys.native_entries(plain), NATIVE)
    assert {key for item in said for key in item.keys if item.side == "hf"} == LEFT_OUT[name]
    assert all(item.why for item in said)
    # A file that holds them is understood all the same.
    accepted = plain.from_hf(meta(keys.hf_entries(full)))
    assert set(accepted) == set(keys.native_entries(plain))


def test_v4_can_write_the_mtp_copies_that_published_files_lack() -> None:
    _, mapping = mapping_of("DeepSeek-V4-Flash", emit=("mtp-duplicates",))
    extra = set(keys.hf_entries(mapping)) - set(published("DeepSeek-V4-Flash"))
    assert extra == {"mtp.0.head.weight", "mtp.0.emb.tok_emb.weight"}


def test_a_34_gb_tensor_converts_in_2_gb() -> None:
    """DeepSeek-V4-Pro's stacked experts: every tile and its source fit, tiles cover the target."""
    _, mapping = mapping_of("DeepSeek-V4-Pro")
    native = keys.native_entries(mapping)
    key = "layers.7.moe.experts.w1"
    assert native[key].nbytes == 384 * 3072 * 7168 * 4
    window = 2 << 30
    plan = plan_to_hf(mapping, {key: native[key]})
    tiles = list(plan.tiles(window))
    assert len(plan.targets) == 384
    assert {t.target.key for t in tiles} == set(plan.targets)
    assert sum(t.target.numel for t in tiles) == native[key].numel
    for tile in tiles:
        cost = 4 * tile.target.numel + 4 * max(s.numel for s in tile.sources)
        assert cost <= window
    from torchtitan_ckpt.mapping.planner import plan_to_native

    hf = {k: e for k, e in keys.hf_entries(mapping).items() if k in plan.targets}
    back = list(plan_to_native(mapping, hf, dtype=lambda k, d: "float32").tiles(window))
    assert sum(t.target.numel for t in back) == native[key].numel
    assert max(4 * t.target.numel for t in back) <= window
    assert torch.tensor([t.target.offsets[0] for t in back]).diff().gt(0).all()
