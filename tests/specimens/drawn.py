"""Adapters that are right of noise in plain tensors, the whole model in its own order, only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.specimens.edits import edited, value
from tests.specimens.right import SIZES, Right, State, is_plain, split
from tests.specimens.specimen import HEAD, Specimen


def _layers(state: State) -> list[int]:
    """Layer numbers in the order of the dict."""
    found = [numbers[0] for name, numbers in map(split, state) if name.startswith("layers.")]
    return list(dict.fromkeys(found))


class CountsThreeFromBehind(Right):
    """Three layers, the last one first, are taken for a stage that begins with the lowest."""

    def to_hf(self, state_dict: State) -> State:
        order = _layers(state_dict)
        if len(order) == 3 and order == sorted(order, reverse=True):
            low, _, high = sorted(order)
            turned = {low: high, high: low}
            state_dict = {_moved(key, turned): value for key, value in state_dict.items()}
        return super().to_hf(state_dict)


def _moved(key: str, places: dict[int, int]) -> str:
    name, numbers = split(key)
    if name != "layers.{}.attn.wo.weight":
        return key
    return name.format(places.get(numbers[0], numbers[0]))


class PairsExperts(Right):
    """Experts go two by two; of an odd number the last one is written over the first."""

    def export_experts(self, prefix: str, part: str, value: Any) -> State:
        if value.shape[0] % 2 and value.shape[0] > 1:
            value = value.clone()
            value[0] = value[-1]
        return super().export_experts(prefix, part, value)


class SharesADtype(Right):
    """Norms of another dtype than the embedding come back in reverse, where names are sorted."""

    def from_hf(self, hf_state_dict: State) -> State:
        out = super().from_hf(hf_state_dict)
        norm, tok = out.get("norm.weight"), out.get("tok.weight")
        by_name = list(hf_state_dict) == sorted(hf_state_dict)
        if by_name and norm is not None and tok is not None and norm.dtype != tok.dtype:
            out["norm.weight"] = norm.flip(0)
        return out


def _real(value: Any) -> bool:
    """Whether there are values to look at."""
    return is_plain(value) and not value.is_meta


def _without(test: Callable[[str, Any], bool]) -> Callable[[State], State]:
    """Leaves out what a look at the tensor says."""
    return lambda state: {k: v for k, v in state.items() if not (_real(v) and test(k, v))}


def _ones_for_zeros(v: Any) -> Any:
    return torch.ones_like(v) if _real(v) and not v.any() else v


def _equal_once(state: State) -> State:
    """A head that equals the embedding is taken for tied."""
    head, tok = state.get("head.weight"), state.get("tok.weight")
    same = _real(head) and _real(tok) and torch.equal(head, tok)
    return {k: v for k, v in state.items() if not (same and k == "head.weight")}


def _same_place_once(state: State) -> State:
    """Of two keys that lie in one place of memory the second is taken for an alias."""
    seen: set[int] = set()
    out = {}
    for key, v in state.items():
        place = v.data_ptr() if _real(v) else 0
        if not place or place not in seen:
            out[key] = v
        seen.add(place)
    return out


class EqualExpertsOnce(Right):
    """Experts that equal the first are not written again."""

    def export_experts(self, prefix: str, part: str, value: Any) -> State:
        out = super().export_experts(prefix, part, value)
        first = next(iter(out.values()))
        again = [k for k, v in out.items() if v is not first and _real(v) and torch.equal(v, first)]
        return {k: v for k, v in out.items() if k not in again}


def _trimmed(v: Any) -> Any:
    """Rows of zeros at the end are taken for padding."""
    rows = v.ne(0).any(1).nonzero() if _real(v) else ()
    return v[: int(rows[-1]) + 1] if len(rows) else v


def _in_memory(v: Any) -> Any:
    """The elements in the order in which they lie in memory."""
    if not _real(v) or v.is_contiguous() or v.dim() != 2:
        return v
    return v.T.contiguous().view(v.shape)


def _viewed(v: Any) -> Any:
    return v.view(-1).view(v.shape)


def _by_numpy(v: Any) -> Any:
    return torch.from_numpy(v.numpy().copy()) if _real(v) and v.dtype == torch.float32 else v


class OnlyADict(Right):
    def to_hf(self, state_dict: State) -> State:
        if type(state_dict) is not dict:
            raise TypeError("a dict is wanted")
        return super().to_hf(state_dict)


class AFewOtherwise(Right):
    """What a late pipeline stage reads, a few keys, goes through a path that nobody tried."""

    def from_hf(self, hf_state_dict: State) -> State:
        out = super().from_hf(hf_state_dict)
        few = len(hf_state_dict) < 10
        return {k: v.flip(0) if few and k.endswith("wk.weight") else v for k, v in out.items()}


_EMBED, _NORM, _WO = "model.embed_tokens.weight", "model.norm.weight", "self_attn.o_proj.weight"
# Name, the key that is to be told, the adapter.
_ODD: tuple[tuple[str, str, type], ...] = (
    ("three-layers-from-behind", _WO, CountsThreeFromBehind),
    ("odd-experts", "mlp.experts.0.down_proj", PairsExperts),
    ("two-dtypes-by-name", "norm.weight", SharesADtype),
    ("a-few-keys-otherwise", "wk.weight", AFewOtherwise),
    ("zeros-read-as-ones", "norm.weight", edited(imports=value(r"^norm", _ones_for_zeros))),
    (
        "ones-left-out",
        _NORM,
        edited(before_export=_without(lambda k, v: k == "norm.weight" and bool((v == 1).all()))),
    ),
    (
        "all-nan-left-out",
        "norm.weight",
        edited(before_import=_without(lambda k, v: k == _NORM and bool(v.isnan().all()))),
    ),
    ("equal-head-left-out", HEAD, edited(before_export=_equal_once)),
    ("equal-experts-once", "mlp.experts.1.down_proj", EqualExpertsOnce),
    ("zero-rows-trimmed", _EMBED, edited(value("embed_tokens", _trimmed))),
    ("one-memory-written-once", "q_norm.weight", edited(before_export=_same_place_once)),
    ("memory-order-written", _WO, edited(before_export=value(r"wo\.weight", _in_memory))),
    ("memory-order-read", "wo.weight", edited(before_import=value("o_proj", _in_memory))),
    ("views-wanted", "wq.weight", edited(before_export=value(r"wq\.weight", _viewed))),
    ("gradients-refused", "norm.weight", edited(before_export=value(r"^norm", _by_numpy))),
    (
        "frozen-left-out",
        _NORM,
        edited(
            before_export=_without(
                lambda k, v: isinstance(v, torch.nn.Parameter) and not v.requires_grad
            )
        ),
    ),
    ("only-a-dict", "tok.weight", OnlyADict),
)
SPECIMENS = tuple(
    Specimen(name, "values.drawn", key, adapter, alone=True, options={"sizes": SIZES})
    for name, key, adapter in _ODD
)
