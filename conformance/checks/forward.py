"""Chapter `forward`: another implementation computes the same from the same weights."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.lab import Lab, NotApplicable, theirs
from conformance.verdict import Finding

_TOLERANCE = 1e-4


def logits(lab: Lab) -> Iterator[Finding]:
    """Logits of both models after a conversion; the subject's `forward` runs them."""
    if lab.subject.forward is None:
        raise NotApplicable("the subject names no pair of models that can run")
    with theirs("the forward pass"):
        ours, other, name = lab.subject.forward(lab)
    scale = float(other.abs().max()) or 1.0
    # fp32 sums in another order; wrong weights give differences of the size of the logits.
    off = ~((ours - other).abs() <= _TOLERANCE * scale)
    if not off.any():
        return
    first = int(off.flatten(0, -3).any(0).any(-1).int().argmax())
    yield Finding(
        what="the logits of two implementations differ",
        keys=(lab.subject.name,),
        coordinate=f"from token {first} on",
        expected=f"equal to {_TOLERANCE} of the largest logit",
        actual=f"{float((ours - other).abs().max()) / scale:.2e} of it",
        # A lone token sees itself alone: its attention weighs nothing.
        cause="the first token is right: q, k, or the rotary order of their rows is not"
        if first
        else "weights that are in place and wrong: a permutation, a swap, a missing norm",
        remedy="compare each direction with another implementation's conversion (reference)"
        if lab.subject.reference is None
        else "see the findings of the chapter values",
        oracle=name,
    )
