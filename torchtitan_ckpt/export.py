"""The model as a last save writes it: its dtype, its expert format, its Hugging Face names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchtitan_ckpt import progress
from torchtitan_ckpt.adapter import MappingAdapter, StateDictAdapter
from torchtitan_ckpt.assets import config_changes, copy_assets
from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.config import CheckpointConfig
from torchtitan_ckpt.formats import hf
from torchtitan_ckpt.job import JobState
from torchtitan_ckpt.state.model import export_state_dict, pinned_fp32
from torchtitan_ckpt.state.tensors import local_bytes
from torchtitan_ckpt.state.theirs import converted


def native_model(job: JobState, dtype: torch.dtype | None) -> dict[str, Any]:
    """The model's tensors, floating ones cast to `dtype` unless the model pins them."""
    state = job.model_state()
    return state if dtype is None else export_state_dict(state, dtype, pinned_fp32(job.parts))


def hf_model(job: JobState, adapter: StateDictAdapter, dtype: torch.dtype) -> dict[str, Any]:
    """The model under its Hugging Face names. Pinned are what the model and the family pin."""
    if not isinstance(adapter, MappingAdapter):
        return converted(adapter, "to_hf", native_model(job, dtype))
    name = str(dtype).removeprefix("torch.")
    return adapter.cast(converted(adapter, "to_hf", job.model_state()), name)


def save_hf(
    state: dict[str, Any],
    adapter: StateDictAdapter,
    path: str,
    step: int,
    ranks: Ranks,
    config: CheckpointConfig,
    assets: str | None,
) -> None:
    """Write Hugging Face files. The file map is that of the adapter's index, where it has one.

    What lies beside the weights in `assets` (config, tokenizer) is copied first, so that the index
    still comes last.
    """
    with ranks.together("copying what lies beside the weights"):
        if ranks.rank == 0 and assets and Path(assets).is_dir():
            changes = config_changes(dtype=config.export_dtype, quantized="", dequantized=True)
            copy_assets(Path(assets), Path(path), changes)
    # One map for all ranks: under pipelines each holds other keys.
    own = {k: n for k, n in (adapter.fqn_to_index_mapping or {}).items() if k in state}
    file_map = {k: n for part in ranks.gather(own) for k, n in part.items()}
    # Who writes how much is decided inside, so the bar of one among several ranks has no end.
    total = local_bytes(state) if ranks.size == 1 else None
    with progress.bar(f"saving step-{step}", total, wanted=ranks.rank == 0) as bar:
        hf.save(
            state,
            path,
            file_map=file_map or None,
            process_group=ranks.group,
            ownership=config.hf_ownership,
            sync_files=config.sync_files,
            progress=None if bar is None else bar.advance,
        )
