"""Carry out a `LoadDecision`: read the manifest, compare everything, read the data, restore.

Every step is taken by all ranks together. Until the comparison has passed nothing is changed.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import fsspec
import torch
import xxhash

from torchtitan_ckpt import experts, progress, strict
from torchtitan_ckpt.adapter import MappingAdapter, StateDictAdapter
from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.config import DATALOADER, MODEL, TRAIN_STATE, CheckpointConfig
from torchtitan_ckpt.decision import LoadDecision
from torchtitan_ckpt.errors import MappingError, MismatchError, Problem, RankError
from torchtitan_ckpt.formats import dcp, hf
from torchtitan_ckpt.formats.folders import raise_for
from torchtitan_ckpt.formats.quantized import detect, logical_manifest
from torchtitan_ckpt.hf_load import load_native
from torchtitan_ckpt.job import JobState
from torchtitan_ckpt.manifest import Manifest, TensorEntry
from torchtitan_ckpt.mapping.rule import HF, HfOnly, Tied
from torchtitan_ckpt.state import rng
from torchtitan_ckpt.state.model import load_model_state_dict
from torchtitan_ckpt.state.tensors import local_bytes
from torchtitan_ckpt.state.theirs import converted

_WINDOW = 64 << 20  # bytes that are compared at a time


def load_dcp(
    decision: LoadDecision,
    job: JobState,
    adapter: StateDictAdapter | None,
    config: CheckpointConfig,
    ranks: Ranks,
) -> list[str]:
    """Load the decided states from a DCP checkpoint. Returns notes for the log.

    What the training state refuses is found before the model is read, for the model's tensors are
    filled in place; the training state takes its values last, when nothing is left to be read. If
    that fails on any rank, everything but the model is as it was on every rank.
    """
    with ranks.together("reading the metadata"):
        manifest = dcp.read_manifest(decision.path)
    _confirm(f"{decision.path}/.metadata", ranks)
    with ranks.together("planning the load"):
        targets = job.targets(decision.states, manifest)
        other = None
        if decision.model_only:
            other = experts.other_format(adapter, targets, manifest.keys)
        native = targets
        if other is not None:
            targets = other.convert(native)
    fit = strict.compare(
        {key: strict.spec(value) for key, value in targets.items()},
        manifest,
        (k for k in manifest.keys if job.state_of(k) in decision.states and not rng.is_key(k)),
        ranks,
        casts=decision.action == "initial" and decision.model_only,
        narrow=config.allow_narrowing,
        # Another data-parallel degree is the loader's to refuse: it knows the remedy.
        excuse=(*config.excuse_mismatch, f"{DATALOADER}.dp_rank_*"),
    )
    others = tuple(name for name in decision.states if name != MODEL)
    wanted = {k: v for k, v in targets.items() if k not in fit.excused}
    model = {k: v for k, v in wanted.items() if job.state_of(k) == MODEL}
    rest = {k: v for k, v in wanted.items() if k not in model}
    rest |= job.generator_targets(others, manifest)
    notes = list(fit.notes)
    stored = sum(manifest.tensors[key].nbytes for key in wanted if key in manifest.tensors)
    with _bar(decision, wanted, stored, ranks) as told:
        with ranks.together("reading the training state"):
            states = dcp.load(decision.path, rest, manifest=manifest, progress=told)
        drawn = {key: states.pop(key) for key in rest if rng.is_key(key)}
        with ranks.together("checking the training state"):
            prepared = job.prepare(others, states, keep=config.keep_hyperparameters)
        with ranks.together("reading the model"):
            values = _read_model(decision.path, manifest, model, fit.narrowed, told)
    with ranks.together("restoring the model"):
        if other is not None:
            values = other.back(values, like=native)
            notes.append(f"experts are stored as {other.stored} and were converted")
        # A tensor of the model that is excused keeps its own value.
        kept = {k: native[k] for k in fit.excused & native.keys() if job.state_of(k) == MODEL}
        job.restore((MODEL,), {**values, **kept})
    with contextlib.ExitStack() as undo:  # where one rank fails, all of them go back
        with ranks.together("restoring the training state"):
            notes += [note for change in prepared for note in change.within(undo)]
        if TRAIN_STATE in others:
            notes += job.restore_generators(drawn, ranks, undo)
        undo.pop_all()
    return notes


def _read_model(
    path: str,
    manifest: Manifest,
    targets: Mapping[str, Any],
    narrowed: Collection[str],
    told: Callable[[int], None] | None,
) -> dict[str, Any]:
    """Fill the model's tensors; a rounding cast goes through a tensor of the stored dtype."""
    direct = {k: v for k, v in targets.items() if k not in narrowed}
    values = dcp.load(path, direct, manifest=manifest, widen=True, progress=told)
    for key in targets.keys() - direct.keys():
        target = targets[key]
        stored = torch.empty_like(target, dtype=getattr(torch, manifest.tensors[key].dtype))
        dcp.load(path, {key: stored}, manifest=manifest, progress=told)
        values[key] = target.copy_(stored)
    return values


