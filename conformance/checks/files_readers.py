"""Chapter `files`, second part: the readers that an adapter hands out."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from conformance import codec as codecs
from conformance.checks._words import by_template, by_words, count, first_difference
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


def _reader(lab: Lab, path: str, from_quantized: bool) -> Any:
    """The reader, asked for as managers ask: with both arguments, by position."""
    adapter = lab.adapter()
    make = getattr(adapter, "get_hf_storage_reader", None)
    if make is None:
        raise NotApplicable("the adapter has no get_hf_storage_reader")
    with theirs("get_hf_storage_reader"):
        return make(path, from_quantized)


def _load(reader: Any, targets: State, first_row: int = 0) -> None:
    """Fill the targets, or of each the rows from `first_row` on, as a rank's part is read."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.state_dict_loader import load

    class Rows(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            return replace(plan, items=[_rows_of(item, first_row) for item in plan.items])

    planner = Rows() if first_row else DefaultLoadPlanner()
    with theirs(type(reader).__name__), _quiet():
        load(dict(targets), storage_reader=reader, planner=planner, no_dist=True)


def _rows_of(item: Any, first: int) -> Any:
    """What a read of a whole tensor is for its rows from `first` on."""
    offsets = torch.Size([first, *item.dest_offsets[1:]])
    lengths = torch.Size([item.lengths[0] - first, *item.lengths[1:]])
    return replace(item, dest_offsets=offsets, storage_offsets=offsets, lengths=lengths)


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns that there is no process group, and logs each refusal, which is told here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logging.disable(before)


def reader(lab: Lab) -> Iterator[Finding]:
    """The adapter's own reader fills tensors from files that safetensors wrote."""
    state = lab.noise(_small(lab), salt=20)
    targets = lab.on_device({k: torch.zeros_like(v) for k, v in state.items()})
    with tempfile.TemporaryDirectory() as folder:
        codecs.write(state, folder, {key: i % 2 + 1 for i, key in enumerate(state)})
        try:
            source = _reader(lab, folder, False)
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
            _load(source, targets)
        except AdapterRaised as error:
            yield Finding(
                what="the adapter's reader cannot read plain safetensors",
                keys=tuple(state)[:1],
                expected="a storage reader of torch.distributed.checkpoint",
                actual=str(error),
                cause="what is returned is no reader, or one of another format",
                remedy="return HuggingFaceStorageReader(path)",
            )
            return
    wrong = {k: "other bytes" for k, v in state.items() if not same_bits(v, targets[k])}
    for words, keys in by_words(wrong):
        yield Finding(
            what=f"the adapter's reader reads {count(len(keys), 'tensor')} otherwise",
            keys=tuple(keys),
            expected="the bytes of the files",
            actual=words,
            cause="the reader changes what it reads",
            remedy="return HuggingFaceStorageReader(path)",
        )


# Two blocks of 128 with a short last one in both directions: scales differ by block.
_CODES = (
    (torch.arange(200 * 136) % 96 + 8).to(torch.uint8).reshape(200, 136).view(torch.float8_e4m3fn)
)
_GRID = codecs.blocks_of(_CODES)


@dataclass(frozen=True, slots=True)
class _Scene:
    """How files hold the scales of one weight, and what is wrong with a reader that misreads it.

    Codes are worth their `factors`, which may be `stored` otherwise; without a `name` they are not
    there. The rows from `first` on are read. A reader may refuse all but `published` files.
    """

    words: str
    cause: str
    remedy: str
    name: str = "weight_scale_inv"
    factors: torch.Tensor = _GRID
    stored: torch.Tensor | None = None
    first: int = 0
    published: bool = False

    def files(self, key: str) -> State:
        scale = f"{key.removesuffix('weight')}{self.name}"
        stored = self.factors if self.stored is None else self.stored
        return {key: _CODES, **({scale: stored} if self.name else {})}

    @property
    def values(self) -> torch.Tensor:
        """What the codes are worth."""
        return codecs.dequantized(_CODES, self.factors.expand(_GRID.shape))


_SCENES = (
    _Scene(
        "",
        "scales are applied to other blocks",
        "return a dequantizing reader, or raise when from_quantized is asked for",
        published=True,
    ),
    _Scene(
        " where it reads the rows from 64 on",
        "blocks are counted from the first row that is read",
        "find the block of a row by its place in the whole weight",
        first=64,
        published=True,
    ),
    _Scene(
        " where files hold no scale",
        "a weight whose scale is not found is taken for plain values",
        "refuse float8 tensors without a scale, by their names",
        name="",
        factors=torch.tensor(float("nan")),
    ),
    _Scene(
        " where the scale is named .scale",
        "a weight whose scale is not found is taken for plain values",
        "know this name too, or refuse float8 tensors without a scale",
        name="scale",
    ),
    _Scene(
        " where scales are exponents (uint8)",
        "exponents are taken for factors: a byte n means 2^(n - 127)",
        "make factors of them, or refuse scales that are no floats",
        stored=(_GRID.log2() + 127).to(torch.uint8),
    ),
    _Scene(
        " where scales are bfloat16",
        "scales of another dtype than float32 are misread or left out",
        "convert scales to float32 by value, or refuse them",
        stored=_GRID.bfloat16(),
    ),
    _Scene(
        " where one scale without dimensions is for the whole weight",
        "a scale that is no grid is misread or left out",
        "multiply the whole weight by it, or refuse it by its name",
        factors=torch.tensor(0.25),
    ),
)


def quantized(lab: Lab) -> Iterator[Finding]:
    """With from_quantized=True, fp8 weights come out as values, or the load is refused."""
    if not lab.quantized:
        raise NotApplicable("the subject does not declare quantized files (quantized)")
    found = [k for k, leaf in _small(lab).items() if k.endswith(".weight") and len(leaf.shape) == 2]
    if not found:
        raise NotApplicable("no two-dimensional weight to quantize")
    for scene in _SCENES:
        finding = _misread(lab, found[-1], scene)
        if finding is not None:
            yield finding
            if scene.published:
                return  # the others would tell the same once more


def _misread(lab: Lab, key: str, scene: _Scene) -> Finding | None:
    """What is wrong with what the reader makes of a scene's files."""
    target = lab.on_device({key: torch.full(_CODES.shape, float("nan"))})
    files = scene.files(key)
    with tempfile.TemporaryDirectory() as folder:
        codecs.write(files, folder, {name: i for i, name in enumerate(files, 1)})
        try:
            _load(_reader(lab, folder, True), target, scene.first)
        except AdapterRaised as error:
            if not (scene.published and lab.may.quantized):
                return None
            return Finding(
                what="the quantized reader cannot read what it is declared to dequantize"
                + scene.words,
                keys=tuple(files),
                expected="fp8 codes and, for each block of 128 x 128, a float32 scale",
                actual=str(error),
                cause="blocks of another size, or scales of another name",
                remedy="read published files, or do not declare it (quantized)",
            )
    got, wanted = target[key].cpu(), scene.values
    raw = torch.equal(got[scene.first :], _CODES.float()[scene.first :])
    got[: scene.first] = wanted[: scene.first]
    if torch.equal(got, wanted):
        return None
    at, want, have = first_difference(wanted, got)
    may_refuse = "" if scene.published else ", or a refusal"
    return Finding(
        what="the quantized reader "
        + ("loads codes as weights" if raw else "gives other values than codes times scales")
        + scene.words,
        keys=(key,),
        coordinate=at,
        expected=f"{want} (code times scale){may_refuse}" if scene.name else "a refusal",
        actual=f"{have} (the code)" if raw else have or "as it was",
        cause="from_quantized is ignored and the plain reader returned"
        if raw and scene.published
        else scene.cause,
        remedy=scene.remedy,
    )
