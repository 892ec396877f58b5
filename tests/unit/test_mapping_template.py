"""Templates: what matches, and whether two can match one key - exact, against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ckpt.errors import MappingError
from torchtitan_ckpt.mapping import Mapping, Rule
from torchtitan_ckpt.mapping.template import overlap, parse, tokens


def bind(text: str, key: str, **domains: range) -> dict[str, int] | None:
    template = parse(text)
    signature, numbers = tokens(key)
    return template.bind(numbers, domains) if signature == template.signature else None


def test_whole_keys_and_canonical_numbers_only() -> None:
    assert bind("layers.{layer}.w1", "layers.11.w1") == {"layer": 11}
    assert bind("layers.{layer}.w1", "layers.11.w13") is None
    assert bind("layers.{layer}.w1", "model.layers.11.w1") is None
    assert bind("layers.{layer}.w1", "layers.011.w1") is None
    assert bind("layers.{layer}.w1", "layers.0.w1") == {"layer": 0}
    assert bind("layers.{layer}.w1", "layers.1.1.w1") is None
    assert bind("layers.{layer}.w1", "layers.x.w1") is None
    assert bind("a.{x}.{x}", "a.3.3") == {"x": 3}
    assert bind("a.{x}.{x}", "a.3.4") is None
    assert bind("m.{mtp+61}.w", "m.62.w") == {"mtp": 1}
    assert bind("m.{mtp+61}.w", "m.60.w") is None
    assert bind("m.{mtp}.w", "m.4.w", mtp=range(4)) is None


def test_render_is_the_inverse_of_bind() -> None:
    template = parse("layers.{layer}.moe.experts.{expert}.w{expert}.12")
    assert template.render({"layer": 3, "expert": 11}) == "layers.3.moe.experts.11.w11.12"
    assert parse("m.{mtp+61}.w").render({"mtp": 0}) == "m.61.w"
    assert template.partial({"layer": 3}) == "layers.3.moe.experts.{expert}.w{expert}.12"


@pytest.mark.parametrize(
    "text", ["", "a.{}", "a.{x", "a.x}", "a.{x y}", "a.{x}{y}", "a.1{x}", "a.{x}1", "{x+}", "a.{1}"]
)
def test_bad_templates_are_refused(text: str) -> None:
    with pytest.raises(MappingError, match="bad-template"):
        parse(text)


def test_overlap_is_decided_by_domains_not_by_order() -> None:
    main, mtp = parse("layers.{layer}.w"), parse("layers.{mtp+61}.w")
    assert overlap(main, {"layer": range(61)}, mtp, {"mtp": range(1)}) is None
    assert overlap(main, {"layer": range(62)}, mtp, {"mtp": range(1)}) == "layers.61.w"
    assert overlap(main, {}, mtp, {"mtp": range(1)}) == "layers.61.w"
    assert overlap(main, {}, parse("layers.5.w"), {}) == "layers.5.w"
    assert overlap(main, {}, parse("layers.05.w"), {}) is None
    a, b = parse("a.{x}.{x}"), parse("a.{y}.{z+1}")
    assert overlap(a, {"x": range(3)}, b, {"y": range(9), "z": range(2, 9)}) is None
    assert overlap(a, {"x": range(4)}, b, {"y": range(9), "z": range(2, 9)}) == "a.3.3"
    odd, even = frozenset({1, 3}), frozenset({0, 2})
    assert overlap(main, {"layer": odd}, main, {"layer": even}) is None


PIECES = st.sampled_from(["{x}", "{y}", "{x+2}", "{y+1}", "3", "03", "k"])
DOMAIN = st.one_of(st.none(), st.frozensets(st.integers(0, 5), max_size=4))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PIECES, min_size=1, max_size=3),
    st.lists(PIECES, min_size=1, max_size=3),
    DOMAIN,
    DOMAIN,
    DOMAIN,
    DOMAIN,
)
def test_overlap_agrees_with_brute_force(left, right, ax, ay, bx, by) -> None:
    a, b = parse("t." + ".".join(left)), parse("t." + ".".join(right))
    in_a = {n: d for n, d in (("x", ax), ("y", ay)) if d is not None and n in a.names}
    in_b = {n: d for n, d in (("x", bx), ("y", by)) if d is not None and n in b.names}

    def keys(template, domains):
        # Values beyond 8 add nothing: constants and shifts are below 4, domains below 6.
        choices = [sorted(domains.get(n, range(9))) for n in template.names]
        rows = itertools.product(*choices)
        return {template.render(dict(zip(template.names, row, strict=True))) for row in rows}

    common = keys(a, in_a) & keys(b, in_b)
    found = overlap(a, in_a, b, in_b)
    assert (found is None) == (not common)
    if found is not None:
        for template, domains in ((a, in_a), (b, in_b)):
            signature, numbers = tokens(found)
            assert signature == template.signature
            assert template.bind(numbers, domains) is not None


def test_a_table_with_two_rules_for_one_key_is_refused_whatever_the_order() -> None:
    rules = [Rule("a.{layer}.w", "x.{layer}.w"), Rule("a.3.w", "y"), Rule("b", "x.7.w")]
    for order in itertools.permutations(rules):
        with pytest.raises(MappingError) as caught:
            Mapping(order)
        assert {p.where for p in caught.value.problems} == {"a.3.w", "x.7.w"}
        assert all(p.code == "mapping.two-rules" for p in caught.value.problems)
