"""Chapter `keys`, second part: what must be refused, and what must be accepted besides."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from conformance.checks._words import by_template, count
from conformance.fingerprint import same_bits, torch_dtype
from conformance.lab import AdapterRaised, Direction, Lab, NotApplicable
from conformance.subject import matches, numbers_of, template_of
from conformance.template import Leaf
from conformance.trace import Trace
from conformance.verdict import Finding, Told
from torchtitan_ckpt.manifest import is_floating

_PROBE = Leaf((3, 5), "float32")


def unknown_refused(lab: Lab) -> Iterator[Finding | Told]:
    """An unknown key raises, or comes out unchanged under its own name; it never vanishes."""
    declared = (*lab.may.hf_only, *lab.may.native_only)
    for direction, leaves in _sides(lab):
        names = dict.fromkeys(_unknown(list(leaves)), _PROBE)
        relatives, beyond = (
            {k: v for k, v in found.items() if k not in leaves and not matches(k, declared)}
            for found in (_relatives(lab, direction, leaves), _next(leaves))
        )
        yield from _probe(lab, direction, names | relatives, translated=relatives)
        why = "the config has fewer of them: the rest is skipped, or lands on the name of another"
        for finding in _probe(lab, direction, beyond, translated=beyond, cause=why):
            # What waits for the rest of its stack, as half of one does.
            deep = all(len(numbers_of(key)) > 1 for key in finding.keys)
            yield Told(finding, by="keys.half-group") if deep else finding


def lora_refused(lab: Lab) -> Iterator[Finding]:
    """LoRA and PEFT keys raise; a checkpoint without them is not the one that was asked for."""
    asked = False
    for direction, leaves in _sides(lab):
        if not (stem := _linear(leaves)):
            continue
        asked = True
        peft = f"base_model.model.{stem}"
        names = {
            "to_hf": ("lora_A.weight", "lora_b.weight", "lora_magnitude_vector"),
            "from_hf": ("lora_B.default.weight", "lora_magnitude_vector.default.weight"),
        }[direction]
        probes = [f"{stem}.{name}" for name in names]
        if direction == "from_hf":
            probes += [f"{peft}.lora_A.weight", f"{peft}.modules_to_save.default.weight"]
        yield from _probe(lab, direction, dict.fromkeys(probes, _PROBE))
    if not asked:
        raise NotApplicable("no key ends in .weight and has two dimensions")


def _sides(lab: Lab) -> tuple[tuple[Direction, Mapping[str, Leaf]], ...]:
    return ("to_hf", lab.native), ("from_hf", lab.export.leaves)


def _linear(leaves: Mapping[str, Leaf]) -> str:
    """The name of a linear layer's module: inside the model's layers and without a bias, if any."""
    found = [
        key.removesuffix(".weight")
        for key, leaf in leaves.items()
        if key.endswith(".weight") and len(leaf.shape) == 2
    ]
    return max(
        found,
        key=lambda stem: (bool(numbers_of(stem)), f"{stem}.bias" not in leaves),
        default="",
    )


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


def _relatives(lab: Lab, direction: Direction, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """What a linear layer of another checkpoint has: a bias, and the scales of quantized weights.

    An adapter may know them although this model has none.
    """
    if not (stem := _linear(leaves)):
        return {}
    weight = leaves[f"{stem}.weight"]
    found = {f"{stem}.bias": Leaf(weight.shape[:1], "float32")}
    if direction == "from_hf" and not lab.quantized:
        found[f"{stem}.weight_scale_inv"] = _PROBE
    return found


def _next(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """For each thing that is counted, layers or a layer's experts, a key of one more of them.

    An adapter that does not know how many there are converts it.
    """
    last: dict[str, tuple[int, int, str]] = {}
    for key, leaf in leaves.items():
        parts = template_of(key).split("{}")
        for at, number in enumerate(numbers_of(key)):
            counted = "{}".join(parts[: at + 1])
            # The smallest tensor of the last.
            last[counted] = max(last.get(counted, (-1, 0, "")), (number, -leaf.numel, key))
    found = {}
    for counted, (number, _, key) in last.items():
        numbers = list(numbers_of(key))
        numbers[counted.count("{}")] = number + 1
        found[template_of(key).format(*numbers)] = leaves[key]
    return {key: leaf for key, leaf in found.items() if leaf.numel}


def _probe(
    lab: Lab,
    direction: Direction,
    probes: Mapping[str, Leaf],
    *,
    translated: Container[str] = (),
    cause: str = "a key that no rule matches is skipped",
) -> Iterator[Finding]:
    """Each key by itself beside the whole model; of those that may be `translated`, some elements
    come out somewhere."""
    dropped, changed = [], {}
    blank = lab.blank(direction)
    # In second place: who refuses it does so at once, and who goes by the first key sees the usual.
    first = dict(itertools.islice(blank.items(), 1))
    for name, leaf in probes.items():
        probe = torch.arange(3.0, leaf.numel + 3.0).to(torch_dtype(leaf.dtype)).reshape(leaf.shape)
        try:
            out = lab.convert(direction, {**first, name: probe, **blank})
        except AdapterRaised:
            continue
        holds = _some if name in translated else _all
        found = [k for k, v in out.items() if not v.is_meta and holds(v, probe)]
        if not found:
            dropped.append(name)
        elif name not in found and name not in translated:
            changed[name] = found[0]
    if dropped:
        yield Finding(
            what=f"{direction} dropped {len(dropped)} of {count(len(probes), 'unknown key')} "
            "without a word",
            keys=tuple(dropped),
            expected="an error, or the key handed on as it is",
            actual="neither",
            cause=cause,
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


def _all(value: Tensor, probe: Tensor) -> bool:
    return same_bits(value, probe)


def _some(value: Tensor, probe: Tensor) -> bool:
    """Whether a tensor holds an element of the probe, in whatever dtype."""
    found = value.flatten().double()
    return bool(torch.isin(found[found != 0], probe.double()).any())


def hf_only(lab: Lab) -> Iterator[Finding]:
    """Files may hold the declared extras; `from_hf` accepts them and returns the same model."""
    if not lab.may.hf_only:
        raise NotApplicable("no file-only keys are declared")
    for key, leaves in _extras(lab).items():
        try:
            leaf, back = _accepted(lab, key, leaves)
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


def _accepted(lab: Lab, key: str, leaves: Sequence[Leaf]) -> tuple[Leaf, Trace]:
    """The first of the leaves with which `from_hf` takes the key; AdapterRaised if with none."""
    for leaf in leaves[:-1]:
        with contextlib.suppress(AdapterRaised):
            return leaf, lab.trace("from_hf", {**lab.export.leaves, key: leaf})
    return leaves[-1], lab.trace("from_hf", {**lab.export.leaves, key: leaves[-1]})


def _extras(lab: Lab) -> dict[str, tuple[Leaf, ...]]:
    """For each declared pattern of file-only keys, keys that files may hold, with their leaves.

    Those of the list of files, else keys made like the written ones of a layer nearby. Where no
    shape is known, an adapter may want one that a written tensor has, as of a copy of it.
    """
    listed, written = lab.listed, lab.export.leaves
    found: dict[str, Leaf | None] = {}
    for pattern in lab.may.hf_only:
        keys = [k for k in listed if _match(k, pattern) and k not in written]
        found |= {key: listed.get(key) for key in keys[:2]} or _made(written, pattern)
    # A copy has the dtype of what it copies, and the model may be wider than its files.
    wide = next((x.dtype for x in written.values() if is_floating(x.dtype)), "float32")

    def likely(key: str, leaf: Leaf | None) -> tuple[Leaf, ...]:
        if leaf is not None:
            return (Leaf(leaf.shape, wide) if is_floating(leaf.dtype) else leaf,)
        end = key.rpartition(".")[2]
        alike = [x.shape for k, x in written.items() if k.rpartition(".")[2] == end]
        return tuple(Leaf(shape, wide) for shape in dict.fromkeys([*alike, _PROBE.shape]))

    return {key: likely(key, leaf) for key, leaf in found.items()}


def _made(written: Mapping[str, Leaf], pattern: str) -> dict[str, Leaf | None]:
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
    return {pattern.replace("*", "0"): None}


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
