"""Adapters: torchtitan's protocol for state-dict adapters, and `MappingAdapter`, which speaks it.

Any adapter of the protocol can be used by this project; `MappingAdapter` can be used by a
torchtitan job as it is. What it adds to the protocol - plans, key lists, what is left out and why -
comes from the table of a family. It reads config.json and the index of `hf_assets_path` only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torchtitan_ckpt import families
from torchtitan_ckpt.families import model_config as configs
from torchtitan_ckpt.hf_storage import HFReader
from torchtitan_ckpt.manifest import TensorEntry, is_floating
from torchtitan_ckpt.mapping import keys as key_lists
from torchtitan_ckpt.mapping.family import Family
from torchtitan_ckpt.mapping.mapping import LeftOut
from torchtitan_ckpt.mapping.mapping import Mapping as KeyMapping
from torchtitan_ckpt.mapping.plan import Plan
from torchtitan_ckpt.mapping.planner import plan_load, plan_to_hf, plan_to_native
from torchtitan_ckpt.mapping.rule import HF, NATIVE, Rule, Tied

Entries = Mapping[str, TensorEntry]
_FILE_NUMBER = re.compile("[0-9]+")


@runtime_checkable
class StateDictAdapter(Protocol):
    """What torchtitan asks of an adapter, and all that this project asks of a foreign one."""

    fqn_to_index_mapping: dict[Any, int] | None

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]: ...

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]: ...

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any: ...


class MappingAdapter:
    """The adapter of a family's table. Holds no state but what it was made from.

    `model_config` is a Hugging Face config (dict, folder, or path of a config.json), an object with
    its attribute names, or a torchtitan 0.3.0 model config. What that lacks comes from the
    config.json of `hf_assets_path`. `generation` is `titan` or `npu` (see `families`); `experts` is
    the expert format, `standard` or `gmm`; `mtp=False` leaves MTP layers of the files out; `emit`
    switches declared duplicates on; `w13_shards` repairs a w13 fused shard by shard.
    """

    def __init__(
        self,
        model_config: Any,
        hf_assets_path: str | Path | None = None,
        *,
        family: str | Family | None = None,
        generation: str | None = None,
        experts: str = "standard",
        mtp: bool | None = None,
        emit: Collection[str] = (),
        w13_shards: int = 1,
    ) -> None:
        self.model_config = model_config
        self.hf_assets_path = None if hf_assets_path is None else str(hf_assets_path)
        self.config = configs.read(model_config, self.hf_assets_path)
        if family is None:
            family = families.of_config(self.config)
        self.family = families.get(family) if isinstance(family, str) else family
        self.generation = generation or self.family.generations[0]
        self.mapping: KeyMapping = self.family.mapping(
            self.config,
            self.generation,
            experts=experts,
            mtp=mtp,
            emit=emit,
            w13_shards=w13_shards,
        )
        self.fqn_to_index_mapping: dict[Any, int] | None = self._file_numbers()

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Native to Hugging Face, whole or in part. Raises MappingError."""
        return self.mapping.to_hf(state_dict)

    def from_hf(
        self, hf_state_dict: dict[str, Any], *, like: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Hugging Face to native. DTensors get `like`'s placements, else those they came from."""
        return self.mapping.from_hf(hf_state_dict, like=like)

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        """A DCP storage reader over `path` that reads what a job needs, dequantized if asked."""
        return HFReader(path, dequantize=from_quantized)

    def plan_to_hf(self, native: Entries, export_dtype: str | None = None) -> Plan:
        """The streaming plan of an export; see `export_dtype` of this class for the dtypes."""

        def choose(key: str, dtype: str) -> str:
            return dtype if export_dtype is None else self.export_dtype(key, dtype, export_dtype)

        return plan_to_hf(self.mapping, native, dtype=choose)

    def plan_to_native(self, hf: Entries, dtype: str | None = None) -> Plan:
        """The streaming plan of an import. `dtype` is that of native floating tensors."""
        pinned = {key: e.dtype for key, e in self.native_entries().items()} if dtype else {}

        def choose(key: str, given: str) -> str:
            if dtype is None or not is_floating(given):
                return given
            return dtype if pinned.get(key, "") == "float32" else given

        return plan_to_native(self.mapping, hf, dtype=choose)

    def plan_load(self, native: Entries) -> Plan:
        """What a model that wants exactly these native tensors reads; see `Plan.box`."""
        return plan_load(self.mapping, native)

    def export_dtype(self, hf_key: str, dtype: str, requested: str) -> str:
        """The dtype that a Hugging Face tensor of `dtype` is written in when `requested` is asked.

        Integers stay, and so do the tensors that the family pins (`float32` on the hub).
        """
        if not is_floating(dtype):
            return dtype
        match = self.mapping.index(HF).match(hf_key)
        entry = None if match is None else self.mapping.entries[match.entry]
        if isinstance(entry, Tied) and match is not None:
            return self.export_dtype(entry.target.render(match.binding), dtype, requested)
        if isinstance(entry, Rule) and entry.pinned and entry.dtype is not None:
            return entry.dtype
        return requested

    def cast(self, hf_state_dict: Mapping[str, Any], requested: str) -> dict[str, Any]:
        """A Hugging Face state dict in the dtypes of an export; unchanged tensors are shared."""
        import torch

        out: dict[str, Any] = {}
        for key, value in hf_state_dict.items():
            now = str(value.dtype).removeprefix("torch.")
            want = self.export_dtype(key, now, requested)
            out[key] = value if want == now else value.to(getattr(torch, want))
        return out

    def native_entries(self, dtype: str | None = "float32") -> dict[str, TensorEntry]:
        """Every native tensor of the configured model."""
        return key_lists.native_entries(self.mapping, dtype=dtype)

    def hf_entries(self, *, declared: bool = False, stored: bool = False) -> dict[str, TensorEntry]:
        """Every Hugging Face tensor; `stored` as a quantized file of the family holds them."""
        if stored and self.family.layouts:
            return key_lists.stored_entries(
                self.mapping, self.family.layouts_for(self.config), declared=declared
            )
        return key_lists.hf_entries(self.mapping, declared=declared)

    def left_out(self, keys: Iterable[str], side: str = "native") -> list[LeftOut]:
        """What converting these keys leaves out on purpose, with the reasons."""
        return self.mapping.left_out(keys, NATIVE if side == "native" else HF)

    @cached_property
    def tied_native(self) -> dict[str, str]:
        """Native keys that are tied in this model, and what each is tied to."""
        return {
            entry.key: entry.to
            for entry in self.mapping.entries
            if isinstance(entry, Tied) and entry.side == "native"
        }

    def _file_numbers(self) -> dict[Any, int] | None:
        """The number of the file of each key that is written, from the index; None without one."""
        weight_map = configs.weight_map(self.hf_assets_path)
        if weight_map is None:
            return None
        out: dict[Any, int] = {}
        stored = {}
        for layout in self.family.layouts_for(self.config).values():
            stored[layout.weight] = layout.drop
        for key, file in weight_map.items():
            number = _FILE_NUMBER.search(file)
            name = key
            if self.mapping.index(HF).match(name) is None:
                ending = next((end for end in stored if key.endswith(end)), "")
                name = key.removesuffix(ending) + stored.get(ending, "")
            match = self.mapping.index(HF).match(name)
            entry = None if match is None else self.mapping.entries[match.entry]
            written = isinstance(entry, Rule)
            written |= isinstance(entry, Tied) and self.mapping.emits(entry)
            if written and number is not None:
                out[name] = int(number.group())
        return out
