"""Chapter `keys`: what goes in comes out, under the right names, and nothing else does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from conformance.checks._words import by_template, by_words, count
from conformance.checks.keys_groups import high_numbers, layers, partial
from conformance.checks.keys_index import index
from conformance.checks.keys_listed import dropped, exact
from conformance.checks.keys_missing import half_group
from conformance.checks.keys_refuse import also_reads, hf_only, lora_refused, unknown_refused
from conformance.lab import AdapterRaised, Lab
from conformance.subject import template_of
from conformance.verdict import Finding, Told
from torchtitan_ckpt.errors import group_keys, nearest

__all__ = [
    "also_reads",
    "exact",
    "half_group",
    "hf_only",
    "high_numbers",
    "import_",
    "index",
    "layers",
    "leaves",
    "lora_refused",
    "partial",
    "total",
    "unknown_refused",
]


def leaves(lab: Lab) -> Iterator[Finding]:
    """Both directions accept the whole model and return tensors under strings."""
    traces = [("to_hf", lab.export)]
    # That from_hf raises is the finding of `keys.import`.
    with contextlib.suppress(AdapterRaised):
        traces.append(("from_hf", lab.imported))
    for direction, trace in traces:
        for kind, keys in by_words(trace.odd):
            yield Finding(
                what=f"{direction} returned {count(len(keys), 'value')} that "
                f"{'is no tensor' if len(keys) == 1 else 'are no tensors'}",
                keys=tuple(keys),
                expected="a torch.Tensor under a str",
                actual=kind,
                cause="a call without its brackets stores the method itself"
                if "method" in kind
                else "a placeholder or a helper's own value is left in the dict",
                remedy="return tensors only",
            )


def total(lab: Lab) -> Iterator[Finding | Told]:
    """Every native element leaves, and leaves once."""
    export, may = lab.export, lab.may
    targets = export.targets()
    lost = dropped(lab)
    if lost and export.leaves and not targets:
        yield _untraced(lab)
        return
    if lost:
        finding = Finding(
            what=f"to_hf dropped {len(lost)} of {count(len(lab.native), 'native tensor')}",
            keys=tuple(lost),
            expected="every native tensor in some tensor of the files",
            actual=f"{count(len(lost), 'tensor')} in none",
            cause=_why_lost(lab, lost[0], targets),
            remedy="update the rule, or declare the loss with a reason (native_only)",
        )
        # A value that is no tensor has no source.
        yield Told(finding, by="keys.leaves") if len(lost) <= len(export.odd) else finding
    for key, sources in export.sources.items():
        if not sources and not lab.hf_only(key):
            yield Finding(
                what="to_hf wrote a tensor that no native tensor went into",
                keys=(key,),
                expected="a tensor made from those that were given",
                actual="made from none of them",
                cause="a constant, or a cached tensor of another call",
                remedy="write what is given, or declare it (hf_only)",
            )
    yield from _unequal(lab, targets, set(may.tied))


def _unequal(lab: Lab, targets: dict[str, list[str]], aliases: set[str]) -> Iterator[Finding]:
    """Elements out against elements in, for each set of keys that belong together."""
    export = lab.export
    wrong: dict[str, tuple[str, str, str]] = {}
    seen: set[str] = set()
    for key in lab.native:
        if key in seen or key not in targets or lab.lossy(key):
            continue
        natives, files = {key}, set(targets[key])
        while True:
            grown = natives | {s for f in files for s in export.sources[f]}
            files |= {t for n in grown for t in targets.get(n, ())}
            if grown == natives:
                break
            natives = grown
        seen |= natives
        files = {f for f in files if not lab.hf_only(f)}
        have = sum(export.leaves[f].numel for f in files)
        want = sum(lab.native[n].numel for n in natives if n not in aliases)
        extra = sum(
            lab.native[a].numel
            for a, s in lab.may.tied.items()
            if a in lab.native and (a in natives or s in natives)
        )
        if have in (want, want + extra) or any(lab.lossy(f) for f in files):
            continue
        name = sorted(natives)[0]
        shown = ", ".join(k for k, _ in group_keys(sorted(files))[:2])
        wrong[name] = (
            "fewer" if have < want else "more",
            f"{want} elements",
            f"{have} elements in {shown}",
        )
    for (less, want_text, have_text), keys in _by_kind(wrong):
        verb = "part of the tensor is dropped" if less == "fewer" else "it is written twice"
        yield Finding(
            what=f"to_hf writes {less} elements of {count(len(keys), 'native tensor')} than it got",
            keys=tuple(keys),
            expected=want_text,
            actual=have_text,
            cause=f"{verb}: an alias or a copy nobody asked for" if less == "more" else verb,
            remedy="write each element once; declare tied names (tied)",
        )


def _by_kind(
    wrong: dict[str, tuple[str, str, str]],
) -> Iterator[tuple[tuple[str, str, str], list[str]]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for key, (less, _, _) in wrong.items():
        groups.setdefault((less, *by_template([key])), []).append(key)
    for keys in groups.values():
        yield wrong[keys[0]], keys


def _names_known(lab: Lab) -> list[str]:
    """Dotted strings in the adapter's own tables: what it thinks the native names are."""
    names: list[str] = []
    for table in vars(lab.adapter()).values() if hasattr(lab.adapter(), "__dict__") else ():
        if isinstance(table, dict):
            names += [n for pair in table.items() for n in pair if isinstance(n, str) and "." in n]
    return names


