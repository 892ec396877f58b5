"""Carry out a `LoadDecision`: read the manifest, compare everything, read the data, restore.

Every step is taken by all ranks together. Until the comparison has passed nothing is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import fsspec
import torch
import xxhash

from torchtitan_ckpt import strict
from torchtitan_ckpt.adapter import MappingAdapter, StateDictAdapter
from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.config import DATALOADER, MODEL, CheckpointConfig
from torchtitan_ckpt.decision import LoadDecision
from torchtitan_ckpt.errors import MappingError, Problem, RankError
from torchtitan_ckpt.formats import dcp, hf
from torchtitan_ckpt.job import JobState
from torchtitan_ckpt.manifest import Manifest
from torchtitan_ckpt.state.model import load_model_state_dict


def load_dcp(
    decision: LoadDecision, job: JobState, config: CheckpointConfig, ranks: Ranks
) -> list[str]:
    """Load the decided states from a DCP checkpoint. Returns notes for the log."""
    with ranks.together("reading the metadata"):
        manifest = dcp.read_manifest(decision.path)
    _confirm(f"{decision.path}/.metadata", ranks)
    with ranks.together("planning the load"):
        targets = job.targets(decision.states, manifest)
    fit = strict.compare(
        targets,
        manifest,
        (key for key in manifest.keys if job.state_of(key) in decision.states),
        ranks,
        casts=decision.action == "initial" and decision.model_only,
        narrow=config.allow_narrowing,
        # Another data-parallel degree is the loader's to refuse: it knows the remedy.
        excuse=(*config.excuse_mismatch, f"{DATALOADER}.dp_rank_*"),
    )
    others = tuple(name for name in decision.states if name != MODEL)
    wanted = {k: v for k, v in targets.items() if k not in fit.excused}
    model = {k: v for k, v in wanted.items() if job.state_of(k) == MODEL}
    with ranks.together("reading the training state"):
        rest = {k: v for k, v in wanted.items() if k not in model}
        values = dcp.load(decision.path, rest, manifest=manifest)
    notes = list(fit.notes)
    with ranks.together("restoring the training state"):
        notes += job.restore(others, values)
    with ranks.together("reading the model"):
        values = _read_model(decision.path, manifest, model, fit.narrowed)
        # A tensor of the model that is excused keeps its own value.
        kept = {k for k in fit.excused & targets.keys() if job.state_of(k) == MODEL}
        job.restore((MODEL,), {**values, **{k: targets[k] for k in kept}})
    return notes


def _read_model(
    path: str, manifest: Manifest, targets: Mapping[str, Any], narrowed: Collection[str]
) -> dict[str, Any]:
    """Fill the model's tensors; a rounding cast goes through a tensor of the stored dtype."""
    direct = {k: v for k, v in targets.items() if k not in narrowed}
    values = dcp.load(path, direct, manifest=manifest, widen=True)
    for key in targets.keys() - direct.keys():
        target = targets[key]
        stored = torch.empty_like(target, dtype=getattr(torch, manifest.tensors[key].dtype))
        dcp.load(path, {key: stored}, manifest=manifest)
        values[key] = target.copy_(stored)
    return values


def load_hf(
    decision: LoadDecision,
    job: JobState,
    adapter: StateDictAdapter,
    config: CheckpointConfig,
    ranks: Ranks,
) -> list[str]:
    """Load the model from Hugging Face files through an adapter. Returns notes for the log."""
    with ranks.together("reading the headers"):
        manifest = hf.read_manifest(decision.path)
    with ranks.together("asking the adapter"):
        native = job.model_state()
        wanted = _tensors(adapter.to_hf(dict(native)), adapter)
    union = {key for part in ranks.gather(sorted(wanted)) for key in part}
    excused = (*config.excuse_mismatch, *strict.DERIVED, *_declared(adapter))
    with ranks.together("reading the weights"):
        hf.load(
            decision.path,
            wanted,
            manifest=manifest,
            dequantize=decision.quantized,
            widen=True,
            narrow=config.allow_narrowing,
            expected_keys=union,
            excused=excused,
        )
    with ranks.together("converting the weights"):
        if isinstance(adapter, MappingAdapter):
            values = adapter.from_hf(wanted, like=native)
        else:
            values = adapter.from_hf(wanted)
        # A foreign adapter may leave native-only buffers out; they keep their own values.
        load_model_state_dict(job.parts, {**native, **values})
    return _hf_notes(manifest.tensors, native, decision)


def _tensors(converted: Mapping[str, Any], adapter: StateDictAdapter) -> dict[str, Any]:
    """The template of a load; a value that is no tensor is the adapter's fault."""
    wrong = [key for key, value in converted.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise MappingError(
            Problem(
                code="adapter.not-a-tensor",
                what="The adapter's to_hf gave values that are not tensors.",
                where=f"{type(adapter).__name__}: {wrong[0]}",
                actual=type(converted[wrong[0]]).__name__,
                fix="torchtitan-ckpt check shows what is wrong with an adapter",
            )
        )
    return dict(converted)


def _declared(adapter: StateDictAdapter) -> tuple[str, ...]:
    """HF keys that a mapping declares as meaning nothing to the trainer."""
    if not isinstance(adapter, MappingAdapter):
        return ()
    entries = adapter.hf_entries(declared=True).keys() - adapter.hf_entries().keys()
    return tuple(entries)


def _hf_notes(
    tensors: Mapping[str, Any], native: Mapping[str, Any], decision: LoadDecision
) -> list[str]:
    held = sorted({entry.dtype for entry in tensors.values()})
    live = sorted({str(v.dtype).removeprefix("torch.") for v in native.values()})
    return [
        f"{len(tensors)} tensors ({', '.join(held)}{', dequantized' if decision.quantized else ''})"
        f" were loaded into a model in {', '.join(live)}"
    ]


def _confirm(path: str, ranks: Ranks) -> None:
    """Every rank must see the same metadata, byte for byte, before anything is read."""
    digest = ""
    with ranks.together("confirming the metadata"), fsspec.open(path, "rb") as file:
        digest = xxhash.xxh3_128_hexdigest(file.read())
    seen = ranks.gather(digest)
    if len(set(seen)) > 1:
        other = next(r for r, d in enumerate(seen) if d != seen[0])
        raise RankError(
            Problem(
                code="load.not-shared",
                what=f"Ranks 0 and {other} see different checkpoints under one path.",
                where=path,
                cause="the folder is not on a file system that all nodes share, or it is being "
                "replaced",
                fix="put the checkpoint on shared storage",
            )
        )
