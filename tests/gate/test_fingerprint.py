"""Tensors that say where they belong: exact in every dtype, decodable however they are moved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.compare import explain
from conformance.fingerprint import EDGES, Positions, bits, edges, noise, same_bits
from conformance.template import Leaf

DTYPES = (
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
)


def decoded(positions: Positions) -> dict[str, torch.Tensor]:
    passes = [positions.state(i) for i in range(positions.passes)]
    return {k: positions.decode([p[k] for p in passes]) for k in positions.leaves}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_decoded_to_its_own_number(dtype: str) -> None:
    positions = Positions({"a": Leaf((7, 11), dtype), "b": Leaf((), dtype), "c": Leaf((3,), dtype)})
    for key, numbers in decoded(positions).items():
        assert torch.equal(numbers, positions.numbers(key))
    assert str(positions.place(int(positions.numbers("a")[2, 5]))) == "a[2, 5]"


def test_mixed_dtypes_aliases_and_empty_tensors() -> None:
    leaves = {
        "w": Leaf((50, 100), "float32"),
        "flag": Leaf((11,), "bool"),
        "none": Leaf((0, 3), "float32"),
        "table": Leaf((9, 2), "int64"),
        "head": Leaf((50, 100), "float32"),
    }
    positions = Positions(leaves, {"head": "w"})
    found = decoded(positions)
    assert torch.equal(found["head"], found["w"])
    every = torch.cat([found[k].reshape(-1) for k in leaves if k != "head"])
    assert sorted(every.tolist()) == list(range(1, positions.total))
    assert positions.owners(found["table"]) == {"table"}
    assert positions.place(0) is None


def test_a_declared_cast_between_floats_keeps_the_numbers() -> None:
    positions = Positions({"w": Leaf((100, 100), "float32")})
    for kind in (torch.bfloat16, torch.float16, torch.float64):
        digits = [positions.state(i)["w"].to(kind) for i in range(positions.passes)]
        assert torch.equal(positions.decode(digits), positions.numbers("w"))


def test_values_that_no_input_holds_are_unknown() -> None:
    positions = Positions({"w": Leaf((4, 4), "float32")})
    for wrong in (torch.zeros(4, 4), torch.full((4, 4), float("nan")), torch.rand(4, 4)):
        assert not positions.decode([wrong] * positions.passes).any()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 6), max_size=3), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=6,
    )
)
def test_any_state_dict_is_decoded(drawn: list[tuple[list[int], str]]) -> None:
    positions = Positions({f"k{i}": Leaf(tuple(s), d) for i, (s, d) in enumerate(drawn)})
    for key, numbers in decoded(positions).items():
        assert torch.equal(numbers, positions.numbers(key))


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_uses_many_bit_patterns_and_one_nan(dtype: str) -> None:
    value = noise({"k": Leaf((64, 64), dtype)}, 5)["k"]
    wide = value.is_floating_point() and value.element_size() > 1
    assert int(value.float().isnan().sum() if value.is_floating_point() else 0) == int(wide)
    if dtype != "bool":
        assert torch.unique(bits(value)).numel() > 100
    assert same_bits(value, noise({"k": Leaf((64, 64), dtype)}, 5)["k"])
    if dtype != "bool":
        assert not same_bits(value, noise({"k": Leaf((64, 64), dtype)}, 6)["k"])


def test_bits_tell_zero_from_negative_zero_and_resolve_lazy_signs() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    lazy = torch.complex(torch.ones(2), -torch.ones(2)).conj().imag
    assert lazy.is_neg()
    assert same_bits(lazy, torch.ones(2))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_noise_begins_with_what_a_clean_up_changes(dtype: str) -> None:
    value = noise({"k": Leaf((4, 5), dtype)}, 5)["k"].reshape(-1)[:EDGES]
    found = edges(value.dtype)
    assert torch.equal(bits(value).sort().values, bits(found).sort().values)
    assert str(found[0].item()) == "-0.0"
    assert found[1] > 0
    assert found[1] / 2 == 0
    assert found[2].isnan()
    assert found[3:5].tolist() == [float("inf"), float("-inf")]
    assert found[5] == torch.finfo(value.dtype).max
    assert 0 < found[6] < torch.finfo(value.dtype).smallest_normal


@pytest.mark.parametrize("shape", [(), (1,), (2,), (6,), (9,)])
def test_small_tensors_of_two_keys_differ(shape: tuple[int, ...]) -> None:
    state = noise({f"layers.{n}.norm": Leaf(shape, "bfloat16") for n in range(40)}, 5)
    assert len({tuple(bits(v).reshape(-1).tolist()) for v in state.values()}) == 40
    if len(shape) and shape[0] > 2:
        assert any(v.isnan().any() for v in state.values())


def test_a_tie_holds_no_nan_so_that_it_may_be_checked_with_equal() -> None:
    state = noise(LEAVES, 5, {"a": "b"})
    assert torch.equal(state["a"], state["b"])
    assert state["s"].isnan().any()


def test_which_nan_a_nan_is_does_not_matter_and_whether_it_is_one_does() -> None:
    quiet, other = (torch.tensor([n], dtype=torch.int16) for n in (0x7FC0, -1))
    assert same_bits(quiet.view(torch.bfloat16), other.view(torch.bfloat16))
    assert not same_bits(quiet.view(torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16))
    assert not same_bits(quiet, other)


def test_a_conjugate_and_exchanged_parts_are_seen() -> None:
    positions = Positions({"w": Leaf((4, 5), "complex64"), "v": Leaf((4, 5), "float32")})
    passes = [positions.state(i)["w"] for i in range(positions.passes)]
    assert torch.equal(positions.decode(passes), positions.numbers("w"))
    for wrong in (torch.conj, lambda v: torch.view_as_complex(torch.view_as_real(v).flip(-1))):
        assert not positions.decode([wrong(v) for v in passes]).any()


def test_a_cast_down_and_up_changes_noise() -> None:
    value = noise({"k": Leaf((8,), "float32")}, 1)["k"]
    assert not same_bits(value, value.bfloat16().float())


LEAVES = {
    "a": Leaf((12, 10), "float32"),
    "b": Leaf((12, 10), "float32"),
    "s": Leaf((12, 4, 6), "float32"),
    "q": Leaf((10, 10), "float32"),
}


def cause(key: str, change: object) -> str:
    positions = Positions(LEAVES)
    want = positions.numbers(key)
    return explain(positions, want, change(positions, want)).cause  # type: ignore[operator]


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("a", lambda p, w: p.numbers("b"), "holds b where a belongs"),
        ("q", lambda p, w: w.t(), "transposed"),
        ("a", lambda p, w: w.t().reshape(12, 10), "transposed"),
        ("a", lambda p, w: w.flip(0), "rows reordered: reversed"),
        ("a", lambda p, w: w[sorted(range(12), key=str)], "sorted as text"),
        ("a", lambda p, w: w.roll(6, 0), "halves exchanged"),
        ("a", lambda p, w: w.roll(1, 0), "shifted by 1"),
        ("a", lambda p, w: w.view(3, 2, 2, 10).transpose(1, 2).reshape(12, 10), "rotary"),
        ("a", lambda p, w: w.roll(1, 1), "columns reordered"),
        ("a", lambda p, w: torch.zeros_like(w), "no element comes from the input"),
        ("a", lambda p, w: w[[0, 0, *range(2, 12)]], "there twice"),
        ("s", lambda p, w: w[sorted(range(12), key=str)], "sorted as text"),
    ],
)
def test_a_difference_is_told_in_words(key: str, change: object, words: str) -> None:
    assert words in cause(key, change)


def test_a_slice_in_another_slices_place() -> None:
    positions = Positions(LEAVES)
    stack = positions.numbers("s")
    found = explain(positions, stack[2], stack[10])
    assert found.cause == "slice 10 of s where slice 2 belongs (numbers sorted as text)"
    assert (found.coordinate, found.expected, found.actual) == (
        "[0, 0]",
        "s[2, 0, 0]",
        "s[10, 0, 0]",
    )
    assert "off by one" in explain(positions, stack[2], stack[3]).cause
