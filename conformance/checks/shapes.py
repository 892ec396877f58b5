"""Chapter `shapes`: shapes written and shapes returned, on meta tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from conformance.checks._words import by_words, count
from conformance.lab import Lab, NotApplicable
from conformance.template import Leaf
from conformance.verdict import Finding

_PACKED = ("uint8", "int8", "float4")


def exact(lab: Lab) -> Iterator[Finding]:
    """Shapes written are those of an independent list, and of the reference where it has none."""
    written = lab.export.leaves
    # Several values a byte, where no others are written: the shapes are those of the codes.
    wanted = {
        k: leaf
        for k, leaf in lab.hf.leaves.items()
        if leaf is not None
        and not (leaf.dtype.startswith(_PACKED) and k in written and written[k].dtype != leaf.dtype)
    }
    others = _of_reference(lab, [k for k in lab.hf.leaves if k not in wanted])
    if not (wanted or others):
        raise NotApplicable(f"{lab.hf.source} gives keys without shapes")
    yield from _compare("to_hf writes", wanted, written, lab.hf.source)
    if others:
        yield from _compare("to_hf writes", others, written, f"reference {lab.reference.name}")


def _of_reference(lab: Lab, keys: Collection[str]) -> dict[str, Leaf]:
    """What the reference writes under these keys; nothing where there is no reference."""
    if not keys:
        return {}
    try:
        theirs = lab.trace("to_hf", lab.native, lab.ask).leaves
    except NotApplicable:
        return {}
    return {k: theirs[k] for k in keys if k in theirs}


def native(lab: Lab) -> Iterator[Finding]:
    """`from_hf` returns the model's shapes, also of what no file holds."""
    yield from _compare("from_hf returns", lab.native, lab.imported.leaves, "the model")


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
