"""Chapter `keys`, fifth part: the map of keys to files that an adapter reads from an index."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance import codec
from conformance.checks._quiet import quiet
from conformance.checks._words import count
from conformance.checks.keys_groups import components
from conformance.fingerprint import State
from conformance.lab import AdapterRaised, Lab, NotApplicable
from conformance.verdict import Finding

_MAP = "fqn_to_index_mapping"
_HEAD = "lm_head.weight"
_USUAL = "model-{:05d}-of-{:05d}.safetensors"
_LONGER = "model-{:05d}-of-{:06d}.safetensors"  # as DeepSeek-V3 is published
_FILES = 12  # numbers of two digits, of which one is another number
_FILE = _LONGER.format(_FILES, _FILES)
# When a map is wrong, why, and what to do.
_NAMED = (
    f"where files are called {_FILE}",
    "the name of a file is taken for a pattern of fixed widths",
    "take the first number of the name, of whatever width",
)
_CALLED = (
    "once a part of the model was exported and imported",
    "the map is cut down, or emptied, for good: by to_hf of a part, or by from_hf",
    "keep what the index says, and make the map of it at each to_hf",
)


def index(lab: Lab) -> Iterator[Finding]:
    """`fqn_to_index_mapping` lists exactly the keys that are written, in the index's files.

    It is read after `to_hf` of the whole model, as torchtitan's manager reads it.
    """
    if not lab.takes_assets:
        raise NotApplicable("the subject's adapter factory takes no hf_assets_path")
    files, whole = _files(lab), lab.blank("to_hf")
    with tempfile.TemporaryDirectory() as folder:
        adapter = _on_index(lab, folder, _USUAL, files)
        lab.call("to_hf", dict(whole), adapter)
        yield from list(_wrong(lab, adapter, files)) or _later(lab, folder, files, whole)
    if hasattr(adapter, _MAP):
        yield from _without_index(lab, files)


def _files(lab: Lab) -> dict[str, int]:
    """An index as it is published: each key as it is stored, scales among them, and its file.

    What is written besides is added: that it is too much is not for this check to tell.
    """
    stored = dict.fromkeys(lab.stored or _with_scales(lab))
    others = [*lab.export.leaves, *lab.listed, *_tied_head(lab)]
    keys = [*stored, *dict.fromkeys(k for k in others if not {k, _packed(k)} & stored.keys())]
    return {key: _FILES - number % _FILES for number, key in enumerate(keys)}


def _with_scales(lab: Lab) -> Iterator[str]:
    """The keys written, and what scales are called of a quantized model of which no list tells."""
    for key, leaf in lab.export.leaves.items() if lab.quantized else ():
        yield key
        if key.endswith(".weight") and len(leaf.shape) == 2:
            yield f"{key}_scale_inv"


def _packed(key: str) -> str:
    """What a stack of experts in mxfp4 is stored as."""
    return f"{key}_blocks"


def _tied_head(lab: Lab) -> list[str]:
    """What published indexes list of a tied model besides, where no list of the files says."""
    return [_HEAD] if lab.may.tied and lab.subject.hf is None else []


def _on_index(lab: Lab, folder: str, names: str, files: Mapping[str, int]) -> Any:
    """A fresh adapter on an index of files of such names."""
    weight_map = {key: names.format(number, _FILES) for key, number in files.items()}
    content = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    Path(folder, codec.INDEX).write_text(json.dumps(content))
    return lab.adapter(folder)


def _wrong(lab: Lab, adapter: Any, files: Mapping[str, int]) -> Iterator[Finding]:
    """How an adapter's map differs from the index, cut down to what is written."""
    mapping, written = getattr(adapter, _MAP, None), lab.export.leaves
    if not mapping:
        yield Finding(
            what=f"the adapter was given an index and has no {_MAP}",
            keys=tuple(written)[:1],
            expected=f"{count(len(written), 'key')} with their file's number",
            actual=repr(mapping) if hasattr(adapter, _MAP) else "no such attribute",
            cause="hf_assets_path is not read",
            remedy="read model.safetensors.index.json of hf_assets_path",
        )
        return
    right = {k: files[k] if k in files else files[_packed(k)] for k in written}
    moved = [k for k in written if k in mapping and mapping[k] != right[k]]
    text = [k for k in moved if isinstance(mapping[k], str) and mapping[k].lstrip("0").isdigit()]
    text = [k for k in text if int(mapping[k]) == right[k]]
    for what, keys, cause, remedy in (
        (
            "lists {} that to_hf does not write",
            [k for k in mapping if k not in written],
            "keys of the index stay in the map that are not written: torchtitan's save gives each "
            "an entry without a dtype, and safetensors opens no file with such an entry",
            "keep the map equal to what is written, in to_hf",
        ),
        (
            "lacks {} that to_hf writes",
            [k for k in written if k not in mapping],
            "the index is cut down by another list",
            "keep the map equal to what is written, in to_hf",
        ),
        (
            "gives the file numbers of {} as text",
            text,
            "a piece of the name is kept as it is; torchtitan's save computes with the number when "
            "it joins the files of its ranks, and ends with a TypeError",
            "make an int of it",
        ),
        (
            "puts {} into another file than the index it was given",
            [k for k in moved if k not in set(text)],
            "files are counted anew, or numbers are cut out of names by position",
            "keep the number that the index has",
        ),
    ):
        if keys:
            yield Finding(
                what=f"{_MAP} " + what.format(count(len(keys), "key")),
                keys=tuple(keys),
                expected=f"{keys[0]}: {right.get(keys[0], 'absent')}",
                actual=f"{keys[0]}: {repr(mapping[keys[0]]) if keys[0] in mapping else 'absent'}",
                cause=cause,
                remedy=remedy,
            )


