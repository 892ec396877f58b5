"""Chapter `dtypes`: no dtype changes unless it is declared, whatever the model's dtype is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from conformance.checks._words import by_words, count
from conformance.lab import AdapterRaised, Lab
from conformance.subject import matches, template_of
from conformance.template import Leaf
from conformance.verdict import Finding
from torchtitan_ckpt.manifest import is_floating


def policy(lab: Lab) -> Iterator[Finding]:
    """Dtypes out are dtypes in: the model's own, all in bf16, and several in one model."""
    seen: set[str] = set()
    for name, native in _variants(lab):
        try:
            yield from _variant(lab, name, native, seen)
        except AdapterRaised as error:
            if native is lab.native:
                raise
            yield Finding(
                what=f"{error.direction} refuses {name}",
                keys=tuple(key for key in native if key in str(error))[:1] or tuple(native)[:1],
                expected="each tensor converted in the dtype that it has",
                actual=str(error),
                cause="a dtype is refused, or tensors of several dtypes in one model",
                remedy="move tensors whatever their dtype is, or expect this with a reason",
            )
            return


def _variant(lab: Lab, name: str, native: Mapping[str, Leaf], seen: set[str]) -> Iterator[Finding]:
    own = native is lab.native
    out = lab.export if own else lab.trace("to_hf", native)
    wrong: dict[str, tuple[str, str]] = {}
    for key, leaf in out.leaves.items():
        kinds = {native[s].dtype for s in out.sources[key] if s in native}
        want = _declared(lab, key) or (next(iter(kinds)) if len(kinds) == 1 else None)
        if want and leaf.dtype != want and not lab.lossy(key):
            wrong[key] = (want, leaf.dtype)
    yield from _findings("to_hf", name, wrong, seen)
    back = lab.imported if own else lab.trace("from_hf", out.leaves)
    wrong = {}
    for key, leaf in back.leaves.items():
        kinds = {out.leaves[s].dtype for s in back.sources[key] if s in out.leaves}
        if key not in native or not kinds or lab.lossy(key):
            continue
        if leaf.dtype != native[key].dtype and leaf.dtype not in kinds:
            wrong[key] = (" or ".join(sorted({native[key].dtype, *kinds})), leaf.dtype)
    yield from _findings("from_hf", name, wrong, seen)


_DEALT = ("bfloat16", "float32", "float16")


def _variants(lab: Lab) -> Iterator[tuple[str, Mapping[str, Leaf]]]:
    yield "the model's own dtypes", lab.native
    if (narrow := bf16(lab)) != lab.native:
        yield "a bf16 model", narrow
    for deal in range(deals(lab) if len(lab.export.leaves) <= 5000 else 1):
        yield "a model of several dtypes", dealt(lab, deal)


def bf16(lab: Lab) -> dict[str, Leaf]:
    """The native leaves of a model trained in bfloat16."""
    return {k: _cast(leaf, "bfloat16") for k, leaf in lab.native.items()}


def deals(lab: Lab) -> int:
    """How many deals tell any two templates apart: a dtype taken from another tensor shows."""
    number = 1
    while len(_DEALT) ** number < len(_templates(lab)):
        number += 1
    return number


def dealt(lab: Lab, deal: int) -> dict[str, Leaf]:
    """The native leaves with dtypes dealt out to whole templates, so that no stack mixes them."""
    templates = _templates(lab)
    joined = {s for sources in lab.export.sources.values() if len(sources) > 1 for s in sources}
    dtype = {t: _DEALT[i // len(_DEALT) ** deal % len(_DEALT)] for i, t in enumerate(templates)}
    return {
        k: _cast(leaf, "bfloat16" if k in joined else dtype[template_of(lab.alias(k) or k)])
        for k, leaf in lab.native.items()
    }


def _templates(lab: Lab) -> list[str]:
    return sorted({template_of(lab.alias(k) or k) for k in lab.native})


def _cast(leaf: Leaf, dtype: str) -> Leaf:
    """Another dtype for what may have one: wide floats."""
    return Leaf(leaf.shape, dtype) if leaf.dtype in _DEALT else leaf


def _declared(lab: Lab, key: str) -> str | None:
    pattern = matches(key, lab.may.dtypes)
    return lab.may.dtypes[pattern] if pattern else None


def _findings(
    direction: str, name: str, wrong: Mapping[str, tuple[str, str]], seen: set[str]
) -> Iterator[Finding]:
    for (expected, actual), keys in by_words(wrong):
        new = [key for key in keys if f"{direction} {key}" not in seen]
        seen.update(f"{direction} {key}" for key in keys)
        if new:
            yield Finding(
                what=f"{direction} changes the dtype of {count(len(new), 'tensor')}",
                keys=tuple(new),
                expected=f"{expected} ({name})",
                actual=actual,
                cause="an integer table is cast to a float: large values are lost"
                if not is_floating(expected.split(" ")[0]) and is_floating(actual)
                else "a cast that nobody declared",
                remedy="keep the dtype, or declare it (dtypes)",
            )
