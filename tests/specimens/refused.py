"""Specimens of the chapter `keys`: what must be refused, and what accepted."""

from __future__ import annotations

from typing import Any

import torch

from conformance import Capabilities
from tests.specimens import right
from tests.specimens.edits import drop, edited, looked_at
from tests.specimens.right import EXPERTS, Right, State
from tests.specimens.specimen import BLIND, Specimen

COPY = "model.layers.12.embed_tokens.weight"


def accepted() -> list[Specimen]:
    extras = {
        **BLIND,
        "capabilities": Capabilities(hf_only={"model.layers.*.inv_freq": "recomputed"}),
    }
    older = {
        **BLIND,
        "capabilities": Capabilities(also_reads={"output.weight": "head.weight"}),
    }

    def keep(state: State) -> State:
        extra = {k: v for k, v in state.items() if "inv_freq" in k}
        return {**state, **extra}

    def misread(state: State) -> State:
        kept = {k: v for k, v in state.items() if k != "output.weight"}
        return {**kept, "head.weight": state["tok.weight"]} if len(kept) < len(state) else state

    class Keeps(Right):
        def from_hf(self, hf_state_dict: State) -> State:
            out = super().from_hf({k: v for k, v in hf_state_dict.items() if "inv_freq" not in k})
            return {**out, **{k: v for k, v in hf_state_dict.items() if "inv_freq" in k}}

    class FromTwelve(Right):
        """Skips what lies beyond the last layer, one layer too late."""

        def from_hf(self, hf_state_dict: State) -> State:
            kept = {k: v for k, v in hf_state_dict.items() if not k.startswith("model.layers.13.")}
            return super().from_hf(kept)

    beyond = {
        **BLIND,
        "capabilities": Capabilities(hf_only={"model.layers.12.*": "predicts further tokens"}),
    }

    class FromCopy(Right):
        """Takes the embedding from the copy that a further layer keeps, where files hold one."""

        def from_hf(self, hf_state_dict: State) -> State:
            copy = {k: v for k, v in hf_state_dict.items() if k == COPY}
            out = super().from_hf({k: v for k, v in hf_state_dict.items() if k != COPY})
            return {**out, "tok.weight": copy[COPY]} if copy else out

    class Forgets(Right):
        def to_hf(self, state_dict: State) -> State:
            return super().to_hf({k: v for k, v in state_dict.items() if k != "output.weight"})

    return [
        Specimen(
            "published-extra-refused",
            "keys.hf-only",
            "model.layers.0.inv_freq",
            Right,
            "BUF-03",
            True,
            extras,
        ),
        Specimen(
            "extra-layer-taken-for-the-models",
            "keys.hf-only",
            "layers.12.attn.wq.weight",
            FromTwelve,
            "BUF-03",
            False,
            beyond,
        ),
        Specimen(
            "published-extra-kept",
            "keys.hf-only",
            "model.layers.0.inv_freq",
            Keeps,
            "BUF-03",
            False,
            extras,
        ),
        Specimen(
            "old-spelling-refused", "keys.also-reads", "output.weight", Right, "NAM-04", True, older
        ),
        Specimen(
            "old-spelling-dropped",
            "keys.also-reads",
            "output.weight",
            Forgets,
            "NAM-04",
            False,
            older,
        ),
        Specimen(
            "published-extra-taken-for-the-embedding",
            "keys.hf-only",
            "tok.weight",
            FromCopy,
            "",
            True,
            {**BLIND, "capabilities": Capabilities(hf_only={COPY: "a copy"})},
        ),
        Specimen(
            "old-spelling-of-another",
            "keys.also-reads",
            "output.weight",
            edited(before_export=misread),
            "",
            True,
            older,
        ),
    ]


