"""Specimens of the chapter `keys`: what is dropped, doubled or misnamed."""

from __future__ import annotations

from typing import Any

import torch

from conformance import Capabilities
from tests.specimens import right
from tests.specimens.edits import (
    add,
    drop,
    edited,
    rename,
    renumber,
    value,
)
from tests.specimens.right import EXPERTS, Right, State
from tests.specimens.specimen import BLIND, HEAD, KEYED, TIED, Specimen, TiedRight

FORGOTTEN = "model.extra.weight"


class TiedWritesBoth(TiedRight):
    def to_hf(self, state_dict: State) -> State:
        return Right.to_hf(self, state_dict)


def leaves() -> list[Specimen]:
    return [
        Specimen(
            "method-without-brackets",
            "keys.leaves",
            HEAD,
            edited(value("lm_head", lambda v: v.clone)),
            "FUS-08",
            True,
            BLIND,
        ),
        Specimen(
            "none-for-a-tensor",
            "keys.leaves",
            "model.norm.weight",
            edited(value("model.norm", lambda v: None)),
            "OPT-05",
        ),
        Specimen(
            "literal-key-returned",
            "keys.leaves",
            "layers.1.moe.w13",
            edited(None, value(r"layers\.1\.moe\.w13", lambda v: "w1")),
            "FUS-09",
        ),
    ]


def total() -> list[Specimen]:
    def trim(v: Any) -> Any:
        return v[:-1]

    def elsewhere(state: State) -> State:
        return {k: torch.ones(v.shape, dtype=v.dtype) for k, v in state.items()}

    def only_floats(state: State) -> State:
        return {k: v for k, v in state.items() if v.is_floating_point()}

    return [
        Specimen(
            "renamed-experts-skipped",
            "keys.total",
            "moe.w2",
            edited(before_export=drop(r"moe\.w2$")),
            "NAM-06",
            True,
            BLIND,
        ),
        Specimen(
            "last-block-left-out",
            "keys.total",
            "layers.11.attn.wq.weight",
            edited(before_export=drop(r"^layers\.11\.")),
            "NAM-08",
            False,
            BLIND,
        ),
        Specimen(
            "half-the-experts",
            "keys.total",
            "moe.w2",
            edited(drop(r"experts\.([6-9]|1\d)\.down_proj")),
            "NAM-06",
            False,
            BLIND,
        ),
        Specimen(
            "alias-of-head",
            "keys.total",
            "head.weight",
            edited(add("model.mtp.0.head.weight", lambda s: s[HEAD].clone(), HEAD)),
            "NAM-07",
            False,
            BLIND,
        ),
        Specimen(
            "head-is-embedding",
            "keys.total",
            "head.weight",
            edited(
                lambda s: (
                    {**s, HEAD: s["model.embed_tokens.weight"].clone()}
                    if HEAD in s and "model.embed_tokens.weight" in s
                    else s
                )
            ),
            "TIE-01",
            False,
            BLIND,
        ),
        Specimen(
            "derived-buffer-written",
            "keys.total",
            "rotary_emb.inv_freq",
            edited(add("model.rotary_emb.inv_freq", lambda s: torch.arange(4.0))),
            "BUF-03",
            False,
            BLIND,
        ),
        Specimen("written-from-elsewhere", "keys.total", HEAD, edited(elsewhere), "", False, BLIND),
        Specimen(
            "scalars-skipped",
            "keys.total",
            "scale.value",
            edited(before_export=lambda s: {k: v for k, v in s.items() if v.dim()}),
            "DTY-02",
            False,
            BLIND,
        ),
        Specimen(
            "integers-skipped",
            "keys.total",
            "hash.table",
            edited(before_export=only_floats),
            "DTY-02",
            False,
            BLIND,
        ),
        Specimen(
            "vocabulary-trimmed",
            "keys.total",
            "tok.weight",
            edited(value("embed_tokens", trim)),
            "LAY-04",
            False,
            BLIND,
        ),
        Specimen(
            "old-and-new-experts",
            "keys.total",
            "moe.w2",
            edited(
                lambda s: {
                    **s,
                    **{
                        k.replace("experts", "old_experts"): v.clone()
                        for k, v in s.items()
                        if "down_proj" in k
                    },
                }
            ),
            "NAM-09",
            False,
            BLIND,
        ),
    ]


