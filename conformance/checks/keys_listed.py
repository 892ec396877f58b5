"""Chapter `keys`, fourth part: what is written against the list of the files."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.checks._words import count
from conformance.lab import Lab
from conformance.subject import numbers_of
from conformance.verdict import Finding, Told
from torchtitan_ckpt.errors import nearest


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
    held = copies(lab)
    missing = [k for k in _unwritten(lab) if k not in held]
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


def _unwritten(lab: Lab) -> list[str]:
    """The keys of the list that `to_hf` does not write, and that are not declared."""
    given = lab.export.leaves.keys() | lab.export.odd.keys()
    return [k for k in lab.listed if k not in given and not lab.hf_only(k)]


def copies(lab: Lab) -> dict[str, str]:
    """Duplicates that files hold of a tied pair that is written once, and the keys written.

    One for each name of the pair that nothing is written for: of the shape of what is written,
    or, where the list has no shapes, numbered as deep as the name is.
    """
    wanted, leaves, targets = lab.listed, lab.export.leaves, lab.export.targets()
    missing, held = _unwritten(lab), {}
    for source in dict.fromkeys(lab.may.tied.values()):
        names = [n for n in (source, *lab.may.tied) if n == source or lab.alias(n) == source]
        files = list(dict.fromkeys(t for n in names for t in targets.get(n, ())))
        shapes = {leaves[t].shape for t in files}
        for name in (n for n in names[len(files) :] if files and n in lab.native):
            depth = len(numbers_of(name))
            found = [
                k
                for k in missing
                if (leaf.shape in shapes if (leaf := wanted[k]) else len(numbers_of(k)) == depth)
            ]
            if found:
                copy = nearest(name, found) or found[0]
                missing.remove(copy)
                held[copy] = files[0]
    return held


def _holds(lab: Lab, keys: list[str], natives: list[str]) -> bool:
    """Whether the files' keys are those of these native tensors, as far as their sizes tell."""
    sizes = [leaf.numel for k in keys if (leaf := lab.hf.leaves[k])]
    unknown = len(sizes) < len(keys)
    return bool(natives) and (unknown or sum(sizes) == sum(lab.native[n].numel for n in natives))
