"""Adapters in which one check sees what no other would find, not even the search behind it.

A check that comes after another (`Check.after`) is blocked when that one fails, and may find the
same fault when it is not. Here it does not: what is wrong is excused there, or is no case of its.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from conformance import Capabilities
from tests.specimens.edits import add, drop, edited, renumber, value, via
from tests.specimens.right import Right, State
from tests.specimens.specimen import BLIND, HEAD, TIED, Specimen

COPY = "model.layers.12.embed_tokens.weight"
BIAS = "*.moe.bias"


class LongStagesFromZero(Right):
    """Five layers or more without the first are a stage, and a stage counts from zero.

    Searches draw no part of more than four layers.
    """

    def to_hf(self, state_dict: State) -> State:
        out = super().to_hf(state_dict)
        numbers = {int(m[1]) for key in out if (m := re.match(r"model\.layers\.(\d+)\.", key))}
        if 0 in numbers or len(numbers) < 5:
            return out
        return renumber(r"^model\.layers", 0, lambda i: i - min(numbers))(out)


class BiasOfOnes(Right):
    """Files have no bias of the router; a model that is loaded gets ones in its place."""

    fill = 1.0

    def to_hf(self, state_dict: State) -> State:
        return super().to_hf({k: v for k, v in state_dict.items() if "moe.bias" not in k})

    def from_hf(self, hf_state_dict: State) -> State:
        out = super().from_hf(hf_state_dict)
        return out | {
            key.replace("w2", "bias"): torch.full((len(w2),), self.fill, dtype=w2.dtype)
            for key, w2 in out.items()
            if key.endswith("moe.w2")
        }


class BiasOfZeros(BiasOfOnes):
    fill = 0.0


class BiasOfOneElement(BiasOfOnes):
    def from_hf(self, hf_state_dict: State) -> State:
        return value("moe.bias", lambda v: v[:1])(super().from_hf(hf_state_dict))


class HeadThroughBf16(Right):
    """Both names of a tied pair are read, the second one rounded."""

    def from_hf(self, hf_state_dict: State) -> State:
        out = super().from_hf(hf_state_dict)
        if HEAD in hf_state_dict:
            return value("^head", via(torch.bfloat16))(out)
        return out | {"head.weight": out["tok.weight"]} if "tok.weight" in out else out


class ScaleOfTheFirst(Right):
    """The experts of a layer share a scale, and it is taken from the one that comes first."""

    def from_hf(self, hf_state_dict: State) -> State:
        out = super().from_hf(hf_state_dict)
        for key in [key for key in out if key.endswith("moe.w2")]:
            start = f"model.{key.removesuffix('moe.w2')}mlp.experts."
            first = next(v for k, v in hf_state_dict.items() if k.startswith(start) and "down" in k)
            out[key] = out[key] * first[-1:, -1:].sign()
        return out


def _copies(source: str) -> type:
    """Files hold a copy of the embedding for a further layer: it is made of `source`."""
    return edited(
        add(COPY, lambda state: state[source].clone(), source),
        before_import=drop(re.escape(COPY)),
    )


def _reference(adapter: type) -> Any:
    """The right one of a pair of adapters as the independent side."""
    found: Any = adapter()
    found.name = "the right adapter"
    return found


def unseen() -> list[Specimen]:
    through_fp16 = edited(None, value(r"^norm", via(torch.float16)))
    norm_with_axis = edited(None, value(r"^norm", lambda v: v.unsqueeze(0)))
    rounded = Capabilities(lossy={"norm.weight": "the model rounds it"})
    scaled = Capabilities(lossy=dict.fromkeys(("*.moe.w2", "*.down_proj.weight"), "a common scale"))
    copied = {
        "listed": False,
        "referenced": _reference(_copies("model.embed_tokens.weight")),
        "capabilities": Capabilities(hf_only={COPY: "a copy, for a further layer"}),
    }
    filled = {
        "listed": False,
        "referenced": _reference(BiasOfZeros),
        "capabilities": Capabilities(native_only={BIAS: "files have none"}),
    }
    rows: list[tuple[str, str, str, type, str, dict[str, Any]]] = [
        ("long-stages-from-zero", "keys.partial", "layers.", LongStagesFromZero, "OPT-18", BLIND),
        (
            "lossy-norm-with-an-axis",
            "shapes.native",
            "norm.weight",
            norm_with_axis,
            "STR-02",
            BLIND | {"capabilities": rounded},
        ),
        (
            "native-only-of-one-element",
            "shapes.native",
            "moe.bias",
            BiasOfOneElement,
            "STR-02",
            BLIND | {"capabilities": filled["capabilities"]},
        ),
        ("copy-of-the-head", "values.pinned-export", COPY, _copies(HEAD), "TIE-01", copied),
        ("bias-of-ones", "values.pinned-import", "moe.bias", BiasOfOnes, "", filled),
        (
            "tied-head-through-bf16",
            "values.native-round-trip",
            "head.weight",
            HeadThroughBf16,
            "DTY-05",
            TIED,
        ),
        (
            "lossy-norm-through-fp16",
            "values.hf-round-trip",
            "model.norm.weight",
            through_fp16,
            "DTY-05",
            BLIND | {"capabilities": rounded},
        ),
        (
            "scale-of-the-first-expert",
            "purity.order",
            "moe.w2",
            ScaleOfTheFirst,
            "EXP-02",
            BLIND | {"capabilities": scaled},
        ),
    ]
    return [Specimen(*row[:5], True, row[5]) for row in rows]
