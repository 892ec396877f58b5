"""Chapter `keys`, second part: what must be refused, and what must be accepted besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from conformance.checks._words import by_template, count
from conformance.fingerprint import bits
from conformance.lab import AdapterRaised, Direction, Lab, NotApplicable
from conformance.subject import matches, numbers_of, template_of
from conformance.template import Leaf
from conformance.trace import Trace
from conformance.verdict import Finding
from torchtitan_ckpt.manifest import is_floating

_PROBE = Leaf((3, 5), "float32")


def unknown_refused(lab: Lab) -> Iterator[Finding]:
    """An unknown key raises, or comes out unchanged under its own name; it never vanishes."""
    for direction, leaves in _sides(lab):
        yield from _probe(lab, direction, _unknown(list(leaves)))


def lora_refused(lab: Lab) -> Iterator[Finding]:
    """LoRA and PEFT keys raise; a checkpoint without them is not the one that was asked for."""
    asked = False
    for direction, leaves in _sides(lab):
        linear = [k for k in leaves if k.endswith(".weight") and len(leaves[k].shape) == 2]
        if not linear:
            continue
        asked = True
        stem = next(filter(numbers_of, linear), linear[0]).removesuffix(".weight")
        names = (
            [f"{stem}.lora_A.weight", f"{stem}.lora_b.weight"]
            if direction == "to_hf"
            else [f"base_model.model.{stem}.lora_A.weight", f"{stem}.lora_B.default.weight"]
        )
        yield from _probe(lab, direction, names)
    if not asked:
        raise NotApplicable("no key ends in .weight and has two dimensions")


def _sides(lab: Lab) -> tuple[tuple[Direction, Mapping[str, Leaf]], ...]:
    return ("to_hf", lab.native), ("from_hf", lab.export.leaves)


def _unknown(keys: list[str]) -> list[str]:
    """Names that no adapter can know, made from real ones."""
    names = ["gate_probe.weight"]
    layered = next(filter(numbers_of, keys), "")
    if layered:
        stem, _, leaf = layered.rpartition(".")
        names.append(f"{stem}_gate_probe.{leaf}")
    deep = max(keys, key=lambda key: (len(numbers_of(key)), "expert" in key, len(key)))
    stem, _, leaf = deep.rpartition(".")
    # A rule anchored on a suffix misses the same tensor with another one.
    names.append(f"{stem}.gate_probe_scale" if leaf == "weight" else f"{deep}_gate_probe")
    return names


def _probe(lab: Lab, direction: Direction, names: list[str]) -> Iterator[Finding]:
    dropped, changed = [], {}
    for name in names:
        probe = torch.arange(1.0, 16.0).reshape(_PROBE.shape)
        try:
            out = lab.convert(direction, {**lab.blank(direction), name: probe})
        except AdapterRaised:
            continue
        found = [
            k
            for k, v in out.items()
            if v.numel() == probe.numel()
            and not v.is_meta
            and v.dtype == probe.dtype
            and torch.equal(bits(v).flatten(), bits(probe).flatten())
        ]
        if not found:
            dropped.append(name)
        elif name not in found:
            changed[name] = found[0]
    if dropped:
        yield Finding(
            what=f"{direction} dropped {len(dropped)} of {count(len(names), 'unknown key')} "
            "without a word",
            keys=tuple(dropped),
            expected="an error, or the key handed on as it is",
            actual="neither",
            cause="a key that no rule matches is skipped",
            remedy="raise an error that names the key",
        )
    for name, new in changed.items():
        yield Finding(
            what=f"{direction} renamed an unknown key",
            keys=(name,),
            expected="an error, or the key handed on as it is",
            actual=new,
            cause="the rule matches part of a key, not the whole key",
            remedy="match whole keys, and raise for the rest",
        )


def hf_only(lab: Lab) -> Iterator[Finding]:
    """Files may hold the declared extras; `from_hf` accepts them and returns the same model."""
    if not lab.may.hf_only:
        raise NotApplicable("no file-only keys are declared")
    extras = _extras(lab)
    for key, leaf in extras.items():
        one = {**lab.export.leaves, key: leaf}
        try:
            back = lab.trace("from_hf", one)
        except AdapterRaised as error:
            yield Finding(
                what="from_hf refuses a key that published files hold",
                keys=(key,),
                expected=f"accepted and left out: {_reason(lab, key)}",
                actual=str(error),
                cause="only keys that have a rule are accepted",
                remedy="skip exactly the declared keys",
            )
            continue
        new = back.leaves.keys() - lab.imported.leaves.keys()
        if new:
            yield Finding(
                what="from_hf makes a native tensor from a key that means nothing to the model",
                keys=(key, *sorted(new)),
                expected=_reason(lab, key),
                actual=f"shape {leaf.shape} as {', '.join(sorted(new))}",
                cause="a rule matches more than it should",
                remedy="skip exactly the declared keys",
            )
        other = [k for k, sources in lab.imported.sources.items() if back.sources.get(k) != sources]
        if other:
            taken = [k for k in other if key in back.sources.get(k, ())]
            yield Finding(
                what="from_hf returns another model when a declared key is there",
                keys=(key, *other),
                expected=_reason(lab, key),
                actual=f"{other[0]} {'made from it' if taken else 'left out or made otherwise'}",
                cause="a rule matches more than it should",
                remedy="skip exactly the declared keys",
            )


def _extras(lab: Lab) -> dict[str, Leaf]:
    """For each declared pattern of file-only keys, keys that files may hold, with their leaves.

    Those of the list of files, else keys made like the written ones of a layer nearby.
    """
    listed, written = lab.listed, lab.export.leaves
    found: dict[str, Leaf] = {}
    for pattern in lab.may.hf_only:
        keys = [k for k in listed if _match(k, pattern) and k not in written]
        found |= {key: listed.get(key) or _PROBE for key in keys[:2]} or _made(written, pattern)
    # A copy has the dtype of what it copies, and the model may be wider than its files.
    wide = next((x.dtype for x in written.values() if is_floating(x.dtype)), "float32")
    return {
        key: Leaf(leaf.shape, wide) if is_floating(leaf.dtype) else leaf
        for key, leaf in found.items()
    }


def _made(written: Mapping[str, Leaf], pattern: str) -> dict[str, Leaf]:
    """A key of this pattern: a written one with the pattern's own parts, else one with zeros.

    `model.layers.3.*` and `model.layers.0.norm.weight` make `model.layers.3.norm.weight`.
    """
    parts = pattern.split(".")
    if parts[-1] == "*":
        head = parts[:-1]
        for key, leaf in written.items():
            whole = key.split(".")
            like = zip(head, whole[: len(head)], strict=False)
            if len(whole) > len(head) and all(
                a in ("*", b) or (a.isdigit() and b.isdigit()) for a, b in like
            ):
                made = [b if a == "*" else a for a, b in zip(head, whole, strict=False)]
                return {".".join([*made, *whole[len(head) :]]): leaf}
    return {pattern.replace("*", "0"): _PROBE}


def _match(key: str, pattern: str) -> bool:
    return matches(key, (pattern,)) is not None


def _reason(lab: Lab, key: str) -> str:
    return next((why for p, why in lab.may.hf_only.items() if _match(key, p)), "")


def also_reads(lab: Lab) -> Iterator[Finding]:
    """Declared older spellings give the same result as the canonical ones."""
    if not lab.may.also_reads:
        raise NotApplicable("no other spellings are declared")
    for old, new in lab.may.also_reads.items():
        for direction, leaves, known in (
            ("from_hf", lab.export.leaves, lab.imported),
            ("to_hf", lab.native, lab.export),
        ):
            keys = by_template(leaves).get(new, [])
            if not keys:
                continue
            names = {key: old.format(*numbers_of(key)) for key in keys}
            state = {names.get(k, k): leaf for k, leaf in leaves.items()}
            try:
                out = lab.trace(direction, state)  # type: ignore[arg-type]
                problem = _otherwise(known, out, {old: key for key, old in names.items()})
            except AdapterRaised as error:
                problem = str(error)
            if problem:
                yield Finding(
                    what=f"{direction} does not read a declared spelling",
                    keys=tuple(names.values()),
                    expected=f"the same as {template_of(new)}",
                    actual=problem,
                    cause="only one of the spellings has a rule",
                    remedy="accept both spellings, write one",
                )


def _otherwise(known: Trace, out: Trace, canonical: Mapping[str, str]) -> str:
    """How a conversion of other spellings differs from that of the canonical ones."""
    if out.leaves.keys() != known.leaves.keys():
        return f"{len(out.leaves)} keys instead of {len(known.leaves)}"
    for key, leaf in out.leaves.items():
        if leaf != known.leaves[key]:
            return f"{key} of shape {leaf.shape} and {leaf.dtype}"
        sources = {canonical.get(s, s) for s in out.sources[key]}
        if sources != known.sources[key]:
            return f"{key} made from {', '.join(sorted(sources)) or 'nothing'}"
    return ""
