"""Chapter `shapes`: shapes written and shapes returned, on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from conformance.checks._words import by_words, count
from conformance.lab import Lab, NotApplicable
from conformance.template import Leaf
from conformance.verdict import Finding

# Several values a byte: their shapes are those of the codes.
_PACKED = ("uint8", "int8", "float4")


def exact(lab: Lab) -> Iterator[Finding]:
    """Shapes written are those of an independent list."""
    wanted = {
        k: leaf
        for k, leaf in lab.hf.leaves.items()
        if leaf is not None and not leaf.dtype.startswith(_PACKED)
    }
    if not wanted:
        raise NotApplicable(f"{lab.hf.source} gives keys without shapes")
    yield from _compare("to_hf writes", wanted, lab.export.leaves, lab.hf.source)


def native(lab: Lab) -> Iterator[Finding]:
    """`from_hf` returns the model's shapes."""
    wanted = {k: leaf for k, leaf in lab.native.items() if not lab.native_only(k)}
    yield from _compare("from_hf returns", wanted, lab.imported.leaves, "the model")


def _compare(
    verb: str, wanted: Mapping[str, Leaf], have: Mapping[str, Leaf], oracle: str
) -> Iterator[Finding]:
    wrong = {
        key: (str(leaf.shape), str(have[key].shape), _cause(leaf.shape, have[key].shape))
        for key, leaf in wanted.items()
        if key in have and have[key].shape != leaf.shape
    }
    for (expected, actual, cause), keys in by_words(wrong):
        yield Finding(
            what=f"{verb} {count(len(keys), 'tensor')} in another shape",
            keys=tuple(keys),
            expected=expected,
            actual=actual,
            cause=cause,
            remedy="reshape or transpose as the target has it",
            oracle=oracle,
        )


def _cause(want: tuple[int, ...], have: tuple[int, ...]) -> str:
    if sorted(want) == sorted(have):
        return "axes are transposed"
    if [s for s in want if s != 1] == [s for s in have if s != 1]:
        return "an axis of size 1 is added or squeezed away"
    if len(want) == len(have) and sum(a != b for a, b in zip(want, have, strict=True)) == 1:
        axis = next(i for i, (a, b) in enumerate(zip(want, have, strict=True)) if a != b)
        more = "padding" if have[axis] > want[axis] else "a part"
        return f"{more} on axis {axis}: {have[axis]} instead of {want[axis]}"
    return "other sizes"
