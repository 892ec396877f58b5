"""A right adapter of an invented model, from which the broken ones are made by small edits.

The model has everything that adapters get wrong: twelve layers and twelve experts, sizes that are
pairwise different, a rotary permutation, a transposed and a square weight, a fused pair (w13), a
tensor that files hold fused and the model holds apart, fp32-pinned, int64, bool and 0-d tensors.
It is right on one rank: what is to be right on several is made from this project's own adapter
(`ranked.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from conformance import Capabilities, Subject

SPARSE = (1, 11)  # layers with experts: enough to be wrong in, few enough to be quick
# Six a head: with four, the two rotary orders would be the same permutation.
LAYERS, EXPERTS, DIM, HEADS, KV, HEAD, HIDDEN, VOCAB = 12, 12, 10, 3, 2, 6, 7, 13
State = dict[str, Any]
# What a search may draw, for adapters that know no size by heart.
SIZES = {"layers": (1, 2, 3, 13), "experts": (1, 2, 3, 5, 13)}
LAYER: dict[str, tuple[tuple[int, ...], str]] = {
    "attn.wq.weight": ((HEADS * HEAD, DIM), "float32"),
    "attn.wk.weight": ((KV * HEAD, DIM), "float32"),
    "attn.wo.weight": ((DIM, HEADS * HEAD), "float32"),
    "attn.bq": ((HEADS * HEAD,), "float32"),
    "attn.bk": ((KV * HEAD,), "float32"),
    "attn.q_norm.weight": ((HEAD,), "float32"),
    "attn.k_norm.weight": ((HEAD,), "float32"),
    "mix.weight": ((DIM, DIM), "float32"),
    "moe.w13": ((EXPERTS, 2 * HIDDEN, DIM), "float32"),
    "moe.w2": ((EXPERTS, DIM, HIDDEN), "float32"),
    "moe.bias": ((EXPERTS,), "float32"),
}
TOP: dict[str, tuple[tuple[int, ...], str]] = {
    "tok.weight": ((VOCAB, DIM), "float32"),
    "norm.weight": ((DIM,), "float32"),
    "head.weight": ((VOCAB, DIM), "float32"),
    "hash.table": ((VOCAB, 3), "int64"),
    "mask.flags": ((11,), "bool"),
    "scale.value": ((), "float32"),
}


def native(layers: int = LAYERS, experts: int = EXPERTS) -> dict[str, tuple[tuple[int, ...], str]]:
    """Key -> (shape, dtype) of the model."""
    middle = {
        f"layers.{i}.{k}": ((experts, *leaf[0][1:]), leaf[1]) if k.startswith("moe.") else leaf
        for i in range(layers)
        for k, leaf in LAYER.items()
        if i in SPARSE or not k.startswith("moe.")
    }
    return {"tok.weight": TOP["tok.weight"], **middle, **{k: TOP[k] for k in list(TOP)[1:]}}


SAME = {
    "layers.{}.attn.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.attn.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "layers.{}.attn.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.moe.bias": "model.layers.{}.mlp.gate.correction",
    "tok.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "hash.table": "model.hash.table",
    "mask.flags": "model.mask",
    "scale.value": "model.scale",
}
ROPE = {"wq": "q_proj", "wk": "k_proj"}
BACK = {hf: key for key, hf in SAME.items()}


def split(key: str) -> tuple[str, tuple[int, ...]]:
    numbers = tuple(int(n) for n in re.findall(r"(?<=\.)\d+(?=\.)", key))
    return re.sub(r"(?<=\.)\d+(?=\.)", "{}", key), numbers


def half(value: Any, heads: int) -> Any:
    """Interleaved rows to half-split rows."""
    return value.reshape(heads, -1, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def interleave(value: Any, heads: int) -> Any:
    return value.reshape(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


class Right:
    """The adapter of the invented model."""

    count = EXPERTS  # of a model of another size, another

    def __init__(self, hf_assets_path: str | None = None) -> None:
        self.fqn_to_index_mapping: dict[str, int] | None = None
        self.hf_assets_path = hf_assets_path
        self.listed: dict[str, int] = {}
        index = Path(hf_assets_path or "", "model.safetensors.index.json")
        if hf_assets_path and index.exists():
            names = json.loads(index.read_text())["weight_map"]
            self.listed = {k: int(re.findall(r"\d+", v)[0]) for k, v in names.items()}
            self.fqn_to_index_mapping = dict(self.listed)

    def experts(self, count: int) -> list[int]:
        return list(range(count))

    def to_hf(self, state_dict: State) -> State:
        out: State = {}
        fused: dict[int, State] = {}
        for key, value in state_dict.items():
            name, numbers = split(key)
            if name in SAME:
                out[SAME[name].format(*numbers)] = value
                continue
            if not name.startswith("layers.{}.") or name.removeprefix("layers.{}.") not in LAYER:
                raise KeyError(f"no rule for {key}")
            prefix, part = f"model.layers.{numbers[0]}", name.removeprefix("layers.{}.")
            if part in ("attn.wq.weight", "attn.wk.weight"):
                kind = part.split(".")[1]
                heads = HEADS if kind == "wq" else KV
                out[f"{prefix}.self_attn.{ROPE[kind]}.weight"] = half(value, heads)
            elif part in ("attn.bq", "attn.bk"):
                fused.setdefault(numbers[0], {})[part] = value
            elif part == "mix.weight":
                out[f"{prefix}.mixer.weight"] = value.transpose(0, 1)
            else:
                out.update(self.export_experts(prefix, part, value))
        for layer, parts in fused.items():
            if len(parts) != 2:
                raise ValueError(f"half of layers.{layer}.attn.bq and bk")
            out[f"model.layers.{layer}.self_attn.qk.bias"] = torch.cat(
                [parts["attn.bq"], parts["attn.bk"]]
            )
        if self.listed:
            self.fqn_to_index_mapping = {k: v for k, v in self.listed.items() if k in out}
        return out

    def export_experts(self, prefix: str, part: str, value: Any) -> State:
        out: State = {}
        for expert in self.experts(value.shape[0]):
            where = f"{prefix}.mlp.experts.{expert}"
            if part == "moe.w2":
                out[f"{where}.down_proj.weight"] = value[expert]
            else:
                gate, up = value[expert].chunk(2, dim=0)
                out[f"{where}.gate_proj.weight"] = gate
                out[f"{where}.up_proj.weight"] = up
        return out

    def from_hf(self, hf_state_dict: State) -> State:
        out: State = {}
        experts: dict[tuple[int, str], dict[int, Any]] = {}
        for key, value in hf_state_dict.items():
            name, numbers = split(key)
            if name in BACK:
                out[BACK[name].format(*numbers)] = value
                continue
            layer = numbers[0] if numbers else -1
            part = name.removeprefix("model.layers.{}.")
            if part in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
                kind = "wq" if "q_proj" in part else "wk"
                heads = HEADS if kind == "wq" else KV
                out[f"layers.{layer}.attn.{kind}.weight"] = interleave(value, heads)
            elif part == "self_attn.qk.bias":
                out[f"layers.{layer}.attn.bq"] = value[: HEADS * HEAD].clone()
                out[f"layers.{layer}.attn.bk"] = value[HEADS * HEAD :].clone()
            elif part == "mixer.weight":
                out[f"layers.{layer}.mix.weight"] = value.transpose(0, 1)
            elif re.fullmatch(r"mlp\.experts\.\{\}\.(gate|up|down)_proj\.weight", part):
                experts.setdefault((layer, part.split(".")[3]), {})[numbers[1]] = value
            else:
                raise KeyError(f"no rule for {key}")
        out.update(self.import_experts(experts))
        return out

    def import_experts(self, experts: dict[tuple[int, str], dict[int, Any]]) -> State:
        out: State = {}
        for layer in sorted({layer for layer, _ in experts}):
            stacks = {}
            for kind in ("gate_proj", "up_proj", "down_proj"):
                found = experts.get((layer, kind))
                if found is None:
                    continue
                if sorted(found) != list(range(self.count)):
                    raise ValueError(f"experts of model.layers.{layer} {kind}: {sorted(found)}")
                stacks[kind] = torch.stack([found[i] for i in self.experts(self.count)])
            if ("gate_proj" in stacks) != ("up_proj" in stacks):
                raise ValueError(f"half of gate and up of model.layers.{layer}")
            if "gate_proj" in stacks:
                out[f"layers.{layer}.moe.w13"] = torch.cat(
                    [stacks["gate_proj"], stacks["up_proj"]], dim=1
                )
            if "down_proj" in stacks:
                out[f"layers.{layer}.moe.w2"] = stacks["down_proj"]
        return out

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        if from_quantized:
            return QuantizedReader(path=path, target_dtype=torch.float32)
        return HuggingFaceStorageReader(path)


class QuantizedReader(QuantizedHuggingFaceStorageReader):
    """torch's, which takes codes without a known scale for weights, and exponents for factors."""

    def read_metadata(self) -> Any:
        metadata = super().read_metadata()
        stored = metadata.state_dict_metadata
        for key, entry in stored.items():
            if entry.properties.dtype == torch.float8_e4m3fn:
                why = self.refused(stored.get(self._weight_scale_mapping.get(key)))
                if why:
                    raise ValueError(f"{key} holds fp8 codes, and {why}")
        return metadata

    def refused(self, scale: Any) -> str:
        """Why codes with such a scale are not read."""
        if scale is None:
            return "no scale is found"
        if len(scale.size) != 2:
            return "its scale is no grid"
        return "" if scale.properties.dtype.is_floating_point else "its scale is no float"


