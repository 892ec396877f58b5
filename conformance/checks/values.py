"""Chapter `values`: every element arrives where it belongs, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch

from conformance.checks._words import by_template, by_words, count, first_difference
from conformance.checks.values_drawn import drawn
from conformance.checks.values_flow import dtensor, load, tied
from conformance.checks.values_pinned import cast, pinned_export, pinned_import, steady
from conformance.checks.values_traced import strays, told
from conformance.compare import explain
from conformance.fingerprint import Positions, State, same_bits, settled
from conformance.lab import AdapterRaised, Direction, Lab
from conformance.subject import matches
from conformance.template import Leaf
from conformance.verdict import Finding, Told

__all__ = [
    "drawn",
    "dtensor",
    "hf_round_trip",
    "load",
    "native_round_trip",
    "pinned_export",
    "pinned_import",
    "provenance",
    "tied",
]

_BLIND = (
    "no second implementation is named (reference or forward): tensors of one shape that are "
    "exchanged, or rows in another order, are not seen where both directions do the same"
)
_LOST = "precision or a bit is lost"
_CLEANED = "NaN and infinities are replaced by numbers"


def provenance(lab: Lab) -> Iterator[Finding | Told]:
    """Each element written is an element of the tensors its key is made from, once."""
    if lab.subject.reference is None and lab.subject.forward is None:
        lab.notes.append(_BLIND)
    wrong = _not_moved(lab)
    found = itertools.chain(_changed(wrong), _lost(lab))
    yield from steady(lab, "to_hf", lab.positions, lab.exported, found)


def _not_moved(lab: Lab) -> dict[str, tuple[str, str, str]]:
    """Coordinate, expected and actual of what does not hold each element of its sources once."""
    wrong: dict[str, tuple[str, str, str]] = {}
    for key, numbers in lab.exported.items():
        sources = lab.export.sources.get(key, frozenset())
        flat = numbers.reshape(-1)
        if not flat.numel() or lab.lossy(key) or cast(lab, key) or not sources:
            continue
        allowed = sources | {lab.alias(s) or s for s in sources}
        within, distinct = _within(lab.positions, flat, allowed)
        if within and distinct == flat.numel():
            continue
        owners = lab.positions.owners(flat)
        unknown = int((flat == 0).sum())
        if unknown or owners - allowed:
            first = int((flat == 0).int().argmax()) if unknown else 0
            wrong[key] = (
                str([first]),
                f"an element of {', '.join(sorted(sources)[:3])}",
                f"{unknown} of {flat.numel()} elements hold a value that no input holds"
                if unknown
                else f"values of {', '.join(sorted(owners - allowed)[:3])}",
            )
        else:
            wrong[key] = (
                "",
                "each element once",
                f"{flat.numel() - distinct} elements repeat others",
            )
    return wrong


def _changed(wrong: Mapping[str, tuple[str, str, str]]) -> Iterator[Finding]:
    for (coordinate, expected, actual), keys in _grouped(wrong):
        yield Finding(
            what=f"to_hf changes the values of {count(len(keys), 'tensor')}",
            keys=tuple(keys),
            coordinate=coordinate,
            expected=expected,
            actual=actual,
            cause="arithmetic on the way, or a slice written twice",
            remedy="move elements only, or declare the rule (lossy) with a reason",
        )


def _within(
    positions: Positions, flat: torch.Tensor, keys: set[str] | frozenset[str]
) -> tuple[bool, int]:
    """Whether all numbers belong to `keys`, and how many are distinct. Linear, not sorted."""
    distinct = 0
    inside = torch.zeros(flat.shape, dtype=torch.bool)
    for key in {positions.source(k) for k in keys}:
        base, size = positions.span(key)
        here = (flat >= base) & (flat < base + size)
        inside |= here
        mine = flat if bool(here.all()) else flat[here]
        if not mine.numel():
            continue
        # Only the span that occurs: a slice of a stack is small, the stack is not.
        low = int(mine.min())
        seen = torch.zeros(int(mine.max()) - low + 1, dtype=torch.bool)
        seen[mine - low] = True
        distinct += int(seen.sum())
    return bool(inside.all()), distinct


def _grouped(
    wrong: Mapping[str, tuple[str, str, str]],
) -> Iterator[tuple[tuple[str, str, str], list[str]]]:
    for keys in by_template(wrong).values():
        yield wrong[keys[0]], keys


def _lost(lab: Lab) -> Iterator[Finding]:
    """Two files of one source must not hold the same slice, while another slice is lost."""
    written: dict[str, list[str]] = {}
    for key, sources in lab.export.sources.items():
        if len(sources) == 1 and key in lab.exported and not lab.hf_only(key):
            written.setdefault(next(iter(sources)), []).append(key)
    for source, keys in written.items():
        total = sum(lab.exported[k].numel() for k in keys)
        if len(keys) < 2 or source not in lab.positions.leaves or lab.lossy(source):
            continue
        if any(lab.lossy(k) or cast(lab, k) for k in keys):
            continue
        flat = torch.cat([lab.exported[k].reshape(-1) for k in keys])
        within, distinct = _within(lab.positions, flat, {source})
        if within and distinct < total and total == lab.positions.leaves[source].numel:
            twice = next(
                (
                    k
                    for i, k in enumerate(keys)
                    for other in keys[:i]
                    if torch.equal(lab.exported[k], lab.exported[other])
                ),
                keys[-1],
            )
            yield Finding(
                what=f"to_hf writes {total - distinct} elements twice and loses as many",
                keys=(twice, source),
                expected="each slice of the source once",
                actual=f"{twice} repeats another slice",
                cause="an index that does not run over all slices",
                remedy="write every slice once",
            )


def native_round_trip(lab: Lab) -> Iterator[Finding]:
    """`from_hf(to_hf(x))` gives back every tensor of x, and every bit."""
    others = strays(lab)
    yield from told(others, "from_hf(to_hf(x)) makes")
    state = lab.noise(lab.value_native)
    adapter = lab.adapter()
    back = lab.convert("from_hf", lab.convert("to_hf", state, adapter), adapter)
    rest = {key: value for key, value in state.items() if key not in others}
    yield from _bits(lab, "from_hf(to_hf(x))", "x", rest, back, lab.positions)


def hf_round_trip(lab: Lab) -> Iterator[Finding]:
    """`to_hf(from_hf(y))` gives back every bit of y, where y is what published files hold."""
    leaves = {k: _as_published(lab, k, leaf) for k, leaf in lab.value_hf.items()}
    state = lab.noise(leaves, salt=1)
    adapter = lab.adapter()
    there = lab.convert("from_hf", state, adapter)
    # Native keys that no file holds keep the model's own values; what import should have
    # returned and did not is the finding of `keys`.
    kept = lab.noise({k: v for k, v in lab.value_native.items() if k not in there}, salt=2)
    back = lab.convert("to_hf", {**there, **kept}, adapter)
    made = {
        k: v
        for k, v in back.items()
        if lab.export.sources.get(k, frozenset()) <= there.keys() and not cast(lab, k)
    }
    yield from _bits(lab, "to_hf(from_hf(y))", "y", state, made, lab.hf_positions)


def _as_published(lab: Lab, key: str, leaf: Leaf) -> Leaf:
    """Files are bf16 except where the list, or a declared policy, says otherwise."""
    listed = lab.listed.get(key)
    keeps = matches(key, lab.may.dtypes) or (listed is not None and listed.dtype == "float32")
    wide = leaf.dtype in ("float32", "bfloat16", "float16")
    return Leaf(leaf.shape, "bfloat16") if wide and not keeps else leaf


def _bits(
    lab: Lab, what: str, name: str, sent: State, back: State, positions: Positions
) -> Iterator[Finding]:
    wrong: dict[str, tuple[str, str]] = {}
    details: dict[str, tuple[str, str, str]] = {}
    for key, value in sent.items():
        # Missing keys and other shapes are the findings of `keys` and `shapes`.
        if key not in back or lab.lossy(key) or lab.native_only(key) or lab.hf_only(key):
            continue
        if back[key].numel() != value.numel() or same_bits(value, back[key]):
            continue
        if back[key].dtype != value.dtype:
            sent_as, came_as = (str(v.dtype).removeprefix("torch.") for v in (value, back[key]))
            details[key] = ("", sent_as, came_as)
            wrong[key] = ("dtype", "the dtype changed on the way")
            continue
        other = back[key].reshape(value.shape)
        details[key] = first_difference(value, other)
        same_set = torch.equal(*(settled(v).reshape(-1).sort().values for v in (value, other)))
        lost = _CLEANED if _only_numbers_came(value, other) else _LOST
        wrong[key] = ("order", "elements are reordered") if same_set else ("values", lost)
    causes = _why(lab, positions, {k for k, (kind, _) in wrong.items() if kind != "dtype"})
    for (kind, cause), keys in by_words(wrong):
        coordinate, expected, actual = details[keys[0]]
        yield Finding(
            what=f"{what} is not {name} for {count(len(keys), 'tensor')}"
            if kind != "dtype"
            else f"{what} changes the dtype of {count(len(keys), 'tensor')}",
            keys=tuple(keys),
            coordinate=coordinate,
            expected=expected,
            actual=actual,
            cause=causes.get(keys[0], cause),
            remedy="make one direction the exact inverse of the other, or declare the loss (lossy)",
        )


def _only_numbers_came(sent: torch.Tensor, back: torch.Tensor) -> bool:
    """Whether all that came back otherwise was NaN or infinite."""
    if not sent.is_floating_point() or sent.element_size() == 1:
        return False
    return not bool(sent.isfinite()[settled(sent) != settled(back)].any())


def _why(lab: Lab, positions: Positions, keys: set[str]) -> dict[str, str]:
    """Causes of a failed round trip, found by sending element numbers round.

    A key whose numbers all come back is not here: its elements are in place, and other bits.
    """
    if not keys:
        return {}
    native = positions is lab.positions
    first: Direction = "to_hf" if native else "from_hf"
    second: Direction = "from_hf" if native else "to_hf"
    digits: dict[str, list[torch.Tensor]] = {}
    try:
        for which in range(positions.passes):
            adapter = lab.adapter()
            out = lab.convert(first, positions.state(which), adapter)
            for key, value in lab.convert(second, out, adapter).items():
                if key in keys:
                    digits.setdefault(key, []).append(value)
    except AdapterRaised:
        return {}
    causes = {}
    for key, values in digits.items():
        if len(values) == positions.passes:
            sent, numbers = positions.numbers(key).reshape(-1), positions.decode(values)
            if numbers.numel() == len(sent) and not torch.equal(numbers.reshape(-1), sent):
                causes[key] = explain(positions, positions.numbers(key), numbers).cause
    return causes
