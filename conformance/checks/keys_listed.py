"""Chapter `keys`, fourth part: what is written against two lists, the files' and the index."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conformance import codec
from conformance.checks._words import count
from conformance.lab import Lab, NotApplicable
from conformance.subject import numbers_of
from conformance.verdict import Finding, Told
from torchtitan_ckpt.errors import nearest

_HEAD = "lm_head.weight"


def dropped(lab: Lab) -> list[str]:
    """Native keys that `to_hf` makes nothing of, and that no declaration lets go."""
    targets = lab.export.targets()
    return [
        key
        for key in lab.native
        if key not in targets and not lab.native_only(key) and not targets.get(lab.alias(key) or "")
    ]


def exact(lab: Lab) -> Iterator[Finding | Told]:
    """The keys written are exactly those of an independent list."""
    wanted, written = lab.hf.leaves, lab.export.leaves
    missing = [
        k for k in wanted if k not in written and k not in lab.export.odd and not lab.hf_only(k)
    ]
    missing = _without_copies(lab, missing)
    extra = [k for k in written if k not in wanted and not lab.hf_only(k)]
    if missing:
        near = nearest(missing[0], extra)
        finding = Finding(
            what=f"to_hf does not write {len(missing)} of {count(len(wanted), 'key')} of the files",
            keys=tuple(missing),
            expected=f"the keys of {lab.hf.source}",
            actual="not written",
            cause=f"written as {near} (renamed?)" if near else "no rule writes it",
            remedy="correct the name, or declare the key (hf_only)",
            oracle=lab.hf.source,
        )
        same = not extra and _holds(lab, missing, dropped(lab))
        yield Told(finding, by="keys.total") if same else finding
    if extra:
        near = nearest(extra[0], missing)
        yield Finding(
            what=f"to_hf writes {count(len(extra), 'key')} that the files do not have",
            keys=tuple(extra),
            expected=f"the keys of {lab.hf.source}, and no other",
            actual="written",
            cause=f"the files say {near}" if near else "a copy, an alias or a wrong name",
            remedy="correct the name",
            oracle=lab.hf.source,
        )


def _without_copies(lab: Lab, missing: list[str]) -> list[str]:
    """The keys without the duplicates that files may hold of a tied pair that is written once.

    One for each name of the pair that nothing is written for: of the shape of what is written,
    or, where the list has no shapes, numbered as deep as the name is.
    """
    wanted, leaves, targets = lab.hf.leaves, lab.export.leaves, lab.export.targets()
    missing = list(missing)
    for source in dict.fromkeys(lab.may.tied.values()):
        names = [n for n in (source, *lab.may.tied) if n == source or lab.alias(n) == source]
        files = {t for n in names for t in targets.get(n, ())}
        shapes = {leaves[t].shape for t in files}
        for name in (n for n in names[len(files) :] if files and n in lab.native):
            depth = len(numbers_of(name))
            copies = [
                k
                for k in missing
                if (leaf.shape in shapes if (leaf := wanted[k]) else len(numbers_of(k)) == depth)
            ]
            if copies:
                missing.remove(nearest(name, copies) or copies[0])
    return missing


def _holds(lab: Lab, keys: list[str], natives: list[str]) -> bool:
    """Whether the files' keys are those of these native tensors, as far as their sizes tell."""
    sizes = [leaf.numel for k in keys if (leaf := lab.hf.leaves[k])]
    unknown = len(sizes) < len(keys)
    return bool(natives) and (unknown or sum(sizes) == sum(lab.native[n].numel for n in natives))


def index(lab: Lab) -> Iterator[Finding]:
    """`fqn_to_index_mapping` lists exactly the keys that are written."""
    if not lab.takes_assets:
        raise NotApplicable("the subject's adapter factory takes no hf_assets_path")
    written = list(lab.export.leaves)
    listed = list(dict.fromkeys([*written, *lab.listed, *_tied_head(lab)]))
    files = {key: number % 3 + 1 for number, key in enumerate(listed)}
    with tempfile.TemporaryDirectory() as folder:
        content = {
            "metadata": {"total_size": 0},
            "weight_map": {k: codec.file_name(n, 3) for k, n in files.items()},
        }
        Path(folder, codec.INDEX).write_text(json.dumps(content))
        adapter = lab.adapter(folder)
        lab.convert("to_hf", lab.blank("to_hf"), adapter)
    mapping = getattr(adapter, "fqn_to_index_mapping", None)
    if not mapping:
        yield Finding(
            what="the adapter was given an index and has no fqn_to_index_mapping",
            keys=tuple(written[:1]),
            expected=f"{count(len(written), 'key')} with their file's number",
            actual=repr(mapping),
            cause="hf_assets_path is not read",
            remedy="read model.safetensors.index.json of hf_assets_path",
        )
        return
    stale = [k for k in mapping if k not in lab.export.leaves]
    absent = [k for k in written if k not in mapping]
    moved = [k for k in written if k in mapping and mapping[k] != files[k]]
    text = [k for k in moved if not isinstance(mapping[k], int)]
    for what, keys, cause in (
        (
            "lists {} that to_hf does not write",
            stale,
            "the writer makes a file that nothing can open for a key that never comes",
        ),
        ("lacks {} that to_hf writes", absent, "the index is cut down by another list"),
        (
            "puts {} into another file than the index it was given",
            moved,
            f"a file's number as {type(mapping[text[0]]).__name__}, not as int"
            if text
            else "files are counted anew, or numbers are cut out of names by position",
        ),
    ):
        if keys:
            want = files[keys[0]] if keys[0] in written else "absent"
            have = repr(mapping[keys[0]]) if keys[0] in mapping else "absent"
            yield Finding(
                what="fqn_to_index_mapping " + what.format(count(len(keys), "key")),
                keys=tuple(keys),
                expected=f"{keys[0]}: {want}",
                actual=f"{keys[0]}: {have}",
                cause=cause,
                remedy="keep the map equal to what is written, in to_hf",
            )


def _tied_head(lab: Lab) -> list[str]:
    """What published indexes list of a tied model besides, where no list of the files says."""
    return [_HEAD] if lab.may.tied and lab.subject.hf is None else []
