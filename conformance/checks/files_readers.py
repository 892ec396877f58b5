"""Chapter `files`, second part: the readers that an adapter hands out."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from conformance import codec as codecs
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


def _reader(lab: Lab, path: str, from_quantized: bool) -> Any:
    """The reader, asked for as managers ask: with both arguments, by position."""
    adapter = lab.adapter()
    make = getattr(adapter, "get_hf_storage_reader", None)
    if make is None:
        raise NotApplicable("the adapter has no get_hf_storage_reader")
    with theirs("get_hf_storage_reader"):
        return make(path, from_quantized)


def _load(reader: Any, targets: State) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    # DCP warns at every call that there is no process group.
    with theirs(type(reader).__name__), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load(dict(targets), storage_reader=reader, no_dist=True)


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


def quantized(lab: Lab) -> Iterator[Finding]:
    """With from_quantized=True, fp8 weights come out as values, or the load is refused."""
    if not lab.quantized:
        raise NotApplicable("the subject does not declare quantized files (quantized)")
    found = [k for k, leaf in _small(lab).items() if k.endswith(".weight") and len(leaf.shape) == 2]
    if not found:
        raise NotApplicable("no two-dimensional weight to quantize")
    key = found[-1]
    # Two blocks of 128 with a short last one in both directions: scales differ by block.
    codes = (
        (torch.arange(200 * 136) % 96 + 8)
        .to(torch.uint8)
        .reshape(200, 136)
        .view(torch.float8_e4m3fn)
    )
    scales = codecs.blocks_of(codes)
    target = lab.on_device({key: torch.zeros(200, 136)})
    with tempfile.TemporaryDirectory() as folder:
        name = key.removesuffix(".weight") + ".weight_scale_inv"
        codecs.write({key: codes, name: scales}, folder, {key: 1, name: 2})
        try:
            source = _reader(lab, folder, True)
            _load(source, target)
        except AdapterRaised as error:
            if lab.may.quantized:
                yield Finding(
                    what="the quantized reader cannot read what it is declared to dequantize",
                    keys=(key, name),
                    expected="fp8 codes and, for each block of 128 x 128, a float32 scale",
                    actual=str(error),
                    cause="blocks of another size, or scales of another name",
                    remedy="read published files, or do not declare it (quantized)",
                )
            return
    got = target[key].cpu()
    if torch.equal(got, codecs.dequantized(codes, scales)):
        return
    raw = torch.equal(got, codes.float())
    yield Finding(
        what="the quantized reader loads codes as weights"
        if raw
        else "the quantized reader gives other values than codes times scales",
        keys=(key,),
        coordinate="[0, 0]",
        expected=f"{float(codes[0, 0].float() * scales[0, 0])} (code times scale)",
        actual=f"{float(got[0, 0])}" + (" (the code)" if raw else ""),
        cause="from_quantized is ignored and the plain reader returned"
        if raw
        else "scales are applied to other blocks",
        remedy="return a dequantizing reader, or raise when from_quantized is asked for",
    )
