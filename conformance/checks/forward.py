"""Chapter `forward`: another implementation computes the same from the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from conformance.lab import Lab, NotApplicable
from conformance.verdict import Finding


def logits(lab: Lab) -> Iterator[Finding]:
    """Logits of both models after a conversion; the subject's `forward` runs them."""
    if lab.subject.forward is None:
        raise NotApplicable("the subject names no pair of models that can run")
    ours, theirs, name = lab.subject.forward(lab)
    scale = float(theirs.abs().max()) or 1.0
    worst = float((ours - theirs).abs().max()) / scale
    # fp32 sums in another order; wrong weights give differences of the size of the logits.
    if not torch.isfinite(ours).all() or worst > 1e-4:
        yield Finding(
            what="the logits of two implementations differ",
            keys=(lab.subject.name,),
            expected=f"equal to 1e-4 of the largest logit ({name})",
            actual=f"{worst:.2e}",
            cause="weights that are in place and wrong: a permutation, a swap, a missing norm",
            remedy="see the findings of the chapter values",
            oracle=name,
        )