def exact() -> list[Specimen]:
    def both(old: str, new: str, undo_old: str, undo_new: str) -> type:
        return edited(rename(old, new), before_import=rename(undo_old, undo_new))

    def grouped(state: State) -> State:
        out = {k: v for k, v in state.items() if "down_proj" not in k}
        for layer in right.SPARSE:
            stem = f"model.layers.{layer}.mlp.experts"
            found = [state.get(f"{stem}.{e}.down_proj.weight") for e in range(EXPERTS)]
            if all(v is not None for v in found):
                out[f"{stem}.down_proj"] = torch.stack(found)  # type: ignore[arg-type]
        return out

    def ungrouped(state: State) -> State:
        out = {k: v for k, v in state.items() if not k.endswith("experts.down_proj")}
        for key, v in state.items():
            if key.endswith("experts.down_proj"):
                stem = key.removesuffix(".down_proj")
                out.update({f"{stem}.{e}.down_proj.weight": v[e] for e in range(v.shape[0])})
        return out

    return [
        Specimen(
            "singular-embedding",
            "keys.exact",
            "model.embed_token.weight",
            both("embed_tokens", "embed_token", r"embed_token\.", "embed_tokens."),
            "NAM-01",
            True,
            KEYED,
        ),
        Specimen(
            "prefix-left-out",
            "keys.exact",
            "layers.0.self_attn.q_proj.weight",
            both(r"^model\.layers", "layers", r"^layers", "model.layers"),
            "SEL-05",
            False,
            KEYED,
        ),
        Specimen(
            "prefix-twice",
            "keys.exact",
            "model.model.norm.weight",
            both(r"^model\.", "model.model.", r"^model\.model\.", "model."),
            "NAM-03",
            False,
            KEYED,
        ),
        Specimen(
            "experts-grouped",
            "keys.exact",
            "mlp.experts.down_proj",
            edited(grouped, before_import=ungrouped),
            "NAM-05, NAM-10",
            False,
            KEYED,
        ),
        Specimen(
            "wrapper-prefix-kept",
            "keys.exact",
            "_orig_mod",
            both("self_attn", "_orig_mod.self_attn", r"_orig_mod\.self_attn", "self_attn"),
            "DTY-04",
            False,
            KEYED,
        ),
        Specimen(
            "layers-from-one",
            "keys.exact",
            "model.layers.12",
            edited(
                renumber("^model.layers", 0, lambda i: i + 1),
                before_import=renumber("^model.layers", 0, lambda i: i - 1),
            ),
            "EXP-02",
            False,
            KEYED,
        ),
        Specimen(
            "tied-head-written",
            "keys.exact",
            HEAD,
            TiedWritesBoth,
            "TIE-05",
            False,
            {**TIED, "listed": {k: v for k, v in right.files().items() if k != "lm_head.weight"}},
        ),
        Specimen(
            "forgotten-by-a-tied-adapter",
            "keys.exact",
            FORGOTTEN,
            TiedRight,
            "",
            True,
            {**TIED, "listed": right.files() | {FORGOTTEN: ((3, 5), "bfloat16")}},
        ),
        Specimen(
            "forgotten-beside-a-native-only-key",
            "keys.exact",
            FORGOTTEN,
            edited(before_export=drop(r"moe\.bias$")),
            "",
            True,
            {
                "referenced": False,
                "listed": [*(k for k in right.files() if "correction" not in k), FORGOTTEN],
                "capabilities": Capabilities(native_only={"*.moe.bias": "files have none"}),
            },
        ),
    ]


class LeansOnExport(Right):
    """The import knows the vocabulary only from an export by the same adapter."""

    def to_hf(self, state_dict: State) -> State:
        self.rows = max((len(v) for v in state_dict.values() if v.dim()), default=0)
        return super().to_hf(state_dict)

    def from_hf(self, hf_state_dict: State) -> State:
        assert self.rows
        return super().from_hf(hf_state_dict)


def imports_() -> list[Specimen]:
    return [
        Specimen(
            "import-leans-on-export",
            "keys.import",
            "model.",
            LeansOnExport,
            "REF-04",
            False,
            BLIND,
        ),
        Specimen(
            "import-skips-a-key",
            "keys.import",
            "layers.0.attn.wo.weight",
            edited(None, drop(r"attn\.wo")),
            "STR-01",
            True,
            BLIND,
        ),
        Specimen(
            "source-kept-beside",
            "keys.import",
            "layers.1.moe.w1",
            edited(
                None,
                lambda s: {
                    **s,
                    **{
                        k.replace("w13", "w1"): v[:, :7].clone() for k, v in s.items() if "w13" in k
                    },
                },
            ),
            "FUS-09",
            False,
            BLIND,
        ),
        Specimen(
            "import-misnames",
            "keys.import",
            "layers.0.attn.wkk.weight",
            edited(None, rename(r"attn\.wk\.", "attn.wkk.")),
            "NAM-04",
            False,
            BLIND,
        ),
        Specimen(
            "import-prefix-twice",
            "keys.import",
            "layers.layers.0",
            edited(None, rename(r"^layers\.", "layers.layers.")),
            "NAM-03",
            False,
            BLIND,
        ),
        Specimen(
            "embedding-from-head",
            "keys.import",
            "model.embed_tokens.weight",
            edited(
                None,
                lambda s: (
                    {**s, "tok.weight": s["head.weight"].clone()}
                    if {"tok.weight", "head.weight"} <= s.keys()
                    else s
                ),
            ),
            "TIE-01",
            False,
            BLIND,
        ),
        Specimen(
            "import-one-layer-short",
            "keys.import",
            "layers.11.attn.wq.weight",
            edited(before_import=drop(r"layers\.11\.")),
            "STR-01",
            False,
            BLIND,
        ),
    ]
