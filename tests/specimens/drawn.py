"""Adapters that are right in every case written down, and wrong in one that a search draws."""

from __future__ import annotations

from typing import Any

from tests.specimens.right import SIZES, Right, State, split
from tests.specimens.specimen import Specimen


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


SPECIMENS = (
    Specimen(
        "three-layers-from-behind",
        "values.drawn",
        "self_attn.o_proj.weight",
        CountsThreeFromBehind,
        alone=True,
        options={"sizes": SIZES},
    ),
    Specimen(
        "odd-experts",
        "values.drawn",
        "mlp.experts.0.down_proj",
        PairsExperts,
        alone=True,
        options={"sizes": SIZES},
    ),
    Specimen(
        "two-dtypes-by-name",
        "values.drawn",
        "norm.weight",
        SharesADtype,
        alone=True,
        options={"sizes": SIZES},
    ),
)
