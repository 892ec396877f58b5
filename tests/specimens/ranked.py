"""Adapters that are right on one rank and wrong on several: this project's own, each edited once.

They are classes at the top of a module because rank processes import them. On plain tensors and on
a mesh of one rank each does what the right adapter does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance import Subject
from conformance.subjects import families
from conformance.subjects.configs import CONFIGS
from tests.specimens.right import State, half, interleave
from tests.specimens.specimen import Specimen
from torchtitan_ckpt.adapter import MappingAdapter

# 2 KV heads of 8 rows, 4 other heads; 12 experts in 11 of 12 layers.
DENSE, SPARSE = CONFIGS["llama3"], CONFIGS["qwen3_moe"]
HEADS, HEAD = DENSE["num_key_value_heads"], DENSE["head_dim"]
QUERY, KEY = r"\.(wq|q_proj)\.weight", r"\.(wk|k_proj)\.weight"


class Edited(MappingAdapter):
    """Ours; what an edit changes are tensors that are spread over several ranks."""

    config_of = DENSE
    pattern = ""

    def __init__(self, hf_assets_path: str | None = None) -> None:
        super().__init__(dict(self.config_of), hf_assets_path)

    def to_hf(self, state_dict: State) -> State:
        return self.changed(super().to_hf(self.changed(state_dict, self.given)), self.exported)

    def from_hf(self, hf_state_dict: State) -> State:
        return self.changed(super().from_hf(self.changed(hf_state_dict, self.read)), self.imported)

    def changed(self, state: State, edit: Callable[[DTensor], Any]) -> State:
        return {key: edit(v) if self.meant(key, v) else v for key, v in state.items()}

    def meant(self, key: str, value: Any) -> bool:
        return spread(value) and bool(re.search(self.pattern, key))

    def given(self, value: DTensor) -> Any:
        return value

    exported = read = imported = given


def spread(value: Any) -> bool:
    return isinstance(value, DTensor) and value.device_mesh.size() > 1


class ViewsShards(Edited):
    """The heads are split by a view, which torch refuses on shards that do not divide them."""

    pattern = KEY

    def given(self, value: DTensor) -> Any:
        return value.view(HEADS, HEAD, -1).view(value.shape)


class ViewsShardsOnTheWayBack(Edited):
    pattern = KEY

    def read(self, value: DTensor) -> Any:
        return value.view(HEADS, HEAD, -1).view(value.shape)


class PermutesShardByShard(Edited):
    """The rotary permutation of the rows of a shard, as if each were a head; undone on import."""

    pattern = KEY

    def given(self, value: DTensor) -> Any:
        return _parts(value, lambda part: interleave(part, 1))

    def imported(self, value: DTensor) -> Any:
        return _parts(value, lambda part: half(part, 1))


class StridedIsPlain(Edited):
    """FSDP's strided shards over tensor parallelism are written as if they followed each other."""

    pattern = QUERY

    def exported(self, value: DTensor) -> Any:
        self.lay = value.placements
        return DTensor.from_local(value.to_local(), value.device_mesh, [Shard(0), Shard(0)])

    def read(self, value: DTensor) -> Any:
        return DTensor.from_local(value.to_local(), value.device_mesh, self.lay)


class LastOfEachShardIsLost(Edited):
    """Each rank writes the experts that it holds, but for the last of them."""

    config_of = SPARSE
    pattern = r"experts\.\d*[05]\."

    def to_hf(self, state_dict: State) -> State:
        out = super().to_hf(state_dict)
        return {key: value for key, value in out.items() if not self.meant(key, value)}

    def from_hf(self, hf_state_dict: State) -> State:
        known = self.mapping.from_hf
        experts = {k: v for k, v in hf_state_dict.items() if ".mlp.experts." in k}
        if not any(map(spread, experts.values())):
            return known(hf_state_dict)
        return known({k: v for k, v in hf_state_dict.items() if k not in experts})


class PadsOncePerRank(Edited):
    """The rows of the vocabulary, taken for those of one rank, times the ranks."""

    pattern = "tok_embeddings"

    def imported(self, value: DTensor) -> Any:
        rows = value.shape[0] * (value.device_mesh.size() - 1)
        mesh, everywhere = value.device_mesh, [Replicate()] * value.device_mesh.ndim
        padded = torch.nn.functional.pad(value.full_tensor(), (0, 0, 0, rows))
        return DTensor.from_local(padded, mesh, everywhere)