def load_hf(
    decision: LoadDecision,
    job: JobState,
    adapter: StateDictAdapter,
    config: CheckpointConfig,
    ranks: Ranks,
) -> list[str]:
    """Load the model from Hugging Face files through an adapter. Returns notes for the log.

    Our own adapters read by plan: each rank exactly the boxes that its shards are made of. Any
    other adapter converts a template, which is filled and converted back, as torchtitan does.
    """
    with ranks.together("reading the headers"):
        manifest = hf.read_manifest(decision.path)
        found = detect(manifest) if decision.quantized else {}
        logical = logical_manifest(manifest, found=found) if found else manifest
    with ranks.together("asking the adapter"):
        native = job.model_state()
        template: dict[str, Any] = {}
        if isinstance(adapter, MappingAdapter):
            specs = _planned(adapter, native)
        else:
            template = _tensors(converted(adapter, "to_hf", dict(native)), adapter)
            specs = {key: strict.spec(value) for key, value in template.items()}
    excused = (*config.excuse_mismatch, *_declared(adapter, logical))
    fit = strict.compare(
        specs,
        logical,
        logical.tensors,
        ranks,
        casts=True,
        narrow=config.allow_narrowing,
        excuse=excused,
        any_dtype=found,
    )
    with ranks.together("comparing copies"):
        if ranks.rank == 0:
            _check_copies(adapter, decision.path, manifest)
    with (
        _bar(decision, native, manifest.nbytes, ranks) as told,
        ranks.together("reading the weights"),
    ):
        if isinstance(adapter, MappingAdapter):
            wanted = {k: v for k, v in native.items() if isinstance(v, torch.Tensor)}
            load_native(
                adapter,
                decision.path,
                wanted,
                dequantize=decision.quantized,
                manifest=manifest,
                progress=told,
            )
            load_model_state_dict(job.parts, native)
        else:
            hf.load(
                decision.path,
                {k: v for k, v in template.items() if k not in fit.excused},
                manifest=manifest,
                dequantize=decision.quantized,
                widen=True,
                narrow=config.allow_narrowing,
                excused=("*",),
                progress=told,
            )
            # An adapter may leave native-only buffers out; they keep their own values.
            ours = converted(adapter, "from_hf", template)
            load_model_state_dict(job.parts, {**native, **ours})
    quantized = f", {len(found)} of them dequantized" if found else ""
    return [f"{len(logical.tensors)} tensors were read{quantized}", *fit.notes]


@contextlib.contextmanager
def _bar(
    decision: LoadDecision, wanted: Mapping[str, Any], stored: int, ranks: Ranks
) -> Iterator[Callable[[int], None] | None]:
    """A bar for what this rank reads, drawn by the first: its share of the stored bytes."""
    everything = sum(v.nbytes for v in wanted.values() if isinstance(v, torch.Tensor))
    total = stored * local_bytes(wanted) // max(1, everything)
    name = posixpath.basename(decision.path.rstrip("/"))
    with progress.bar(f"loading {name}", total, wanted=ranks.rank == 0) as bar:
        yield None if bar is None else bar.advance


