"""Specimens of the chapters `shapes` and `dtypes`."""

from __future__ import annotations

from typing import Any

import torch

from tests.specimens.edits import (
    edited,
    value,
)
from tests.specimens.right import State
from tests.specimens.specimen import BLIND, KEYED, Specimen


def shapes() -> list[Specimen]:
    def turn(v: Any) -> Any:
        return v.transpose(-1, -2)

    def both(pattern: str, there: Any, again: Any) -> type:
        return edited(value(pattern, there), before_import=value(pattern, again))

    return [
        Specimen(
            "transposed-both-ways",
            "shapes.exact",
            "o_proj",
            both("o_proj", turn, turn),
            "EXP-03, EXP-04",
            True,
            KEYED,
        ),
        Specimen(
            "axis-added",
            "shapes.exact",
            "model.norm.weight",
            both(r"model\.norm", lambda v: v.unsqueeze(0), lambda v: v.squeeze(0)),
            "",
            False,
            KEYED,
        ),
        Specimen(
            "scalar-as-vector",
            "shapes.exact",
            "model.scale",
            both(r"model\.scale", lambda v: v.reshape(1), lambda v: v.reshape(())),
            "STR-02",
            False,
            KEYED,
        ),
        Specimen(
            "mesh-axis-kept",
            "shapes.exact",
            "experts.0.down_proj",
            both("down_proj", lambda v: v.unsqueeze(0), lambda v: v.squeeze(0)),
            "EXP-05",
            False,
            KEYED,
        ),
        Specimen(
            "vocabulary-padded",
            "shapes.exact",
            "embed_tokens",
            both("embed_tokens", lambda v: torch.cat([v, v[:3]]), lambda v: v[:13]),
            "LAY-04",
            False,
            KEYED,
        ),
        Specimen(
            "native-axis-added",
            "shapes.native",
            "norm.weight",
            edited(None, value(r"^norm", lambda v: v.unsqueeze(0))),
            "STR-02",
            True,
            BLIND,
        ),
        Specimen(
            "stacked-on-the-wrong-axis",
            "shapes.native",
            "moe.w2",
            edited(None, value(r"moe\.w2", lambda v: v.transpose(0, 1))),
            "EXP-05",
            False,
            BLIND,
        ),
        Specimen(
            "stack-transposed",
            "shapes.native",
            "moe.w2",
            edited(None, value(r"moe\.w2", turn)),
            "EXP-03",
            False,
            BLIND,
        ),
    ]


def dtypes() -> list[Specimen]:
    def both(pattern: str, there: torch.dtype, again: torch.dtype) -> type:
        return edited(
            value(pattern, lambda v: v.to(there)),
            before_import=value(pattern, lambda v: v.to(again)),
        )

    def floats(dtype: torch.dtype) -> Any:
        return lambda v: v.to(dtype) if v.is_floating_point() else v

    def like_model(state: State) -> State:
        kind = state.get("model.norm.weight")
        return value("correction", lambda v: v if kind is None else v.to(kind.dtype))(state)

    return [
        Specimen(
            "table-as-floats",
            "dtypes.policy",
            "model.hash.table",
            both("hash.table", torch.float32, torch.int64),
            "DTY-02",
            False,
            BLIND,
        ),
        Specimen(
            "flags-as-bytes",
            "dtypes.policy",
            "model.mask",
            both("mask", torch.uint8, torch.bool),
            "DTY-02",
            True,
            BLIND,
        ),
        Specimen(
            "export-in-bf16",
            "dtypes.policy",
            "self_attn.q_proj",
            edited(value("model", floats(torch.bfloat16))),
            "DTY-05",
            False,
            BLIND,
        ),
        Specimen(
            "pinned-bias-cast",
            "dtypes.policy",
            "correction",
            edited(like_model),
            "DTY-04",
            False,
            BLIND,
        ),
        Specimen(
            "import-in-fp32",
            "dtypes.policy",
            "attn.wq",
            edited(None, value("layers", floats(torch.float32))),
            "DTY-01",
            False,
            BLIND,
        ),
        Specimen(
            "router-bias-in-bf16",
            "dtypes.policy",
            "moe.bias",
            edited(None, value("moe.bias", floats(torch.bfloat16))),
            "DTY-04",
            False,
            BLIND,
        ),
    ]