def _why_lost(lab: Lab, key: str, targets: Mapping[str, list[str]]) -> str:
    """Why no output is made from a native key, as far as names tell."""
    tied = {*lab.may.tied.items(), *((s, a) for a, s in lab.may.tied.items())}
    if twin := next((two for one, two in tied if one == key and two in targets), ""):
        return f"{twin}, which it is tied to, is written in its place"
    template = template_of(key)
    others = [k for k in lab.native if k in targets and template_of(k) == template]
    if others:
        shown = group_keys(others)[0][0]
        return f"{shown} is written: a loop or a condition leaves out this number"
    known = _names_known(lab)
    if key in known or template in known:
        return "the adapter's own table has the name: nothing is made of its tensor"
    # A name that the model has is no old name of another.
    stale = [name for name in by_template(known) if name not in by_template(lab.native)]
    near = nearest(template, stale)
    return "no rule matches" + (f"; nearest: {near} (renamed?)" if near else "")


def _untraced(lab: Lab) -> Finding:
    """No output has a source, neither as torch sees it nor by its values."""
    return Finding(
        what=f"none of {count(len(lab.export.leaves), 'tensor')} that to_hf writes is made from "
        "what it was given",
        keys=tuple(lab.export.leaves),
        expected="tensors made from those given",
        actual="tensors made from none of them",
        cause="they come from another place: a file, a cache, a model that the adapter keeps",
        remedy="convert what is given",
    )


def import_(lab: Lab) -> Iterator[Finding]:
    """`from_hf` returns the model's keys and uses every key it is given."""
    try:
        back = lab.imported
    except AdapterRaised as error:
        if not _works_after_export(lab):
            raise
        yield Finding(
            what=str(error),
            keys=tuple(lab.export.leaves)[:1],
            expected="from_hf of a fresh adapter, as a job that starts from files calls it",
            actual="works only when the same adapter has run to_hf before",
            cause="from_hf uses what to_hf left on the adapter",
            remedy="take sizes from the config, and keep nothing between calls",
        )
        return
    exported = lab.export.used()
    used = back.used()
    missing = [
        k
        for k in lab.native
        if (k in exported or lab.alias(k) in exported)
        and k not in back.leaves
        and k not in back.odd
        and not lab.native_only(k)
    ]
    extra = [k for k in back.leaves if k not in lab.native]
    unused = [
        k
        for k in lab.export.leaves
        if k not in used and k not in lab.hf_tied and not lab.hf_only(k) and back.known
    ]
    if not back.known:
        lab.notes.append("whether from_hf uses each key was not seen: too large to run on values")
    if missing:
        near = nearest(missing[0], extra)
        yield Finding(
            what=f"from_hf does not return {len(missing)} of {len(lab.native)} native keys",
            keys=tuple(missing),
            expected="every key that was exported",
            actual="not returned",
            cause=f"returned as {near} (renamed?)"
            if near
            else "the alias is not filled from what it is tied to"
            if all(map(lab.alias, missing))
            else "the file's key is skipped without a word",
            remedy="return it, or raise",
        )
    if extra:
        yield Finding(
            what=f"from_hf returns {count(len(extra), 'key')} that the model does not have",
            keys=tuple(extra),
            expected="the model's keys",
            actual="returned besides",
            cause="a source kept beside what was made from it, or a wrong name",
            remedy="return the model's keys only",
        )
    if unused and not missing:
        yield Finding(
            what=f"from_hf does not use {len(unused)} of {len(lab.export.leaves)} keys it is given",
            keys=tuple(unused),
            expected="a native tensor made from each",
            actual="none is",
            cause="the tensor is replaced by another or dropped",
            remedy="use it, or declare it (hf_only)",
        )


def _works_after_export(lab: Lab) -> bool:
    """Whether `from_hf`, which a fresh adapter refuses, runs once the same one has exported."""
    adapter = lab.adapter()
    try:
        out = lab.call("to_hf", lab.blank("to_hf"), adapter)
        return isinstance(lab.call("from_hf", dict(out), adapter), Mapping)
    except AdapterRaised:
        return False