def _planned(adapter: MappingAdapter, native: Mapping[str, Any]) -> dict[str, strict.Spec]:
    """The Hugging Face tensors that these native ones are made of, in the native dtypes."""
    entries = {}
    for key, value in native.items():
        found = strict.spec(value)
        if found is not None:
            entries[key] = TensorEntry(key, *found)
    return {
        key: (shape, group.targets[0].dtype)
        for group in adapter.plan_load(entries).groups
        if group.fill is None
        for key, shape in group.source_shapes()
    }


def _tensors(state: Mapping[str, Any], adapter: StateDictAdapter) -> dict[str, Any]:
    """The template of a load; a value that is no tensor is the adapter's fault."""
    wrong = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise MappingError(
            Problem(
                code="adapter.not-a-tensor",
                what="The adapter's to_hf gave values that are not tensors.",
                where=f"{type(adapter).__name__}: {wrong[0]}",
                actual=type(state[wrong[0]]).__name__,
                fix="torchtitan-ckpt check shows what is wrong with an adapter",
            )
        )
    return dict(state)


def _declared(adapter: StateDictAdapter, manifest: Manifest) -> list[str]:
    """Keys of the files that a mapping declares as copies, or as nothing to the trainer."""
    if not isinstance(adapter, MappingAdapter):
        return []
    table = adapter.mapping
    matches = {key: table.index(HF).match(key) for key in manifest.tensors}
    return [
        key
        for key, match in matches.items()
        if match is not None and isinstance(table.entries[match.entry], HfOnly | Tied)
    ]


def _check_copies(adapter: StateDictAdapter, path: str, manifest: Manifest) -> None:
    """A declared copy must equal what it copies, or the file is of an untied model.

    Copies that the table declares as free to differ are not compared.
    """
    if not isinstance(adapter, MappingAdapter):
        return
    keys = list(manifest.tensors)
    different = []
    with hf.open_reader(path, manifest=manifest, raw=True) as reader:
        for tied, key, target in adapter.mapping.bound_ties(HF, keys):
            if tied.import_loss or target not in manifest.tensors:
                continue
            shapes = {manifest.tensors[key].shape, manifest.tensors[target].shape}
            if len(shapes) > 1 or not _equal(reader, key, target, manifest.tensors[key]):
                different.append((key, target))
    if different:
        raise MismatchError(
            *(
                Problem(
                    code="load.copy-differs",
                    what=f"{key} should be a copy of {target}, and holds other values.",
                    where=path,
                    cause="the files are of a model that does not tie them",
                    fix="set tie_word_embeddings (or the like) in the model's config as the files "
                    "have it",
                )
                for key, target in different
            )
        )


def _equal(reader: hf.HfReader, key: str, target: str, entry: TensorEntry) -> bool:
    """Bitwise equality of two tensors of one file set, a window at a time."""
    if not entry.shape:
        return torch.equal(reader.read(key), reader.read(target))
    rows, row = entry.shape[0], max(1, entry.nbytes // max(1, entry.shape[0]))
    step = max(1, _WINDOW // row)
    for start in range(0, rows, step):
        offsets = (start, *(0 for _ in entry.shape[1:]))
        sizes = (min(step, rows - start), *entry.shape[1:])
        a, b = (reader.read(name, offsets, sizes) for name in (key, target))
        if a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return False
    return True


def _confirm(path: str, ranks: Ranks) -> None:
    """Every rank must see the same metadata, byte for byte, before anything is read."""
    digest = ""
    with ranks.together("confirming the metadata"):
        try:
            with fsspec.open(path, "rb") as file:
                digest = xxhash.xxh3_128_hexdigest(file.read())
        except OSError as error:
            raise_for(error, path)
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
