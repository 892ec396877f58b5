"""Every op, searched: op then inverse and inverse then op are identity; slices agree too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ckpt.errors import MappingError
from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.mapping import (
    Cast,
    Deinterleave,
    Fuse,
    Interleave,
    Mapping,
    Op,
    Regroup,
    RopeToHalf,
    RopeToInterleaved,
    Rule,
    Split,
    Squeeze,
    Stack,
    Transpose,
    Unsqueeze,
    Unstack,
)
from torchtitan_ckpt.mapping.planner import plan_load, plan_to_hf, plan_to_native
from torchtitan_ckpt.mapping.w13 import repair

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
]
small = st.integers(1, 5)


@st.composite
def cases(draw: Any) -> tuple[tuple[Op, ...], tuple[int, ...]]:
    """A chain of ops from one native tensor, and a shape that it takes."""
    a, b, c = draw(small), draw(small), draw(small)
    return draw(
        st.sampled_from(
            [
                ((Transpose(0, 1),), (a, b, c)),
                ((Transpose(-1, -2),), (a, b, c)),
                ((RopeToHalf(2 * b),), (a * 2 * b, c)),
                ((RopeToInterleaved(2 * b),), (a * 2 * b, c)),
                ((RopeToHalf(2 * b, dim=1),), (a, c * 2 * b)),
                ((Deinterleave(1, b),), (a, b * c)),
                ((Interleave(0, b),), (a * b, c)),
                ((Regroup(0, a, b),), (a * b * c, 2)),
                ((repair(a),), (b, a * 2 * c, 3)),
                ((Squeeze(1),), (a, 1, b)),
                ((Unsqueeze(1),), (a, b)),
                ((Unstack("e"),), (a, b, c)),
                ((Unstack("e", 1),), (a, b, c)),
                ((Unstack("e"), Unstack("f", 0)), (a, b, c)),
                ((Split(0, sizes=(a, b, c)),), (a + b + c, 2)),
                ((Split(1, b),), (a, b * c)),
                ((Split(1), Unstack("e")), (a, 2 * b, c)),
                ((Unstack("e"), Split(0)), (a, 2 * b, c)),
                ((repair(b), Split(1), Unstack("e"), Transpose()), (a, 4 * b, c)),
                ((Deinterleave(0), Split(0)), (2 * a, b)),
                ((Unstack("e"), RopeToHalf(2 * b), Transpose()), (a, 2 * b * c, 3)),
                ((RopeToHalf(2), Deinterleave(0)), (2 * a, b)),
                ((Split(0), Split(1, b)), (2 * a, b * c)),
            ]
        )
    )


def rule_of(ops: tuple[Op, ...]) -> Rule:
    parts = 1
    for op in ops:
        parts *= op.count if isinstance(op, (Split, Fuse)) else 1
    suffix = "".join(f".{{{op.name}}}" for op in ops if isinstance(op, Unstack))
    names = [f"h{'abcdefghij'[i]}{suffix}" for i in range(parts)]
    return Rule("w", names if parts > 1 else names[0], *ops)


def joined(ops: tuple[Op, ...]) -> Rule:
    """The same ops the other way round: many native tensors, one on the Hugging Face side."""
    there = rule_of(ops)
    back = [op.inverse for op in reversed(ops)]
    return Rule([t.text for t in there.hf], "w", *back)


@st.composite
def tensors(draw: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bytes of a random dtype, with random strides: permuted, stepped or expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    style = draw(st.sampled_from(["plain", "permuted", "stepped", "expanded"]))
    seed = draw(st.integers(0, 2**20))
    make = torch.Generator().manual_seed(seed)
    full = [2 * n for n in shape] if style == "stepped" else list(shape)
    if style == "expanded" and full:
        full[0] = 1
    width = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (*full, width), dtype=torch.uint8, generator=make)
    data = raw.view(dtype).squeeze(-1)
    if style == "permuted":
        order = list(range(len(shape)))[::-1]
        return data.permute(order).contiguous().permute(order)
    if style == "stepped":
        return data[tuple(slice(None, None, 2) for _ in shape)]
    return data.expand(shape)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].shape == b[key].shape
        assert a[key].dtype == b[key].dtype
        assert bits(a[key]) == bits(b[key])


@settings(max_examples=250, deadline=None)
@given(st.data(), cases())
def test_op_then_inverse_and_inverse_then_op(data: Any, case: Any) -> None:
    ops, shape = case
    mapping, other = Mapping([rule_of(ops)]), Mapping([joined(ops)])
    whole = {"w": data.draw(tensors(shape))}
    kept = bits(whole["w"])
    parts = mapping.to_hf(whole)
    assert sum(part.numel() for part in parts.values()) == whole["w"].numel()
    equal(mapping.from_hf(parts), whole)
    equal(other.from_hf(whole), parts)
    equal(other.to_hf(parts), whole)
    equal(mapping.to_hf(mapping.from_hf(parts)), parts)
    assert bits(whole["w"]) == kept
    for op in ops:
        assert op.inverse.inverse == op


@settings(max_examples=150, deadline=None)
@given(st.data(), cases(), st.integers(3, 40))
def test_tiles_of_any_window_make_the_same_bytes(data: Any, case: Any, window: int) -> None:
    ops, shape = case
    mapping = Mapping([rule_of(ops)])
    whole = {"w": data.draw(tensors(shape))}
    parts = mapping.to_hf(whole)
    entries = [
        {k: TensorEntry(k, tuple(v.shape), str(v.dtype)[6:]) for k, v in side.items()}
        for side in (whole, parts)
    ]
    size = whole["w"].element_size()
    for plan, source, want in (
        (plan_to_hf(mapping, entries[0]), whole, parts),
        (plan_to_native(mapping, entries[1]), parts, whole),
        (plan_load(mapping, entries[0]), parts, whole),
    ):
        made = {k: torch.empty_like(v).contiguous() for k, v in want.items()}
        seen = {k: torch.zeros(v.shape, dtype=torch.int64) for k, v in want.items()}
        for tile in plan.tiles(window * size):
            box = tuple(
                slice(o, o + n) for o, n in zip(tile.target.offsets, tile.target.sizes, strict=True)
            )
            assert tile.target.numel + max(s.numel for s in tile.sources) <= window
            got = tile.read(
                lambda key, at, n, source=source: source[key][
                    tuple(slice(a, a + b) for a, b in zip(at, n, strict=True))
                ]
            )
            made[tile.target.key][box] = got
            seen[tile.target.key][box] += 1
        equal(made, want)
        assert all(bool((count == 1).all()) for count in seen.values())


PINNED = [
    # op, input rows, expected rows: written out by hand, not computed by the op.
    (RopeToHalf(4), [0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 1, 3, 4, 6, 5, 7]),
    (RopeToHalf(6), [0, 1, 2, 3, 4, 5], [0, 2, 4, 1, 3, 5]),
    (RopeToInterleaved(6), [0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]),
    (Deinterleave(0), [0, 1, 2, 3, 4, 5], [0, 2, 4, 1, 3, 5]),
    (Deinterleave(0, 3), [0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]),
    (Interleave(0), [0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]),
    (repair(2, 0), [10, 11, 30, 31, 12, 13, 32, 33], [10, 11, 12, 13, 30, 31, 32, 33]),
]


@pytest.mark.parametrize(("op", "rows", "want"), PINNED, ids=str)
def test_row_orders_written_by_hand(op: Op, rows: list[int], want: list[int]) -> None:
    native = torch.tensor(rows)[:, None] * 100 + torch.arange(3)
    hf = torch.tensor(want)[:, None] * 100 + torch.arange(3)
    mapping = Mapping([Rule("w", "h", op)])
    assert torch.equal(mapping.to_hf({"w": native})["h"], hf)
    assert torch.equal(mapping.from_hf({"h": hf})["w"], native)


def test_stack_is_numeric_and_fuse_keeps_the_rules_order() -> None:
    mapping = Mapping(
        [
            Rule("w13", ["e.{expert}.one", "e.{expert}.three"], Split(1), Unstack("expert")),
            Rule(["q", "k", "v"], "qkv", Fuse(0, sizes=(4, 2, 1))),
            Rule("n.{expert}", "stacked", Stack("expert", 1)),
        ]
    )
    hf = {}
    for expert in (10, 2, 11, 0, 1, 3, 4, 5, 6, 7, 8, 9):
        hf[f"e.{expert}.one"] = torch.full((3, 5), expert)
        hf[f"e.{expert}.three"] = torch.full((3, 5), 100 + expert)
    hf["qkv"] = torch.arange(7)[:, None].expand(7, 2)
    hf["stacked"] = torch.arange(12)[None, :, None].expand(2, 12, 3)
    native = mapping.from_hf(hf)
    assert native["w13"].shape == (12, 6, 5)
    assert native["w13"][:, :3].unique(dim=1).flatten(1)[:, 0].tolist() == list(range(12))
    assert native["w13"][:, 3:].unique(dim=1).flatten(1)[:, 0].tolist() == list(range(100, 112))
    assert [native[k][:, 0].tolist() for k in "qkv"] == [[0, 1, 2, 3], [4, 5], [6]]
    assert all(bool((native[f"n.{e}"] == e).all()) for e in range(12))


def test_cast_declares_what_it_loses() -> None:
    with pytest.raises(MappingError, match="loses values and does not say so"):
        Rule("w", "h", Cast("float32", "bfloat16"))
    lossless = Mapping([Rule("w", "h", Cast("bfloat16", "float32"))])
    native = {"w": torch.randn(7, 3).bfloat16()}
    hf = lossless.to_hf(native)
    assert hf["h"].dtype == torch.float32
    equal(lossless.from_hf(hf), native)
    lossy = Mapping([Rule("w", "h", Cast("float32", "bfloat16", loss="8 bits of mantissa stay"))])
    value = {"w": torch.randn(7, 3)}
    out = lossy.to_hf(value)["h"]
    assert torch.equal(out, value["w"].bfloat16())
    assert lossy.from_hf({"h": out})["w"].dtype == torch.float32
    with pytest.raises(MappingError, match=r"mapping\.dtype"):
        lossy.to_hf({"w": torch.zeros(2, 2, dtype=torch.float16)})


@pytest.mark.parametrize(
    ("ops", "shape"),
    [
        ((RopeToHalf(6),), (8, 2)),
        ((Split(0),), (3, 2)),
        ((Split(0, sizes=(1, 1)),), (3, 2)),
        ((Squeeze(0),), (2, 2)),
        ((Transpose(0, 3),), (2, 2)),
        ((Deinterleave(0, 4),), (6, 2)),
    ],
)
def test_shapes_that_do_not_fit_are_said_in_terms_of_keys(ops: Any, shape: Any) -> None:
    with pytest.raises(MappingError, match=r"mapping\.shape(.|\n)*w \["):
        Mapping([rule_of(ops)]).to_hf({"w": torch.zeros(shape)})