def _later(lab: Lab, folder: str, files: Mapping[str, int], whole: State) -> Iterator[Finding]:
    """What is right at first, with longer names and after calls that are not the first."""
    try:
        adapter = _on_index(lab, folder, _LONGER, files)
    except AdapterRaised as error:
        key, (where, cause, remedy) = next(iter(files)), _NAMED
        yield Finding(
            what=f"no adapter can be made on an index {where}",
            keys=(key,),
            expected=f"{key}: {_FILES}",
            actual=str(error).replace(folder, "hf_assets_path"),
            cause=cause,
            remedy=remedy,
        )
        return
    part = next(iter(components(lab))) if lab.may.partial else whole
    with suppress(AdapterRaised):  # other checks tell
        some = lab.convert("to_hf", {key: whole[key] for key in part}, adapter)
        lab.convert("from_hf", some, adapter)
    lab.call("to_hf", dict(whole), adapter)
    wrong = list(_wrong(lab, adapter, files))
    if wrong:
        alone = _on_index(lab, folder, _LONGER, files)
        lab.call("to_hf", dict(whole), alone)
        unread = list(_wrong(lab, alone, files))
        when, cause, remedy = _NAMED if unread else _CALLED
        for one in unread or wrong:
            yield replace(one, what=f"{one.what} {when}", cause=cause, remedy=remedy)


def _without_index(lab: Lab, files: Mapping[str, int]) -> Iterator[Finding]:
    """Without a folder, and on one without an index, an adapter is made, and has no map."""
    first = tuple(lab.export.leaves)[:1]
    with tempfile.TemporaryDirectory() as folder:
        places = {"without hf_assets_path": None, "on a folder without an index": folder}
        for where, assets in places.items():
            try:
                with quiet():
                    adapter = lab.adapter(assets)
            except AdapterRaised as error:
                yield Finding(
                    what=f"no adapter can be made {where}",
                    keys=first,
                    expected=f"an adapter whose {_MAP} is None",
                    actual=str(error).replace(folder, "hf_assets_path"),
                    cause="a job that starts from no weights names a folder with a tokenizer only, "
                    "and a small model lies in one file: neither has an index",
                    remedy="read the index where there is one",
                )
                continue
            found = getattr(adapter, _MAP, None) or {}
            known = [key for key in found if key in files]
            if not hasattr(adapter, _MAP):
                yield Finding(
                    what=f"an adapter made {where} has no {_MAP}",
                    keys=first,
                    expected="None",
                    actual="no such attribute",
                    cause="torchtitan's manager asks for it at each save of Hugging Face files",
                    remedy="set it in any case, to None where there is no index",
                )
            elif known and all(found[key] == files[key] for key in known):
                yield Finding(
                    what=f"an adapter made {where} has the {_MAP} of another",
                    keys=tuple(found),
                    expected="None",
                    actual=f"the map of {count(len(found), 'key')} that another read",
                    cause="the map is kept on the class or in the module",
                    remedy="keep it on the instance",
                )
