"""Chapter `files`, second part: the reader of plain files that an adapter hands out."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conformance import codec as codecs
from conformance.checks._quiet import quiet
from conformance.checks._words import by_template, by_words, count
from conformance.fingerprint import State, same_bits
from conformance.lab import AdapterRaised, Lab, NotApplicable, theirs
from conformance.template import Leaf
from conformance.verdict import Finding

_ENOUGH = 2_000_000


def _small(lab: Lab) -> dict[str, Leaf]:
    """One tensor of each template of the files, small ones first, up to a few megabytes."""
    chosen: dict[str, Leaf] = {}
    total = 0
    firsts = [keys[0] for keys in by_template(lab.export.leaves).values()]
    for key in sorted(firsts, key=lambda k: lab.export.leaves[k].numel):
        leaf = lab.export.leaves[key]
        if chosen and total + leaf.numel > _ENOUGH:
            break
        chosen[key] = leaf
        total += leaf.numel
    return chosen


def reader_of(adapter: Any, path: str, from_quantized: bool) -> Any:
    """The reader, asked for as managers ask: with both arguments, by position."""
    with theirs("get_hf_storage_reader"):
        return adapter.get_hf_storage_reader(path, from_quantized)


def read(reader: Any, targets: State, first_row: int = 0) -> None:
    """Fill the targets, or of each the rows from `first_row` on, as a rank's part is read."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.state_dict_loader import load

    class Rows(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            return replace(plan, items=[_rows_of(item, first_row) for item in plan.items])

    planner = Rows() if first_row else DefaultLoadPlanner()
    with theirs(type(reader).__name__), quiet():
        load(dict(targets), storage_reader=reader, planner=planner, no_dist=True)


def _rows_of(item: Any, first: int) -> Any:
    """What a read of a whole tensor is for its rows from `first` on."""
    offsets = torch.Size([first, *item.dest_offsets[1:]])
    lengths = torch.Size([item.lengths[0] - first, *item.lengths[1:]])
    return replace(item, dest_offsets=offsets, storage_offsets=offsets, lengths=lengths)


def reader(lab: Lab) -> Iterator[Finding]:
    """The adapter's own reader fills tensors from files that safetensors wrote.

    The adapter is made on another folder, whose files hold other values under the same keys.
    """
    small = _small(lab)
    state, others = lab.noise(small, salt=20), lab.noise(small, salt=21)
    targets = lab.on_device({k: torch.zeros_like(v) for k, v in state.items()})
    with tempfile.TemporaryDirectory() as root:
        folder, assets = Path(root, "step"), Path(root, "assets")
        for where, values in ((folder, state), (assets, others)):
            where.mkdir()
            codecs.write(values, where, {key: i % 2 + 1 for i, key in enumerate(values)})
        adapter = lab.adapter(str(assets))
        if not (lab.takes_assets or hasattr(adapter, "get_hf_storage_reader")):
            raise NotApplicable("the adapter has no get_hf_storage_reader")
        if lab.takes_assets:
            yield from _homeless(adapter, assets, tuple(state)[:1])
        try:
            source = reader_of(adapter, str(folder), False)
        except AdapterRaised as error:
            yield Finding(
                what=str(error),
                keys=tuple(state)[:1],
                expected="a storage reader for get_hf_storage_reader(path, from_quantized)",
                actual=type(error.error).__name__,
                cause="it does not take what managers give it"
                if isinstance(error.error, TypeError)
                else "there is no reader, and no load from files",
                remedy="def get_hf_storage_reader(self, path, from_quantized=False)",
            )
            return
        try:
            read(source, targets)
        except AdapterRaised as error:
            yield Finding(
                what="the adapter's reader cannot read plain safetensors",
                keys=tuple(state)[:1],
                expected="a storage reader of torch.distributed.checkpoint",
                actual=str(error).replace(f"{root}/", ""),
                cause="what is returned is no reader, or one of another format",
                remedy="return HuggingFaceStorageReader(path)",
            )
            return
    wrong = {k: "other bytes" for k, v in state.items() if not same_bits(v, targets[k])}
    astray = [key for key in wrong if same_bits(others[key], targets[key])]
    if astray:
        yield Finding(
            what=f"the adapter's reader reads {count(len(astray), 'tensor')} from another folder",
            keys=tuple(astray),
            expected="the bytes of the files in the path that it is asked for",
            actual="those in hf_assets_path",
            cause="get_hf_storage_reader ignores `path`",
            remedy="return HuggingFaceStorageReader(path)",
        )
    for words, keys in by_words({k: v for k, v in wrong.items() if k not in astray}):
        yield Finding(
            what=f"the adapter's reader reads {count(len(keys), 'tensor')} otherwise",
            keys=tuple(keys),
            expected="the bytes of the files",
            actual=words,
            cause="the reader changes what it reads",
            remedy="return HuggingFaceStorageReader(path)",
        )


def _homeless(adapter: Any, assets: Path, keys: tuple[str, ...]) -> Iterator[Finding]:
    """An adapter that is made on a folder says which."""
    found = getattr(adapter, "hf_assets_path", None)
    if found is None or Path(str(found)).resolve() != assets.resolve():
        absent = "None" if hasattr(adapter, "hf_assets_path") else "no such attribute"
        yield Finding(
            what="the adapter does not say on which folder it was made",
            keys=keys,
            expected="hf_assets_path, as it was given",
            actual=absent if found is None else "another folder",
            cause="torchtitan's manager asks for it where a job starts from Hugging Face files and "
            "no initial_load_path is set",
            remedy="self.hf_assets_path = hf_assets_path",
        )
