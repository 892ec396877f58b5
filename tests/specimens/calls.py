"""Specimens of the chapter `purity`, second part: earlier calls, assets, and the process."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.specimens.edits import Values, drop, edited, value
from tests.specimens.right import Right, State, is_plain
from tests.specimens.specimen import BLIND, Specimen

_NORM = "model.norm.weight"


def _real(value: Any) -> bool:
    return is_plain(value) and not value.is_meta


class Workspace(Right):
    """One buffer for each key, written at each call."""

    def __init__(self, hf_assets_path: str | None = None) -> None:
        super().__init__(hf_assets_path)
        self.buffers: State = {}

    def to_hf(self, state_dict: State) -> State:
        out = super().to_hf(state_dict)
        for key, tensor in out.items():
            if _real(tensor):
                buffer = self.buffers.get(key)
                if buffer is None or buffer.dtype != tensor.dtype or buffer.shape != tensor.shape:
                    buffer = self.buffers[key] = torch.empty_like(tensor)
                out[key] = buffer.copy_(tensor)
        return out


class OneDict(Right):
    """The dict that is returned is the adapter's own."""

    def __init__(self, hf_assets_path: str | None = None) -> None:
        super().__init__(hf_assets_path)
        self.out: State = {}

    def from_hf(self, hf_state_dict: State) -> State:
        found = super().from_hf(hf_state_dict)
        self.out.clear()
        self.out.update(found)
        return self.out


class FirstKeys(Right):
    """What the first call is given decides what later calls write, without an assets folder."""

    plan: frozenset[str] = frozenset()

    def to_hf(self, state_dict: State) -> State:
        super().to_hf(state_dict)
        self.plan = frozenset() if self.listed else self.plan or frozenset(state_dict)
        if not self.plan:
            return super().to_hf(state_dict)
        return super().to_hf({k: v for k, v in state_dict.items() if k in self.plan})


class FirstDtype(Right):
    dtype: torch.dtype | None = None

    def from_hf(self, hf_state_dict: State) -> State:
        out = super().from_hf(hf_state_dict)
        if "norm.weight" in out and is_plain(out["norm.weight"]):
            self.dtype = self.dtype or out["norm.weight"].dtype
            out["norm.weight"] = out["norm.weight"].to(self.dtype)
        return out


class FirstWithoutValues(Right):
    """What was made on meta tensors, as a template for a load, is returned for a save."""

    made: Any = None

    def to_hf(self, state_dict: State) -> State:
        out = super().to_hf(state_dict)
        if _NORM in out:
            self.made = out[_NORM] if out[_NORM].is_meta else self.made
            out[_NORM] = out[_NORM] if self.made is None else self.made
        return out


class Busy(Right):
    """A mark that a call which raised did not take away."""

    busy = False

    def from_hf(self, hf_state_dict: State) -> State:
        leave = "norm" if self.busy else "^$"
        self.busy = True
        out = super().from_hf(drop(leave)(hf_state_dict))
        self.busy = False
        return out


class ConvertedWithAssets(Right):
    """Rows are taken for the files' order already where the adapter has an assets folder."""

    def export_experts(self, prefix: str, part: str, value: Any) -> State:
        turned = value.flip(2) if self.listed and part == "moe.w2" else value
        return super().export_experts(prefix, part, turned)


class CutWithAssets(Right):
    def from_hf(self, hf_state_dict: State) -> State:
        out = super().from_hf(hf_state_dict)
        return drop(r"q_norm\.weight$")(out) if self.listed else out


def without_grad(state: State) -> State:
    torch.set_grad_enabled(False)
    return state


def narrow(state: State) -> State:
    """A default dtype for a model that has it, and never the one from before."""
    if any(v.dtype == torch.bfloat16 for v in state.values()):
        torch.set_default_dtype(torch.bfloat16)
    return state


def one_thread(state: State) -> State:
    torch.set_num_threads(1)
    return state


def seeds(state: State) -> State:
    random.seed(0)
    return state


def by_default(tensor: Any) -> Any:
    """What is made without a dtype has the default one."""
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float32 else tensor


@torch.inference_mode()
def inferred(tensor: Any) -> Any:
    return tensor.clone() if is_plain(tensor) else tensor


def parameter(tensor: Any) -> Any:
    return torch.nn.Parameter(tensor)


def _norm(change: Values) -> type:
    return edited(imports=value("^norm", change))


def calls() -> list[Specimen]:
    first = "tok.weight"
    table: tuple[tuple[str, str, str, type, str], ...] = (
        ("workspace-used-again", "purity.repeat", _NORM, Workspace, "ASY-08"),
        ("returned-dict-used-again", "purity.repeat", "norm.weight", OneDict, "ASY-08"),
        ("first-call-decides-keys", "purity.repeat", _NORM, FirstKeys, "REF-04"),
        ("first-call-decides-dtype", "purity.repeat", "norm.weight", FirstDtype, "REF-04"),
        ("template-without-values", "purity.repeat", _NORM, FirstWithoutValues, "REF-02"),
        ("marked-by-a-refusal", "purity.repeat", "q_norm", Busy, "REF-04"),
        ("turned-with-assets", "purity.assets", "down_proj", ConvertedWithAssets, ""),
        ("cut-with-assets", "purity.assets", "q_norm", CutWithAssets, ""),
        ("grad-mode-left-off", "purity.settings", "embed", edited(imports=without_grad), ""),
        ("default-dtype-left", "purity.settings", first, edited(before_export=narrow), ""),
        ("one-thread-left", "purity.settings", first, edited(export=one_thread), ""),
        ("random-numbers-seeded", "purity.settings", first, edited(export=seeds), ""),
        (
            "default-dtype-followed",
            "purity.settings",
            "moe.w2",
            edited(imports=value(r"moe\.w2$", by_default)),
            "",
        ),
        ("made-in-inference-mode", "values.load", "norm.weight", _norm(inferred), "REF-02"),
        ("parameters-returned", "values.load", "norm.weight", _norm(parameter), ""),
    )
    return [
        Specimen(name, check, key, adapter, kinds, True, BLIND)
        for name, check, key, adapter, kinds in table
    ]