class PartsAsPlainTensors(Edited):
    """Each rank's part, under one name."""

    pattern = "o_proj"

    def exported(self, value: DTensor) -> Any:
        self.lay = value.device_mesh, value.placements
        return value.to_local().clone()

    def from_hf(self, hf_state_dict: State) -> State:
        back = dict(hf_state_dict)
        for key, value in hf_state_dict.items():
            if "o_proj" in key and hasattr(self, "lay"):
                back[key] = DTensor.from_local(value, *self.lay)
        return super().from_hf(back)


class ReplicasJoined(Edited):
    """The parts of all ranks one after another, whether they are parts or copies."""

    pattern = "o_proj"

    def exported(self, value: DTensor) -> Any:
        axes = zip(value.device_mesh.shape, value.placements, strict=True)
        copies = math.prod(size for size, placement in axes if placement.is_replicate())
        return torch.cat([value.full_tensor()] * copies)


class WithoutRowsIsMissing(Edited):
    """A rank whose part has no rows does not get the tensor back."""

    config_of = SPARSE
    pattern = "q_norm"

    def from_hf(self, hf_state_dict: State) -> State:
        back = super().from_hf(hf_state_dict)
        return {k: v for k, v in back.items() if not self.meant(k, v) or v.to_local().numel()}


class ColumnsForRows(Edited):
    pattern = r"\.wo\."

    def imported(self, value: DTensor) -> Any:
        columns = [Shard(1) if p.is_shard() else p for p in value.placements]
        return value.redistribute(placements=columns)


class AcrossAllRanks(Edited):
    """Two axes of the mesh become one."""

    pattern = "lm_head"

    def imported(self, value: DTensor) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return distribute_tensor(value.full_tensor(), mesh, [Shard(0)])


class StridesForgotten(Edited):
    """The rows come back in another order over the ranks than FSDP has over tensor parallelism."""

    pattern = r"\.w1\."

    def imported(self, value: DTensor) -> Any:
        whole = value.full_tensor()
        return distribute_tensor(whole, value.device_mesh, [Shard(0)] * value.device_mesh.ndim)


def _parts(value: DTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> DTensor:
    return DTensor.from_local(
        change(value.to_local()), value.device_mesh, value.placements, run_check=False
    )


# Check, class, what a finding must name, the split that shows it, the kinds of fault.
_TABLE = """
reshard.shapes      PadsOncePerRank          tok_embeddings.weight  tp2          LAY-05
reshard.shapes      PartsAsPlainTensors      o_proj.weight          fsdp2        GEO-01
reshard.shapes      ReplicasJoined           o_proj.weight          hsdp2x2      GEO-02
reshard.convert     ViewsShards              wk.weight              fsdp4        FUS-03
reshard.convert     ViewsShardsOnTheWayBack  k_proj.weight          fsdp3        FUS-03
reshard.convert     PermutesShardByShard     k_proj.weight          fsdp4        LAY-01
reshard.convert     StridedIsPlain           q_proj.weight          fsdp2 x tp2  LAY-07, GEO-11
reshard.convert     LastOfEachShardIsLost    experts.5              fsdp2        GEO-05
reshard.convert     WithoutRowsIsMissing     q_norm.weight          fsdp5        GEO-10
reshard.placements  ColumnsForRows           wo.weight              fsdp2        LAY-02
reshard.placements  AcrossAllRanks           lm_head.weight         fsdp2 x tp2  LAY-02
reshard.placements  StridesForgotten         w1.weight              fsdp2 x tp2  LAY-02
"""


def subject(name: str, adapter: type[Edited], *degrees: str) -> Subject:
    """A shipped family's subject with an adapter in place of its own."""
    family = next(known for known, config in CONFIGS.items() if config is adapter.config_of)
    made = families.of_config(name, CONFIGS[family])
    return replace(made, adapter=adapter, degrees=degrees)


def _specimens() -> Iterator[Specimen]:
    for line in _TABLE.strip().splitlines():
        check, kind, key, degrees, kinds = re.split(r" {2,}", line)
        name = re.sub(r"(?<!^)(?=[A-Z])", "-", kind).lower()
        make = partial(subject, name, globals()[kind], degrees)
        yield Specimen(name, check, key, kinds=kinds, alone=True, make=make)


SPECIMENS = tuple(_specimens())
