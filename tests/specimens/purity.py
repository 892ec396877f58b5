"""Specimens of the chapter `purity`: state, side effects, order and memory."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor

from conformance import Capabilities
from tests.specimens import right
from tests.specimens.right import EXPERTS, Right, State
from tests.specimens.specimen import BLIND, HEAD, Specimen


def purity() -> list[Specimen]:
    class AddsHead(Right):
        def from_hf(self, hf_state_dict: State) -> State:
            out = super().from_hf(hf_state_dict)
            hf_state_dict["lm_head.bias"] = out.get("norm.weight", 0)
            return out

    class Pops(Right):
        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            state_dict.pop("norm.weight", None)
            return out

    class InPlace(Right):
        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            if "norm.weight" in state_dict and not isinstance(state_dict["norm.weight"], DTensor):
                out["model.norm.weight"] = out["model.norm.weight"].clone()
                state_dict["norm.weight"].zero_()
            return out

    class Replaces(Right):
        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            if "norm.weight" in state_dict:
                state_dict["norm.weight"] = state_dict["norm.weight"].clone()
            return out

    class Remembers(Right):
        """from_hf gives back what to_hf saw on this instance."""

        def to_hf(self, state_dict: State) -> State:
            self.seen = dict(state_dict)
            return super().to_hf(state_dict)

        def from_hf(self, hf_state_dict: State) -> State:
            out = super().from_hf(hf_state_dict)
            seen = getattr(self, "seen", {})
            if "norm.weight" in seen and "norm.weight" in out and _alike(seen, out):
                out["norm.weight"] = seen["norm.weight"]
            return out

    class OnTheClass(Right):
        """The first norm that any instance saw is used for ever."""

        first: ClassVar[State] = {}

        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            norm = out.get("model.norm.weight")
            real = norm is not None and right.is_plain(norm) and not norm.is_meta
            if real and norm.dtype == torch.float32 and bool(norm.any()):
                out["model.norm.weight"] = OnTheClass.first.setdefault("norm", norm.clone())
            return out

    class UsesUp(Right):
        """A rule is taken out of the table when it was used."""

        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            self.calls = 0

        def to_hf(self, state_dict: State) -> State:
            self.calls += 1
            out = super().to_hf(state_dict)
            if self.calls > 1:
                out.pop("model.norm.weight", None)
            return out

    class Caches(Right):
        def __init__(self, hf_assets_path: str | None = None) -> None:
            super().__init__(hf_assets_path)
            self.kept: Any = None

        def from_hf(self, hf_state_dict: State) -> State:
            out = super().from_hf(hf_state_dict)
            if self.kept is None:
                self.kept = out.get("norm.weight")
            elif "norm.weight" in out:
                out["norm.weight"] = self.kept
            return out

    class DefaultDict(Right):
        """What is returned first is returned for ever: a default argument is made once."""

        def from_hf(self, hf_state_dict: State, out: State = {}) -> State:  # noqa: B006
            for key, value in super().from_hf(hf_state_dict).items():
                out.setdefault(key, value)
            return {key: out[key] for key in super().from_hf(hf_state_dict)}

    class Unwritten(Right):
        """A row of the embedding is left as the allocator hands it out."""

        def from_hf(self, hf_state_dict: State) -> State:
            out = super().from_hf(hf_state_dict)
            if "tok.weight" in out and right.is_plain(out["tok.weight"]):
                value = torch.empty_like(out["tok.weight"])
                value[:-1] = out["tok.weight"][:-1]
                out["tok.weight"] = value
            return out

    class Appearance(Right):
        """Experts in the order in which they come."""

        def import_experts(self, experts: Any) -> State:
            return super().import_experts(
                {
                    at: dict(enumerate(found.values())) if len(found) == EXPERTS else found
                    for at, found in experts.items()
                }
            )

    class LastWins(Right):
        """The scale is taken from whatever one-element tensor comes last."""

        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            keys = list(state_dict)
            if (
                "norm.weight" in keys
                and "head.weight" in keys
                and (keys.index("head.weight") < keys.index("norm.weight"))
            ):
                out["model.norm.weight"] = out["model.norm.weight"].flip(0)
            return out

    class OneTensor(Right):
        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            if HEAD in out:
                out["mtp.head.weight"] = out[HEAD]
                if self.fqn_to_index_mapping is not None:
                    self.fqn_to_index_mapping = {k: v for k, v in self.listed.items() if k in out}
            return out

        def from_hf(self, hf_state_dict: State) -> State:
            return super().from_hf(
                {k: v for k, v in hf_state_dict.items() if k != "mtp.head.weight"}
            )

    class Negated(Right):
        """The sign is left to be applied by whoever reads the tensor, as complex views do."""

        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            norm = out.get("model.norm.weight")
            if norm is not None and right.is_plain(norm) and norm.dtype == torch.float32:
                out["model.norm.weight"] = torch._neg_view(-norm)
            return out

    class Sparse(Right):
        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            norm = out.get("model.norm.weight")
            if norm is not None and right.is_plain(norm):
                out["model.norm.weight"] = norm.to_sparse()
            return out

    copies = {**BLIND, "capabilities": Capabilities(hf_only={"mtp.head.weight": "a copy"})}
    return [
        Specimen(
            "import-adds-to-argument",
            "purity.input-unchanged",
            "lm_head.bias",
            AddsHead,
            "TIE-07",
            True,
            BLIND,
        ),
        Specimen(
            "export-pops-argument",
            "purity.input-unchanged",
            "norm.weight",
            Pops,
            "FUS-09",
            False,
            BLIND,
        ),
        Specimen(
            "export-writes-tensor",
            "purity.input-unchanged",
            "norm.weight",
            InPlace,
            "FUS-06",
            False,
            BLIND,
        ),
        Specimen(
            "export-replaces-entry",
            "purity.input-unchanged",
            "norm.weight",
            Replaces,
            "REF-05",
            False,
            BLIND,
        ),
        Specimen(
            "default-argument-fills-up",
            "purity.stateless",
            "tok.weight",
            DefaultDict,
            "REF-04",
            False,
            BLIND,
        ),
        Specimen(
            "row-that-nobody-wrote",
            "purity.repeat",
            "tok.weight",
            Unwritten,
            "REF-02",
            False,
            {**BLIND, "capabilities": Capabilities(lossy={"tok.weight": "the last row pads it"})},
        ),
        Specimen(
            "import-remembers-export",
            "purity.stateless",
            "norm.weight",
            Remembers,
            "REF-04",
            False,
            BLIND,
        ),
        Specimen(
            "kept-on-the-class",
            "purity.stateless",
            "model.norm.weight",
            OnTheClass,
            "REF-01",
            False,
            BLIND,
        ),
        Specimen(
            "rule-used-up", "purity.repeat", "model.norm.weight", UsesUp, "ASY-08", True, BLIND
        ),
        Specimen(
            "first-result-kept", "purity.repeat", "norm.weight", Caches, "REF-04", False, BLIND
        ),
        Specimen(
            "experts-by-appearance", "purity.order", "moe.w", Appearance, "EXP-02", True, BLIND
        ),
        Specimen(
            "order-decides", "purity.order", "model.norm.weight", LastWins, "OPT-08", False, BLIND
        ),
        Specimen(
            "one-tensor-two-names",
            "purity.aliasing",
            "mtp.head.weight",
            OneTensor,
            "TIE-08",
            True,
            copies,
        ),
        Specimen(
            "lazily-negated",
            "purity.contiguous-when-saved",
            "model.norm.weight",
            Negated,
            "FUS-06",
            True,
            BLIND,
        ),
        Specimen(
            "sparse-output",
            "keys.leaves",
            "model.norm.weight",
            Sparse,
            "FUS-06",
            False,
            BLIND,
        ),
    ]


def _alike(one: State, two: State) -> bool:
    return one["norm.weight"].shape == two["norm.weight"].shape