class Reference:
    """The right adapter as the independent side."""

    name = "the right adapter"

    def __init__(self, experts: int = EXPERTS) -> None:
        self.made = sized(Right, experts)

    def to_hf(self, state_dict: State) -> State:
        return self.made().to_hf(dict(state_dict))

    def from_hf(self, hf_state_dict: State) -> State:
        return self.made().from_hf(dict(hf_state_dict))


def sized(adapter: Any, experts: int) -> Any:
    """The adapter of a model of so many experts."""
    return type(adapter.__name__, (adapter,), {"count": experts})


def files() -> dict[str, tuple[tuple[int, ...], str]]:
    """Key -> (shape, dtype) of the files, written down apart from the adapter."""
    out: dict[str, tuple[tuple[int, ...], str]] = {
        "model.embed_tokens.weight": ((13, 10), "bfloat16"),
        "model.norm.weight": ((10,), "bfloat16"),
        "lm_head.weight": ((13, 10), "bfloat16"),
        "model.hash.table": ((13, 3), "int64"),
        "model.mask": ((11,), "bool"),
        "model.scale": ((), "float32"),
    }
    for i in range(12):
        layer = f"model.layers.{i}"
        out[f"{layer}.self_attn.q_proj.weight"] = ((18, 10), "bfloat16")
        out[f"{layer}.self_attn.k_proj.weight"] = ((12, 10), "bfloat16")
        out[f"{layer}.self_attn.o_proj.weight"] = ((10, 18), "bfloat16")
        out[f"{layer}.self_attn.qk.bias"] = ((30,), "bfloat16")
        out[f"{layer}.self_attn.q_norm.weight"] = ((6,), "bfloat16")
        out[f"{layer}.self_attn.k_norm.weight"] = ((6,), "bfloat16")
        out[f"{layer}.mixer.weight"] = ((10, 10), "bfloat16")
        if i not in (1, 11):
            continue
        out[f"{layer}.mlp.gate.correction"] = ((12,), "float32")
        for e in range(12):
            out[f"{layer}.mlp.experts.{e}.gate_proj.weight"] = ((7, 10), "bfloat16")
            out[f"{layer}.mlp.experts.{e}.up_proj.weight"] = ((7, 10), "bfloat16")
            out[f"{layer}.mlp.experts.{e}.down_proj.weight"] = ((10, 7), "bfloat16")
    return out


def subject(
    name: str = "right",
    adapter: Callable[..., Any] = Right,
    *,
    listed: bool | Any = True,
    referenced: bool | Any = True,
    capabilities: Capabilities | None = None,
    **more: Any,
) -> Subject:
    """A Subject of the invented model; `listed` and `referenced` give the gate its two oracles."""

    def resized(layers: int = LAYERS, experts: int = EXPERTS) -> Subject:
        return Subject(
            name=name,
            adapter=sized(adapter, experts),
            native=native(layers, experts),
            reference=Reference(experts) if referenced is True else None,
            capabilities=capabilities or Capabilities(quantized=True),
        )

    return Subject(
        name=name,
        adapter=adapter,
        native=native(),
        hf=files() if listed is True else listed or None,
        reference=Reference() if referenced is True else referenced or None,
        capabilities=capabilities or Capabilities(quantized=True),
        resized=resized,
        **more,
    )


def is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
