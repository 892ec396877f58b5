"""The engine: proofs, refusals with their words, partial dicts, ties, purity."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchtitan_ckpt.errors import MappingError
from torchtitan_ckpt.mapping import (
    Fuse,
    HfOnly,
    Mapping,
    NativeOnly,
    RopeToHalf,
    Rule,
    Split,
    Stack,
    Tied,
    Transpose,
    Unstack,
)
from torchtitan_ckpt.mapping.compose import compose
from torchtitan_ckpt.mapping.explain import explain
from torchtitan_ckpt.mapping.keys import coverage
from torchtitan_ckpt.mapping.w13 import W13, recognise, repair_tensor, shard_fused

LAYERS = {"layer": range(13)}
EXPERTS = {"expert": range(11)}


def table() -> Mapping:
    return Mapping(
        [
            Rule("emb", "model.emb"),
            Rule("layers.{layer}.wq", "m.{layer}.q", RopeToHalf(6), where=LAYERS),
            Rule("layers.{layer}.norm", "m.{layer}.norm", where=LAYERS),
            Rule(
                "layers.{layer}.moe.w13",
                ["m.{layer}.e.{expert}.gate", "m.{layer}.e.{expert}.up"],
                Split(1),
                Unstack("expert"),
                where=LAYERS | EXPERTS,
            ),
            NativeOnly("layers.{layer}.moe.bias", 0.0, "no such key", LAYERS, shape=(11,)),
            HfOnly("m.{layer}.inv_freq", "computed, not stored", LAYERS),
        ]
    )


def native(layers: range = range(13)) -> dict[str, torch.Tensor]:
    counter = itertools.count()

    def make(*shape: int) -> torch.Tensor:
        start = next(counter) * 10_000
        return (torch.arange(torch.Size(shape).numel()) + start).reshape(shape).float()

    out = {"emb": make(17, 5)}
    for layer in layers:
        out[f"layers.{layer}.wq"] = make(18, 5)
        out[f"layers.{layer}.norm"] = make(5)
        out[f"layers.{layer}.moe.w13"] = make(11, 14, 5)
        out[f"layers.{layer}.moe.bias"] = torch.zeros(11)
    return out


def codes(error: pytest.ExceptionInfo[MappingError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


def test_each_direction_against_plain_torch() -> None:
    state = native()
    hf = table().to_hf(state)
    assert len(hf) == 1 + 13 * (2 + 22)
    q = state["layers.12.wq"]
    assert torch.equal(hf["m.12.q"], q.view(3, 3, 2, 5).transpose(1, 2).reshape(18, 5))
    for expert in range(11):
        rows = state["layers.2.moe.w13"][expert]
        assert torch.equal(hf[f"m.2.e.{expert}.gate"], rows[:7])
        assert torch.equal(hf[f"m.2.e.{expert}.up"], rows[7:])
    back = table().from_hf(hf)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[k], state[k]) for k in state)
    half = hf["m.3.q"]
    assert torch.equal(back["layers.3.wq"], half.view(3, 2, 3, 5).transpose(1, 2).reshape(18, 5))


def test_a_stages_part_gives_exactly_that_part() -> None:
    mapping = table()
    whole = mapping.to_hf(native())
    part = {k: v for k, v in native().items() if k.startswith(("layers.10.", "layers.2."))}
    hf = mapping.to_hf(part)
    assert set(hf) == {k for k in whole if k.startswith(("m.10.", "m.2."))}
    assert set(mapping.from_hf(hf)) == set(part)
    assert mapping.to_hf({}) == {}
    assert mapping.from_hf({}) == {}
    attention = {k: v for k, v in hf.items() if k.endswith((".q", ".norm"))}
    assert not [key for key in mapping.from_hf(attention) if ".moe." in key]


def test_half_a_group_names_the_missing_members() -> None:
    hf = table().to_hf(native())
    for expert in (3, 4, 10):
        del hf[f"m.5.e.{expert}.up"]
    with pytest.raises(MappingError) as error:
        table().from_hf(hf)
    assert codes(error) == ["mapping.half-group"]
    text = str(error.value)
    assert "3 of 22 hf tensors missing for layers.5.moe.w13" in text
    assert "m.5.e.{3,4,10}.up (3)" in text


def test_the_last_expert_is_missed_too_when_the_table_knows_the_count() -> None:
    hf = table().to_hf(native())
    for part in ("gate", "up"):
        del hf[f"m.0.e.10.{part}"]
    with pytest.raises(MappingError, match=r"layers\.0\.moe\.w13"):
        table().from_hf(hf)


def test_every_problem_at_once_with_groups_and_nearest_template() -> None:
    state = native()
    state["layers.3.moe.w13_old"] = state.pop("layers.3.moe.w13")
    state["layers.99.norm"] = torch.zeros(5)
    state["layers.1.wq.lora_A.weight"] = torch.zeros(2, 5)
    state["layers.1.wq"] = torch.zeros(17, 5)
    state["layers.2.norm"] = "not a tensor"  # type: ignore[assignment]
    with pytest.raises(MappingError) as error:
        table().to_hf(state)
    assert codes(error) == ["mapping.lora", "mapping.unknown-keys", "mapping.not-a-tensor"]
    text = str(error.value)
    assert "layers.3.moe.w13_old -> layers.{layer}.moe.w13" in text
    assert "merge_and_unload" in text
    del state["layers.1.wq.lora_A.weight"], state["layers.99.norm"]
    del state["layers.3.moe.w13_old"], state["layers.2.norm"]
    with pytest.raises(MappingError, match=r"mapping\.shape"):
        table().to_hf(state)


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.m.0.q.lora_A.default.weight",
        "m.0.q.lora_B.weight",
        "m.0.q.base_layer.weight",
        "m.0.q.lora_magnitude_vector",
        "m.0.modules_to_save.x",
    ],
)
def test_lora_keys_are_refused_by_name(key: str) -> None:
    with pytest.raises(MappingError, match=r"mapping\.lora"):
        table().from_hf({key: torch.zeros(1)})


def test_scales_and_codes_are_refused_by_name() -> None:
    mapping = Mapping([Rule("w", "h.weight", dtype="bfloat16")])
    with pytest.raises(MappingError) as error:
        mapping.from_hf(
            {
                "h.weight": torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
                "h.weight_scale_inv": torch.ones(1, 1),
            }
        )
    assert codes(error) == ["mapping.quantized-key", "mapping.raw-codes"]


def test_parts_that_differ_are_refused() -> None:
    hf = table().to_hf(native())
    hf["m.4.e.7.up"] = hf["m.4.e.7.up"].bfloat16()
    hf["m.6.e.7.up"] = torch.zeros(7, 6)
    with pytest.raises(MappingError) as error:
        table().from_hf(hf)
    assert codes(error) == ["mapping.shape", "mapping.shape"]
    assert "differ in dtype" in str(error.value)
    assert "differ in shape" in str(error.value)


def spans(tensor: torch.Tensor) -> set[int]:
    index = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    at = index.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    base = tensor.untyped_storage().data_ptr()
    return {base + int(i) * tensor.element_size() for i in at.flatten()}


def test_pure_no_state_no_change_no_aliases() -> None:
    mapping = table()
    state = {k: torch.nn.Parameter(v) for k, v in native().items()}
    frozen = {k: v.detach().clone() for k, v in state.items()}
    order = list(state)
    first = mapping.to_hf(dict(state))
    second = mapping.to_hf(state)
    assert list(state) == order
    assert all(torch.equal(state[k], frozen[k]) for k in state)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not any(v.requires_grad for v in first.values())
    for out in (first, mapping.from_hf(first)):
        seen: set[int] = set()
        for tensor in out.values():
            assert tensor.is_contiguous()
            mine = spans(tensor)
            assert not mine & seen
            seen |= mine
    hf = mapping.to_hf(native())
    mapping.from_hf(hf)["layers.0.wq"].zero_()
    assert not torch.equal(hf["m.0.q"], torch.zeros_like(hf["m.0.q"]))


def test_coverage_proves_both_sides_and_finds_dead_rules() -> None:
    state = native()
    hf = table().to_hf(state)
    report = coverage(table(), state, hf)
    assert (report.native, report.hf, report.rules) == (len(state), len(hf), 4)
    assert [item.why for item in report.left_out] == ["no such key"]
    with pytest.raises(MappingError) as error:
        coverage(
            Mapping([*table().entries, Rule("old.{layer}.w", "old.{layer}.h")]),
            state | {"emb2": torch.zeros(1)},
            {k: v for k, v in hf.items() if not k.startswith("m.3.e")},
        )
    assert codes(error) == [
        "mapping.unknown-keys",
        "mapping.no-counterpart",
        "mapping.dead-rule",
    ]
    assert "old.{layer}.w" in str(error.value)


BAD_RULES = [
    (lambda: Rule("a.{x}", "b"), "does not balance"),
    (lambda: Rule("a", "b.{x}"), "does not balance"),
    (lambda: Rule("a.{x}", "b.{x}", Unstack("x")), "consumed by an op and still there"),
    (lambda: Rule("a", "b.{y}", Unstack("x")), "does not balance"),
    (lambda: Rule("a", ["b", "c"]), "number of templates"),
    (lambda: Rule("a", "b", Split(0)), "number of templates"),
    (lambda: Rule(["a", "b"], ["c", "d"], Fuse(0), Split(0)), "others many of one"),
    (lambda: Rule("a.{x}", "b", Stack("x"), Split(0)), "others many of one"),
    (lambda: Rule("a", "b", where={"x": range(2)}), "no template"),
    (lambda: Rule("a", "b.{x}", Unstack("x"), where={"x": range(1, 4)}), "do not start at 0"),
    (lambda: Rule("a", "b", "rope"), "is no op"),  # type: ignore[arg-type]
    (lambda: NativeOnly("a", 0.0, ""), "without a reason"),
    (lambda: HfOnly("a", " "), "without a reason"),
    (lambda: Tied("a", "b.{x}"), "placeholder"),
    (lambda: Tied("a", "b", side="both"), "no side"),
]


@pytest.mark.parametrize(("make", "words"), BAD_RULES, ids=[words for _, words in BAD_RULES])
def test_bad_rules_fail_when_they_are_written(make, words: str) -> None:
    with pytest.raises(MappingError, match=words):
        make()


def tied(emit: tuple[str, ...] = ()) -> Mapping:
    return Mapping(
        [
            Rule("emb", "embed"),
            Rule("layers.{i}.x", "mtp.{i}.x", where={"i": range(2)}),
            Tied("head", "emb", side="native", group="head"),
            Tied("lm_head", "embed", group="head"),
            Tied("mtp.{i}.norm", "embed", group="mtp", where={"i": range(2)}, import_loss="as is"),
        ],
        emit=emit,
    )


def test_ties_are_filled_left_out_and_switched_on() -> None:
    emb = torch.randn(4, 3)
    state = {"head": emb, "emb": emb}
    assert set(tied().to_hf(state)) == {"embed"}
    hf = tied(("head",)).to_hf(state)
    assert set(hf) == {"embed", "lm_head"}
    assert hf["lm_head"].data_ptr() != hf["embed"].data_ptr()
    stage = tied(("all",)).to_hf(state | {"layers.1.x": emb})
    assert set(stage) == {"embed", "lm_head", "mtp.1.x", "mtp.1.norm"}
    for source in ({"embed": emb}, hf, {"lm_head": emb}):
        back = tied().from_hf(source)
        assert set(back) == {"emb", "head"}
        assert torch.equal(back["head"], emb)
        assert back["head"].data_ptr() != back["emb"].data_ptr()
    other = {"embed": emb, "mtp.1.norm": emb + 1}
    assert torch.equal(tied().from_hf(other)["emb"], emb)


def test_broken_ties_are_errors() -> None:
    emb = torch.randn(4, 3)
    for call, state in (
        (tied().to_hf, {"emb": emb, "head": emb + 1}),
        (tied().from_hf, {"embed": emb, "lm_head": emb + 1}),
    ):
        with pytest.raises(MappingError, match=r"mapping\.tied-differ"):
            call(state)
    with pytest.raises(MappingError, match=r"mapping\.tied-alone"):
        tied().to_hf({"head": emb})
    with pytest.raises(MappingError, match=r"mapping\.tie-unresolved"):
        Mapping([Tied("a", "b")])
    with pytest.raises(MappingError, match=r"mapping\.unknown-switch"):
        tied(("heads",))
    nan = torch.full((4, 3), float("nan"))
    assert set(tied().to_hf({"emb": nan, "head": nan.clone()})) == {"embed"}


def test_explain_reads_both_directions() -> None:
    there = explain(table(), "layers.3.moe.w13")[0]
    assert there.others == ("m.3.e.{expert}.gate", "m.3.e.{expert}.up")
    assert there.ops == ("split dim 1 (2 equal parts)", "unstack {expert} on dim 0")
    back = explain(table(), "m.3.e.10.up")[0]
    assert back.others == ("layers.3.moe.w13",)
    assert back.ops == ("stack {expert} on dim 0", "fuse dim 1 (2 equal parts)")
    assert "computed, not stored" in str(explain(table(), "m.1.inv_freq")[0])
    with pytest.raises(MappingError, match="nearest"):
        explain(table(), "layers.3.moe.w1")


def test_compose_cancels_what_both_sides_undo() -> None:
    left = Mapping(
        [
            Rule("w1.{l}", "h.{l}.{e}.1", Unstack("e")),
            Rule("w3.{l}", "h.{l}.{e}.3", Unstack("e")),
            Rule("t", "ht", Transpose()),
            NativeOnly("bias", 0.0, "no key", peer="b"),
        ]
    )
    right = Mapping(
        [
            Rule("w13.{l}", ["h.{l}.{e}.1", "h.{l}.{e}.3"], Split(1), Unstack("e")),
            Rule("u", "ht", Transpose()),
            NativeOnly("other_bias", 0.0, "no key", peer="b"),
        ]
    )
    state = {
        "w1.0": torch.randn(4, 3, 2),
        "w3.0": torch.randn(4, 3, 2),
        "t": torch.randn(3, 2),
        "bias": torch.randn(4),
    }
    moved = compose(left, right).to_hf(state)
    assert torch.equal(moved["w13.0"], torch.cat([state["w1.0"], state["w3.0"]], 1))
    assert moved["u"] is state["t"]
    assert torch.equal(moved["other_bias"], state["bias"])
    back = compose(right, left).to_hf(moved)
    assert all(torch.equal(back[k], state[k]) for k in state)
    odd = Mapping([Rule("x", "ht")])
    assert torch.equal(
        compose(Mapping([Rule("t", "ht", Transpose())]), odd).to_hf({"t": state["t"]})["x"],
        state["t"].T,
    )


def test_w13_fused_by_shard_is_recognised_and_repaired_only_with_a_degree() -> None:
    w1, w3 = torch.randn(3, 8, 5), torch.randn(3, 8, 5)
    plain = torch.cat([w1, w3], 1)
    parts = [torch.cat(pair, 1) for pair in zip(w1.chunk(4, 1), w3.chunk(4, 1), strict=True)]
    old = torch.cat(parts, 1)
    assert torch.equal(shard_fused(plain, 4), old)
    assert torch.equal(repair_tensor(old, 4), plain)
    assert recognise(old, w1, w3, 4) is W13.BY_SHARD
    assert recognise(plain, w1, w3, 4) is W13.PLAIN
    assert recognise(old, w1, w3, 2) is W13.NEITHER
    assert recognise(plain, w1, w3, 1) is W13.SAME
    flat = torch.ones_like(w1)
    assert recognise(torch.ones_like(plain), flat, flat, 4) is W13.SAME
    with pytest.raises(MappingError, match="do not come from 3 shards"):
        repair_tensor(old, 3)
