"""A conversion written out in plain torch from `fixtures/published/mapping.json`.

The independent side for families that no other installed project converts. That list was written
down from the models' sources and other projects' adapters, apart from this project's tables: rows
`[hf, titan, npu, transform, note]`. Committed fixtures are in a checkout, not in an installed
package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FACTS = Path(__file__).resolve().parents[2] / "fixtures" / "published"
_COLUMN = {"titan": 1, "npu": 2}
# What a row says besides a correspondence: stored otherwise, left out, or made for another option.
_OTHER = ("mxfp4", "drop", "duplicate", "consumed", "no native")
_PLACE = re.compile(r"\\\{(\w+)\\\}")


@dataclass(frozen=True, slots=True)
class Row:
    """`hf` and `native` are key patterns; `ratio` is that of the layers it speaks of, or 0."""

    hf: str
    native: str
    transform: str
    ratio: int


class Written:
    """One family's list, on one config."""

    def __init__(self, family: str, config: Mapping[str, Any], generation: str) -> None:
        self.name = f"fixtures/published/mapping.json, {family}"
        self.layers = int(config["num_hidden_layers"])
        self.ratios = list(config.get("compress_ratios", ()))
        self.rows = list(_rows(family, _COLUMN[generation], self.layers))

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Native tensors of whole groups; keys that the list does not know are left out."""
        parts: dict[tuple[str, str], dict[int, Tensor]] = {}
        for key, value in hf_state_dict.items():
            for row, numbers in self._matching(self._flat(key), "hf"):
                expert = numbers.pop("expert", 0)
                parts.setdefault((_filled(row.native, numbers), row.transform), {})[expert] = value
        return {
            key: _to_native(transform, [found[i] for i in range(len(found))])
            for (key, transform), found in parts.items()
        }

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in state_dict.items():
            for row, numbers in self._matching(key, "native"):
                for expert, part in enumerate(_to_files(row.transform, value)):
                    out[self._nested(_filled(row.hf, {**numbers, "expert": expert}))] = part
        return out

    def _matching(self, key: str, side: str) -> Iterator[tuple[Row, dict[str, int]]]:
        for row in self.rows:
            found = _pattern(getattr(row, side)).fullmatch(key)
            if found is None:
                continue
            numbers = {name: int(text) for name, text in found.groupdict().items()}
            if not row.ratio or self.ratios[numbers["layer"]] == row.ratio:
                yield row, numbers

    # DeepSeek-V4's files number MTP blocks by themselves; natively they follow the layers.

    def _flat(self, key: str) -> str:
        found = re.fullmatch(r"mtp\.(\d+)\.(.*)", key)
        return f"layers.{self.layers + int(found[1])}.{found[2]}" if found else key

    def _nested(self, key: str) -> str:
        found = re.fullmatch(r"layers\.(\d+)\.(.*)", key)
        if found is None or int(found[1]) < self.layers:
            return key
        return f"mtp.{int(found[1]) - self.layers}.{found[2]}"


def written(family: str, config: Mapping[str, Any], generation: str) -> Written | None:
    """The list of a family, or None where there is none, as in an installed package."""
    found = (FACTS / "mapping.json").is_file() and family in _lists()
    return Written(family, config, generation) if found else None


@cache
def _lists() -> dict[str, list[Any]]:
    lists: dict[str, list[Any]] = json.loads((FACTS / "mapping.json").read_text())
    return lists


def _rows(family: str, column: int, layers: int) -> Iterator[Row]:
    for line in _lists()[family]:
        hf, native, transform, note = line[0], line[column], line[3], line[4]
        if not isinstance(hf, str) or native is None or "<block suffix" in hf:
            continue  # fused halves are another expert format; suffixes are `_flat`'s
        if transform.startswith(_OTHER):
            continue
        ratio = re.search(r"compress ratio (\d+)", note)
        # One name for a layer's number, whether it is one of the trunk or follows it.
        places = {
            "{num_hidden_layers+mtp}": "{layer}",
            "{num_hidden_layers-1}": str(layers - 1),
            "mtp.{mtp}": "layers.{layer}",
        }
        for old, new in places.items():
            hf, native = hf.replace(old, new), native.replace(old, new)
        yield Row(hf, native, transform, int(ratio[1]) if ratio else 0)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(_PLACE.sub(r"(?P<\1>\\d+)", re.escape(template)))


def _filled(template: str, numbers: Mapping[str, int]) -> str:
    return template.format(**numbers)


def _to_native(transform: str, parts: list[Tensor]) -> Tensor:
    if transform.startswith("identity"):
        return parts[0]
    if transform.startswith("transpose(1, 2)"):
        return parts[0].transpose(1, 2)
    assert transform.startswith("stack_experts"), transform
    return torch.stack(parts)


def _to_files(transform: str, value: Tensor) -> list[Tensor]:
    if transform.startswith("identity"):
        return [value]
    if transform.startswith("transpose(1, 2)"):
        return [value.transpose(1, 2)]
    assert transform.startswith("stack_experts"), transform
    return list(value.unbind())
