"""A right adapter of experts that files hold in mxfp4, and its subject."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from conformance import Capabilities, Subject, codec
from tests.specimens.right import State
from torchtitan_ckpt.hf_storage import HFReader

_PACKED = "model.layers.{}.mlp.experts.{}_proj"


class PacksExperts:
    """A right adapter of experts that files hold in mxfp4."""

    def __init__(self, hf_assets_path: str | None = None) -> None:
        self.hf_assets_path = hf_assets_path
        self.fqn_to_index_mapping: dict[str, int] | None = None
        index = Path(hf_assets_path or "", codec.INDEX)
        if hf_assets_path and index.exists():
            names = json.loads(index.read_text())["weight_map"]
            self.fqn_to_index_mapping = {
                k.removesuffix("_blocks"): int(re.findall(r"\d+", v)[0])
                for k, v in names.items()
                if k.endswith("_blocks")
            }

    @staticmethod
    def _renamed(state: State, pattern: str, name: str) -> State:
        out = {}
        for key, value in state.items():
            if (found := re.fullmatch(pattern, key)) is None:
                raise KeyError(f"no rule for {key}")
            out[name.format(*found.groups())] = value
        return out

    def to_hf(self, state_dict: State) -> State:
        return self._renamed(state_dict, r"layers\.(\d+)\.(gate_up|down)", _PACKED)

    def from_hf(self, hf_state_dict: State) -> State:
        pattern = r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj"
        return self._renamed(hf_state_dict, pattern, "layers.{}.{}")

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return HFReader(path, dequantize=from_quantized)


def packed(adapter: type = PacksExperts) -> Subject:
    """Twelve layers of three experts each, [experts, in, out], and the files as they are stored."""
    sizes = {"gate_up": (64, 10), "down": (32, 7)}
    places = [
        (i, name, inputs, outputs) for i in range(12) for name, (inputs, outputs) in sizes.items()
    ]
    files: dict[str, Any] = {}
    for i, name, inputs, outputs in places:
        grid = (3, outputs, inputs // 32)
        files[f"{_PACKED.format(i, name)}_blocks"] = ((*grid, 16), "uint8")
        files[f"{_PACKED.format(i, name)}_scales"] = (grid, "uint8")
    native = {f"layers.{i}.{name}": ((3, *size), "bfloat16") for i, name, *size in places}
    may = Capabilities(quantized=True)
    return Subject("packed", adapter=adapter, native=native, hf=files, capabilities=may)
