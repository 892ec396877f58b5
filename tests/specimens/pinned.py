"""Specimens that only an independent conversion can see: everything goes round unharmed."""

from __future__ import annotations

from typing import Any

import torch

from conformance import Capabilities
from tests.specimens.edits import (
    back,
    edited,
    interleaved_to_stacked,
    renames,
    renumber,
    stacked_to_interleaved,
    swap,
    value,
)
from tests.specimens.right import HEADS, KV, half, interleave
from tests.specimens.specimen import BLIND, Specimen


def pinned() -> list[Specimen]:
    q, k = r"self_attn\.q_proj", r"self_attn\.k_proj"

    def turn(v: Any) -> Any:
        return v.transpose(-1, -2)

    def heads(v: Any, n: int, m: int) -> Any:
        """Permuted with another number of heads than the right one undoes."""
        return half(interleave(v, n), m)

    def undo(v: Any, n: int, m: int) -> Any:
        return half(interleave(v, m), n)

    norms = swap("q_norm", "k_norm")
    gates = swap("gate_proj", "up_proj")
    ends = swap("lm_head", "model.embed_tokens")
    export, imports = "values.pinned-export", "values.pinned-import"
    # Under each other's names in one layer, which is none of those that values are checked on.
    elsewhere: dict[str, Any] = {"values_on": (0,)}
    attention = r"layers\.4\.(?:self_)?attn\.[qk]_norm"
    names = renames(attention, {"q_norm": "k_norm", "k_norm": "q_norm"})
    return [
        Specimen(
            "norms-of-another-layer",
            export,
            "4.self_attn.q_norm",
            edited(names),
            "NAM-01",
            True,
            elsewhere,
        ),
        Specimen(
            "norms-of-another-layer-on-import",
            imports,
            "4.attn.q_norm",
            edited(before_import=names),
            "NAM-01",
            True,
            elsewhere,
        ),
        Specimen(
            "norms-of-another-layer-seen-by-the-round-trip",
            "values.native-round-trip",
            "4.attn.q_norm",
            edited(names),
            "NAM-01",
            True,
            {**elsewhere, **BLIND},
        ),
        Specimen("norms-swapped-on-export", export, "q_norm", edited(norms), "NAM-01"),
        Specimen(
            "norms-swapped-both-ways",
            export,
            "q_norm",
            edited(norms, before_import=norms),
            "NAM-01",
        ),
        Specimen(
            "norms-swapped-on-import", imports, "q_norm", edited(before_import=norms), "NAM-01"
        ),
        Specimen(
            "gate-and-up-swapped", export, "gate_proj", edited(gates, before_import=gates), "FUS-01"
        ),
        Specimen(
            "gate-and-up-swapped-on-import", imports, "w13", edited(before_import=gates), "FUS-01"
        ),
        Specimen(
            "declared-loss-hides-an-order",
            export,
            "embed_tokens",
            edited(
                value("embed_tokens", lambda v: v.roll(1, 0)),
                before_import=value("embed_tokens", lambda v: v.roll(-1, 0)),
            ),
            "LAY-04",
            options={"capabilities": Capabilities(lossy={"*tok*.weight": "padded rows"})},
        ),
        Specimen("ends-swapped", export, "lm_head", edited(ends, before_import=ends), "TIE-01"),
        Specimen(
            "rope-on-export-only",
            imports,
            "attn.wq",
            edited(before_import=value(q, lambda v: half(v, HEADS))),
            "LAY-08",
        ),
        Specimen(
            "rope-on-import-only",
            export,
            "q_proj",
            edited(value(q, lambda v: interleave(v, HEADS))),
            "LAY-08",
        ),
        Specimen(
            "rope-in-neither",
            export,
            "q_proj",
            edited(
                value(q, lambda v: interleave(v, HEADS)),
                before_import=value(q, lambda v: half(v, HEADS)),
            ),
            "LAY-08",
        ),
        Specimen(
            "rope-the-other-way-round",
            export,
            "k_proj",
            edited(
                value(k, lambda v: interleave(interleave(v, KV), KV)),
                before_import=value(k, lambda v: half(half(v, KV), KV)),
            ),
            "LAY-08",
        ),
        Specimen(
            "rope-with-wrong-heads",
            export,
            "q_proj",
            edited(
                value(q, lambda v: heads(v, HEADS, 1)),
                before_import=value(q, lambda v: undo(v, HEADS, 1)),
            ),
            "LAY-06",
        ),
        Specimen(
            "rope-with-q-heads-for-k",
            export,
            "k_proj",
            edited(
                value(k, lambda v: heads(v, KV, 3)),
                before_import=value(k, lambda v: undo(v, KV, 3)),
            ),
            "LAY-06",
        ),
        Specimen(
            "interleaved-experts",
            export,
            "gate_proj",
            edited(
                before_export=value(r"moe\.w13", interleaved_to_stacked),
                imports=value(r"moe\.w13", stacked_to_interleaved),
            ),
            "EXP-01",
        ),
        Specimen(
            "square-not-transposed",
            export,
            "mixer",
            edited(value("mixer", turn), before_import=value("mixer", turn)),
            "EXP-03",
        ),
        Specimen(
            "square-transposed-twice-on-import",
            imports,
            "mix.weight",
            edited(None, value(r"mix\.weight", turn)),
            "EXP-04",
        ),
        Specimen(
            "bias-halves-exchanged",
            export,
            "qk.bias",
            edited(
                value(r"qk\.bias", lambda v: torch.cat([v[18:], v[:18]])),
                before_import=value(r"qk\.bias", lambda v: torch.cat([v[12:], v[:12]])),
            ),
            "FUS-01",
        ),
        Specimen(
            "experts-as-text-on-import",
            imports,
            "moe.w2",
            edited(before_import=renumber("down_proj", 1, back(12))),
            "EXP-02",
        ),
        Specimen(
            "experts-rolled",
            export,
            "down_proj",
            edited(
                renumber("down_proj", 1, lambda i: (i + 1) % 12),
                before_import=renumber("down_proj", 1, lambda i: (i - 1) % 12),
            ),
            "EXP-02",
        ),
        Specimen(
            "first-and-last-layer-exchanged",
            export,
            "o_proj",
            edited(
                renumber("o_proj", 0, lambda i: {0: 11, 11: 0}.get(i, i)),
                before_import=renumber("o_proj", 0, lambda i: {0: 11, 11: 0}.get(i, i)),
            ),
            "NAM-05",
        ),
        Specimen(
            "columns-reversed",
            export,
            "down_proj",
            edited(
                value("down_proj", lambda v: v.flip(1)),
                before_import=value("down_proj", lambda v: v.flip(1)),
            ),
            "EXP-05",
        ),
        Specimen(
            "rows-shifted-on-import",
            imports,
            "tok.weight",
            edited(None, value(r"^tok", lambda v: v.roll(1, 0))),
            "LAY-04",
        ),
    ]