def refused() -> list[Specimen]:
    def skip(word: str) -> type:
        return edited(before_export=drop(word), before_import=drop(word))

    class Substring(Right):
        """A rule that is not anchored: anything with `wq` in it becomes `q_proj`."""

        def to_hf(self, state_dict: State) -> State:
            odd = {k: v for k, v in state_dict.items() if "wq_gate" in k}
            out = super().to_hf({k: v for k, v in state_dict.items() if k not in odd})
            for odd_value in odd.values():
                out["model.layers.0.self_attn.q_proj_x.weight"] = odd_value
            return out

    class StackLoose(Right):
        """Stacks whatever experts are there."""

        def import_experts(self, experts: Any) -> State:
            out: State = {}
            for layer in {layer for layer, _ in experts}:
                found = {
                    kind: torch.stack([v for _, v in sorted(experts[layer, kind].items())])
                    for kind in ("gate_proj", "up_proj", "down_proj")
                    if (layer, kind) in experts
                }
                if {"gate_proj", "up_proj"} <= found.keys():
                    rows = min(len(found["gate_proj"]), len(found["up_proj"]))
                    out[f"layers.{layer}.moe.w13"] = torch.cat(
                        [found["gate_proj"][:rows], found["up_proj"][:rows]], dim=1
                    )
                if "down_proj" in found:
                    out[f"layers.{layer}.moe.w2"] = found["down_proj"]
            return out

    class StackSilent(Right):
        def import_experts(self, experts: Any) -> State:
            whole = {k: v for k, v in experts.items() if len(v) == EXPERTS}
            pairs = {
                k: v
                for k, v in whole.items()
                if k[1] == "down_proj" or {(k[0], "gate_proj"), (k[0], "up_proj")} <= whole.keys()
            }
            return super().import_experts(pairs)

    class ZeroBias(Right):
        """A missing half of the fused bias is taken as zero."""

        def to_hf(self, state_dict: State) -> State:
            given = dict(state_dict)
            for i in range(12):
                one, two = f"layers.{i}.attn.bq", f"layers.{i}.attn.bk"
                if one in given and two not in given:
                    given[two] = torch.zeros(12, device=given[one].device)
                if two in given and one not in given:
                    given[one] = torch.zeros(18, device=given[two].device)
            return super().to_hf(given)

    class GateAlone(Right):
        def import_experts(self, experts: Any) -> State:
            pairs = {
                k: v
                for k, v in experts.items()
                if k[1] == "down_proj" or {(k[0], "gate_proj"), (k[0], "up_proj")} <= experts.keys()
            }
            return super().import_experts(pairs)

    class Overwrite(Right):
        """Missing experts keep uninitialised memory."""

        def import_experts(self, experts: Any) -> State:
            for found in experts.values():
                first = next(iter(found.values()))
                for index in range(EXPERTS):
                    found.setdefault(index, torch.empty_like(first))
            return super().import_experts(experts)

    def ones(key: str, beside: str) -> Any:
        """A norm of ones where there is none beside another tensor."""
        return lambda s: s if key in s or beside not in s else {**s, key: torch.ones(10)}

    def middle(state: State) -> State:
        """A missing expert in the middle is made of zeros."""
        out = dict(state)
        for key, found in state.items():
            if "experts.0.down_proj" in key:
                out.setdefault(key.replace("experts.0", "experts.6"), torch.zeros_like(found))
        return out

    plain = {**BLIND, "capabilities": Capabilities()}
    return [
        Specimen(
            "export-skips-unknown",
            "keys.unknown-refused",
            "gate_probe",
            edited(
                before_export=lambda s: {
                    k: v for k, v in s.items() if k in right.native() or "lora" in k
                }
            ),
            "NAM-08",
            True,
            BLIND,
        ),
        Specimen(
            "import-skips-unknown",
            "keys.unknown-refused",
            "gate_probe",
            edited(
                before_import=lambda s: {
                    k: v for k, v in s.items() if k in right.files() or "lora" in k
                }
            ),
            "STR-01",
            False,
            BLIND,
        ),
        # To an adapter of quantized files scales are not unknown.
        *(
            Specimen(name, "keys.unknown-refused", key, edited(**edit), "NAM-08", True, plain)
            for name, key, edit in (
                ("bias-skipped", "wq.bias", {"before_export": drop(r"wq\.bias$")}),
                ("bias-skipped-on-import", "q_proj.bias", {"before_import": drop(r"proj\.bias$")}),
                ("scales-skipped", "weight_scale_inv", {"before_import": drop("_scale_inv$")}),
            )
        ),
        *(
            Specimen(name, "keys.unknown-refused", key, edited(**edit), "STR-01", True, BLIND)
            for name, key, edit in (
                (
                    "layer-beyond-skipped",
                    "layers.12",
                    {"before_export": drop(r"^layers\.(12|2.)\.")},
                ),
                ("layer-beyond-skipped-on-import", "layers.12", {"before_import": drop("ers.12.")}),
                ("expert-beyond-skipped", "experts.12", {"before_import": drop("experts.12.")}),
            )
        ),
        # A probe among meta tensors would show nothing.
        Specimen(
            "unknown-skipped-by-who-looks",
            "keys.unknown-refused",
            "gate_probe",
            edited(before_import=lambda s: drop("gate_probe")(looked_at(s))),
            "NAM-08",
            True,
            BLIND,
        ),
        Specimen(
            "suffix-not-weight-skipped",
            "keys.unknown-refused",
            "gate_probe_scale",
            edited(before_import=drop(r"experts\..*_scale$")),
            "NAM-02",
            False,
            BLIND,
        ),
        Specimen(
            "rule-matches-a-part",
            "keys.unknown-refused",
            "wq_gate_probe",
            Substring,
            "NAM-02",
            False,
            BLIND,
        ),
        Specimen(
            "lora-skipped", "keys.lora-refused", "lora_A", skip("lora"), "NAM-02", True, BLIND
        ),
        Specimen(
            "lora-skipped-on-import",
            "keys.lora-refused",
            "lora_B",
            edited(before_import=drop("lora")),
            "NAM-02",
            False,
            BLIND,
        ),
        Specimen(
            "magnitudes-skipped",
            "keys.lora-refused",
            "lora_magnitude_vector",
            edited(before_export=drop("magnitude"), before_import=drop("magnitude")),
            "NAM-08",
            True,
            BLIND,
        ),
        Specimen(
            "whole-modules-of-peft-skipped",
            "keys.lora-refused",
            "modules_to_save",
            edited(before_import=drop("modules_to_save")),
            "NAM-08",
            True,
            BLIND,
        ),
        Specimen(
            "stack-of-what-is-there",
            "keys.half-group",
            "experts.11.down_proj",
            StackLoose,
            "NAM-06",
            True,
            BLIND,
        ),
        Specimen(
            "stack-left-out", "keys.half-group", "moe.w2", StackSilent, "NAM-06", False, BLIND
        ),
        Specimen(
            "half-bias-is-zero", "keys.half-group", "attn.b", ZeroBias, "FUS-09", False, BLIND
        ),
        Specimen(
            "gate-without-up-dropped",
            "keys.half-group",
            "moe.w13",
            GateAlone,
            "FUS-09",
            False,
            BLIND,
        ),
        *(
            Specimen(name, "keys.half-group", key, edited(**edit), "STR-01", alone, BLIND)
            for name, key, edit, alone in (
                (
                    "missing-norm-made-up",
                    "norm.weight",
                    {"imports": ones("norm.weight", "head.weight")},
                    True,
                ),
                (
                    "missing-norm-made-up-on-export",
                    "model.norm.weight",
                    {"export": ones("model.norm.weight", "lm_head.weight")},
                    False,
                ),
                ("missing-middle-expert-made-up", "moe.w2", {"before_import": middle}, True),
            )
        ),
        Specimen(
            "missing-expert-uninitialised",
            "keys.half-group",
            "moe.w2",
            Overwrite,
            "STR-01",
            False,
            BLIND,
        ),
    ]
