"""Values: each direction of every family against a list of correspondences written elsewhere.

A round trip cannot see two names swapped in both directions; these comparisons can. The expected
tensors are computed here with plain torch from `fixtures/published/mapping.json`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.families.facts import FOLDER, TINY, fingerprints
from torchtitan_ckpt.families import get, names
from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.mapping import keys
from torchtitan_ckpt.mapping.family import Family
from torchtitan_ckpt.mapping.planner import plan_to_hf, plan_to_native

ROWS: dict[str, list[Any]] = json.loads((FOLDER / "mapping.json").read_text())
# Numbers above 9 on layers and experts, so that text order shows.
SIZES: dict[str, dict[str, Any]] = {
    "llama3": {"num_hidden_layers": 11},
    "qwen3": {"num_hidden_layers": 11},
    "qwen3_moe": {"num_hidden_layers": 11, "num_experts": 11},
    "deepseek_v3": {"num_hidden_layers": 11, "n_routed_experts": 11},
    "deepseek_v32": {"num_hidden_layers": 11, "n_routed_experts": 11},
    "deepseek_v4": {
        "num_hidden_layers": 11,
        "n_routed_experts": 11,
        "compress_ratios": [0, 4, 128, 4, 128, 4, 0, 128, 4, 128, 4, 0],
    },
    "gpt_oss": {"num_hidden_layers": 11, "num_local_experts": 11},
}
CASES = [
    (name, generation, experts)
    for name in names()
    for generation in get(name).generations
    for experts in ("standard", "gmm")
    if experts == "standard" or (generation == "npu" and "w13" in str(ROWS[name]))
]


def config_of(name: str) -> dict[str, Any]:
    return {**TINY[name], **SIZES[name]}


def correspondences(
    name: str, generation: str, experts: str
) -> list[tuple[list[str], str, str, dict[str, int]]]:
    """(hf patterns, native pattern, transform, layers) with MTP blocks written out."""
    config = config_of(name)
    out = []
    blocks = []
    for hf, titan, npu, transform, note in ROWS[name]:
        native = titan if generation == "titan" else npu
        if hf is None or native is None or transform.startswith(("drop", "dup", "mxfp4")):
            continue
        fused = ".w13" in native
        halves = native.endswith((".w1", ".w3"))
        if (halves and experts == "gmm") or (fused and experts != "gmm"):
            continue
        hfs = hf if isinstance(hf, list) else [hf]
        if "<block suffix" in hfs[0]:
            blocks.append((hfs[0].partition("<")[0], native.partition("<")[0]))
            continue
        out.append((hfs, native, transform, {"ratio": 4 if "ratio 4" in note else 0}))
        if "ratio 128" in note:
            out[-1][3]["ratio"] = 128
    last = config["num_hidden_layers"]
    if name == "deepseek_v32":  # written there as one block under the same number
        blocks.append(("model.layers.{num_hidden_layers+mtp}.", "layers.{num_hidden_layers+mtp}."))
    own = "layers.{layer}."
    for before_hf, before_native in blocks:
        for hfs, native, transform, extra in list(out):
            prefix = "model." + own if hfs[0].startswith("model.") else own
            if native.startswith(own) and not extra["ratio"] and ".feed_forward." not in native:
                moved = [before_hf + h.removeprefix(prefix) for h in hfs]
                out.append((moved, before_native + native.removeprefix(own), transform, extra))
    numbered = []
    for hfs, native, transform, extra in out:
        for old, new in (
            ("{num_hidden_layers+mtp}", str(last)),
            ("{num_hidden_layers-1}", str(last - 1)),
            ("{mtp}", "0"),
        ):
            hfs, native = [h.replace(old, new) for h in hfs], native.replace(old, new)
        numbered.append((hfs, native, transform, extra))
    return numbered


def expected(
    transform: str, parts: list[list[torch.Tensor]], config: dict[str, Any]
) -> torch.Tensor:
    """The native tensor of Hugging Face ones, with plain torch."""
    if transform.startswith("identity"):
        return parts[0][0]
    if transform.startswith("permute_rope"):
        field = transform.partition("(")[2].rstrip(")")
        half = parts[0][0]
        heads, width = config[field], half.shape[1]
        size = half.shape[0] // heads
        return half.view(heads, 2, size // 2, width).transpose(1, 2).reshape(half.shape)
    if transform.startswith("transpose"):
        return parts[0][0].transpose(1, 2)
    if "concat" in transform:
        return torch.cat([torch.stack(row) for row in parts], 1)
    assert transform.startswith("stack_experts"), transform
    return torch.stack(parts[0])


@pytest.mark.parametrize(("name", "generation", "experts"), CASES)
def test_each_direction_alone(name: str, generation: str, experts: str) -> None:
    check(name, generation, experts, get(name))


SLOW = ("deepseek_v32", "deepseek_v4")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in names()]
)
def test_two_names_swapped_are_seen(name: str) -> None:
    """Every pair of neighbouring rows of one shape, swapped natively: the comparison fails."""
    family = get(name)
    generation = family.generations[0]
    seen = 0
    for place, (first, second) in enumerate(pairwise(family.rows)):
        alike = first.shape == second.shape and first.ops == second.ops
        there = first.native(generation) and second.native(generation)
        if not (alike and there and first.when == second.when and first.layers == second.layers):
            continue
        if first.hf is None or second.hf is None or first.copy_of or second.copy_of:
            continue
        rows = list(family.rows)
        rows[place] = replace(first, titan=second.titan, npu=second.npu)
        rows[place + 1] = replace(second, titan=first.titan, npu=first.npu)
        seen += 1
        with pytest.raises(AssertionError):
            check(name, generation, "standard", replace(family, rows=tuple(rows)))
    assert seen >= 1


def check(name: str, generation: str, experts: str, family: Family) -> None:
    config = config_of(name)
    mapping = family.mapping(config, generation, experts=experts)
    file = fingerprints_of_file(keys.hf_entries(mapping))
    native = mapping.from_hf(file)
    own = fingerprints(keys.native_entries(mapping), mapping)
    written = mapping.to_hf(own)
    seen: set[str] = set()
    ratios = config.get("compress_ratios", [])
    for hfs, pattern, transform, extra in correspondences(name, generation, experts):
        for layer in range(config["num_hidden_layers"]) if "{layer}" in pattern else [0]:
            key = pattern.replace("{layer}", str(layer))
            if key not in native or (extra["ratio"] and ratios[layer] != extra["ratio"]):
                continue
            rows = []
            for hf in hfs:
                full = hf.replace("{layer}", str(layer))
                count = len([k for k in file if k.startswith(full.partition("{")[0])])
                experts_of = range(config.get("n_routed_experts", config.get("num_experts", count)))
                rows.append(
                    [full.replace("{expert}", str(e)) for e in experts_of]
                    if "{expert}" in full
                    else [full]
                )
            if rows == [["lm_head.weight"]] and config["tie_word_embeddings"]:
                continue
            assert torch.equal(
                native[key], expected(transform, [[file[k] for k in row] for row in rows], config)
            ), key
            assert torch.equal(
                own[key], expected(transform, [[written[k] for k in row] for row in rows], config)
            ), key
            seen |= {key}
    unseen = {k for k in native if k not in seen}
    # Router biases without a file key, and the tied head, are tested elsewhere.
    assert all("expert_bias" in k or k in ("lm_head.weight", "output.weight") for k in unseen)
    assert not unseen or name in ("qwen3_moe", "gpt_oss", "qwen3")


def fingerprints_of_file(entries: dict[str, TensorEntry]) -> dict[str, torch.Tensor]:
    out, start = {}, 3
    for key, entry in entries.items():
        flat = torch.arange(start, start + entry.numel)
        start += entry.numel
        out[key] = flat.reshape(entry.shape).to(getattr(torch, entry.dtype))
    return out


@pytest.mark.parametrize("name", names())
def test_a_tiny_window_gives_the_same_bytes_as_the_whole(name: str) -> None:
    generation = get(name).generations[-1]
    mapping = get(name).mapping(config_of(name), generation)
    native = fingerprints(keys.native_entries(mapping), mapping)
    hf = mapping.to_hf(native)

    def entries(state: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
        return {k: TensorEntry(k, tuple(v.shape), str(v.dtype)[6:]) for k, v in state.items()}

    for plan, source, want in (
        (plan_to_hf(mapping, entries(native)), native, hf),
        (plan_to_native(mapping, entries(hf)), hf, native),
    ):
        made = {k: torch.full_like(v, -1) for k, v in want.items()}
        for tile in plan.tiles(12_000):
            target = tile.target
            rows = zip(target.offsets, target.sizes, strict=True)
            box = tuple(slice(o, o + n) for o, n in rows)
            made[target.key][box] = tile.read(
                lambda key, at, n, source=source: source[key][
                    tuple(slice(a, a + b) for a, b in zip(at, n, strict=True))
                ]
            )
        assert made.keys() == want.keys()
        assert all(torch.equal(made[k], want[k]) for k in want)
