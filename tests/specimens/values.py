"""Specimens of the chapter `values`: arithmetic, casts, ties, loads, DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.specimens.edits import (
    edited,
    swap,
    value,
    via,
)
from tests.specimens.right import Right, State, is_plain
from tests.specimens.specimen import BLIND, HEAD, TIED, Specimen, TiedRight


def _cleaned(v: Any) -> Any:
    return v.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def values() -> list[Specimen]:
    def lossy_scale(v: Any) -> Any:
        return v * 3.0 / 3.0

    def through_half(v: Any) -> Any:
        return v.half().to(v.dtype) if v.dtype == torch.bfloat16 else v

    def repeat_expert(state: State) -> State:
        out = dict(state)
        for key in state:
            if ".experts.5.down_proj" in key and key.replace(".5.", ".4.") in state:
                out[key] = state[key.replace(".5.", ".4.")].clone()
        return out

    norms = swap("q_norm", "k_norm")
    return [
        Specimen(
            "sign-flipped-both-ways",
            "values.provenance",
            "o_proj",
            edited(value("o_proj", lambda v: -v), before_import=value("o_proj", lambda v: -v)),
            "",
            True,
            BLIND,
        ),
        Specimen(
            "norm-as-one-plus-w",
            "values.provenance",
            "model.norm.weight",
            edited(
                value(r"model\.norm", lambda v: v + 1.0),
                before_import=value(r"model\.norm", lambda v: v - 1.0),
            ),
            "FP8-06",
            False,
            BLIND,
        ),
        Specimen(
            "expert-written-twice",
            "values.provenance",
            "down_proj",
            edited(lambda s: repeat_expert(s)),
            "EXP-02",
            False,
            BLIND,
        ),
        Specimen(
            "export-through-bf16",
            "values.native-round-trip",
            "attn.wo",
            edited(value("o_proj", via(torch.bfloat16))),
            "DTY-05",
            True,
            BLIND,
        ),
        Specimen(
            "import-through-fp16",
            "values.native-round-trip",
            "attn.wo",
            edited(before_import=value("o_proj", via(torch.float16))),
            "DTY-05",
            False,
            BLIND,
        ),
        Specimen(
            "negative-zero-lost",
            "values.native-round-trip",
            "norm.weight",
            edited(value(r"model\.norm", lambda v: v + 0.0)),
            "FP8-06",
            False,
            BLIND,
        ),
        Specimen(
            "scaled-and-back",
            "values.native-round-trip",
            "attn.wo",
            edited(value("o_proj", lossy_scale)),
            "FP8-06",
            False,
            BLIND,
        ),
        Specimen(
            "integers-through-fp32",
            "values.native-round-trip",
            "hash.table",
            edited(value("hash", via(torch.float32))),
            "DTY-02",
            False,
            BLIND,
        ),
        Specimen(
            "norms-swapped-one-way-unseen",
            "values.native-round-trip",
            "q_norm",
            edited(before_import=norms),
            "NAM-01",
            False,
            BLIND,
        ),
        Specimen(
            "square-transposed-one-way-unseen",
            "values.native-round-trip",
            "mix.weight",
            edited(None, value(r"mix\.weight", lambda v: v.transpose(0, 1))),
            "EXP-04",
            False,
            BLIND,
        ),
        Specimen(
            "bf16-files-through-fp16",
            "values.hf-round-trip",
            "o_proj",
            edited(before_import=value("o_proj", through_half)),
            "DTY-05",
            True,
            BLIND,
        ),
    ]


def tied() -> list[Specimen]:
    class NotFilled(TiedRight):
        def from_hf(self, hf_state_dict: State) -> State:
            out = super().from_hf(hf_state_dict)
            out.pop("head.weight", None)
            return out

    class WantsHead(Right):
        def from_hf(self, hf_state_dict: State) -> State:
            if HEAD not in hf_state_dict:
                raise KeyError("lm_head.weight")
            return super().from_hf(hf_state_dict)

    class Zeros(TiedRight):
        def from_hf(self, hf_state_dict: State) -> State:
            out = super().from_hf(hf_state_dict)
            if "head.weight" in out:
                out["head.weight"] = torch.zeros_like(out["head.weight"])
            return out

    class RefusesHead(TiedRight):
        def from_hf(self, hf_state_dict: State) -> State:
            if HEAD in hf_state_dict:
                raise KeyError(f"no rule for {HEAD}")
            return super().from_hf(hf_state_dict)

    return [
        Specimen(
            "tied-head-of-the-list-refused",
            "values.tied",
            HEAD,
            RefusesHead,
            "TIE-07",
            True,
            TIED | {"listed": True},
        ),
        Specimen(
            "tied-head-not-filled", "keys.import", "head.weight", NotFilled, "TIE-04", True, TIED
        ),
        Specimen(
            "tied-head-asked-from-file",
            "values.tied",
            "head.weight",
            WantsHead,
            "TIE-07",
            False,
            TIED,
        ),
        Specimen("tied-head-zero", "values.tied", "head.weight", Zeros, "TIE-06", False, TIED),
    ]


class ThroughNumpy(Right):
    """Values leave torch on the way, for what knows neither bfloat16 nor DTensors."""

    def to_hf(self, state_dict: State) -> State:
        out = super().to_hf(state_dict)
        return {k: torch.from_numpy(v.detach().cpu().numpy().copy()) for k, v in out.items()}


def flow() -> list[Specimen]:
    class SkipsNan(TiedRight):
        """Takes an embedding of NaN for one that was never initialised."""

        def to_hf(self, state_dict: State) -> State:
            tok = state_dict.get("tok.weight")
            real = is_plain(tok) and not tok.is_meta
            if real and bool(tok.isnan().all()):
                state_dict = {k: v for k, v in state_dict.items() if k != "tok.weight"}
            return super().to_hf(state_dict)

    class Placement(Right):
        def export_experts(self, prefix: str, part: str, value: Any) -> State:
            if isinstance(value, DTensor):
                value = DTensor.from_local(  # type: ignore[call-arg]
                    value.to_local(), value.device_mesh, placement=value.placements
                )
            return super().export_experts(prefix, part, value)

    class Axis(Right):
        """Asks every placement for its axis; Replicate has none."""

        def export_experts(self, prefix: str, part: str, value: Any) -> State:
            if isinstance(value, DTensor):
                sharded = [p for p in value.placements if p.dim == 0]  # type: ignore[attr-defined]
                assert sharded
            return super().export_experts(prefix, part, value)

    class LocalZeros(Right):
        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            return {
                k: torch.zeros_like(v) if isinstance(v, DTensor) and "mixer" in k else v
                for k, v in out.items()
            }

    class DropsSharded(Right):
        def to_hf(self, state_dict: State) -> State:
            return super().to_hf(
                {
                    k: v
                    for k, v in state_dict.items()
                    if not (isinstance(v, DTensor) and "moe.w2" in k)
                }
            )

    return [
        Specimen(
            "nan-cleaned-on-export",
            "values.native-round-trip",
            "norm.weight",
            edited(before_export=value(r"^norm", _cleaned)),
            "",
            True,
            BLIND,
        ),
        Specimen(
            "nan-cleaned-on-import",
            "values.native-round-trip",
            "norm.weight",
            edited(imports=value(r"^norm", _cleaned)),
            "",
            True,
            BLIND,
        ),
        Specimen("nan-taken-for-absent", "values.load", "model.", SkipsNan, "REF-02", True, TIED),
        Specimen("through-numpy", "values.dtensor", "tok.weight", ThroughNumpy, "", False, BLIND),
        Specimen("placement-keyword", "values.dtensor", "moe.w", Placement, "FUS-07", True, BLIND),
        Specimen(
            "replicate-has-no-axis", "values.dtensor", "moe.w", Axis, "GEO-03, GEO-04", False, BLIND
        ),
        Specimen(
            "sharded-values-lost", "values.dtensor", "mixer", LocalZeros, "GEO-01", False, BLIND
        ),
        Specimen(
            "sharded-key-dropped",
            "values.dtensor",
            "down_proj",
            DropsSharded,
            "OPT-12",
            False,
            BLIND,
        ),
    ]
