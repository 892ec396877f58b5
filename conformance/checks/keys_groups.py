"""Chapter `keys`, third part: numbers, layers, and parts of a model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch

from conformance.checks._words import by_template, count
from conformance.fingerprint import torch_dtype
from conformance.lab import AdapterRaised, Lab, NotApplicable
from conformance.search import subsets
from conformance.subject import numbers_of, template_of
from conformance.template import Leaf
from conformance.verdict import Finding

# (number on the native side, number in the file, native key, file key)
Row = tuple[tuple[int, ...], tuple[int, ...], str, str]


def high_numbers(lab: Lab) -> Iterator[Finding]:
    """Layer and expert numbers keep their order: 10 comes after 9, not after 1."""
    layers = max((numbers_of(k)[0] for k in lab.native if numbers_of(k)), default=0)
    pairs: dict[tuple[str, str], list[tuple[tuple[int, ...], str, str]]] = {}
    for key, sources in lab.export.sources.items():
        for source in sources:
            if numbers_of(source) and numbers_of(key):
                pairs.setdefault((template_of(source), template_of(key)), []).append(
                    (numbers_of(source)[:1], source, key)
                )
    for rows in pairs.values():
        yield from _order(sorted((n, numbers_of(key)[:1], s, key) for n, s, key in rows), "layer")
    experts = 0
    try:
        for (_, rows_), stacked in _stacks(lab):
            experts = max(experts, stacked)
            yield from _order(rows_, "expert")
    except NotApplicable:
        lab.notes.append("expert order was not checked: the model is too large for values")
    high = _probe_layer(lab, layers)
    if high:
        yield from _beyond(lab, high)
    shallow = layers <= 9 and not high
    if shallow and experts <= 10:
        raise NotApplicable(
            f"the model has {layers + 1} layers and at most {experts} experts; "
            "more than 10 of either are needed to show numbers sorted as text"
        )
    if shallow or 0 < experts <= 10:
        few = count(layers + 1, "layer") if shallow else f"at most {count(experts, 'expert')}"
        lab.notes.append(f"{few}: their numbers sorted as text would not show")


def _order(rows: list[Row], noun: str) -> Iterator[Finding]:
    for (a, b, _, before), (c, d, source, key) in itertools.pairwise(rows):
        if c > a and d < b:
            text = sorted(str(row[0][0]) for row in rows) == [
                str(row[0][0]) for row in sorted(rows, key=lambda r: r[1])
            ]
            yield Finding(
                what=f"{noun} numbers change their order on export",
                keys=(before, key),
                expected=f"after the {noun} that {a[0]} becomes ({b[0]})",
                actual=f"{noun} {c[0]} of {source} becomes {d[0]}",
                cause="numbers are sorted as text (10 before 2)"
                if text
                else "numbers are sorted or counted in another way than by value",
                remedy="order by int(number)",
            )
            return


def _stacks(
    lab: Lab,
) -> Iterator[tuple[tuple[str, list[Row]], int]]:
    """For each stacked native tensor: (slice, file number) pairs, one per file tensor.

    Each slice holds its own number, expanded from one value, so that size costs nothing.
    """
    targets = {
        source: [t for t in names if len(numbers_of(t)) > len(numbers_of(source))]
        for source, names in lab.export.targets().items()
        if all(lab.export.sources[t] == {source} for t in names)
    }
    stacked = {s: names for s, names in targets.items() if len(names) > 1 and lab.native[s].shape}
    if not stacked:
        return
    _affordable(lab, {k: lab.native[k] for k in stacked})
    state = {k: _numbered(lab.native[k]) for k in stacked}
    try:
        out = lab.call("to_hf", dict(state))
    except AdapterRaised:
        if sum(leaf.numel for leaf in lab.native.values()) > lab.max_elements:
            raise NotApplicable("too large") from None
        rest = {k: _numbered(leaf) for k, leaf in lab.native.items() if k not in state}
        out = lab.call("to_hf", {**rest, **state})
    for source, names in stacked.items():
        by_kind: dict[str, list[Row]] = {}
        for name in names:
            value = out.get(name)
            if isinstance(value, torch.Tensor) and value.numel():
                first = int(value[(0,) * value.dim()])
                by_kind.setdefault(template_of(name), []).append(
                    ((first,), numbers_of(name)[-1:], source, name)
                )
        for kind, found in by_kind.items():
            yield (kind, sorted(found)), len(found)


def _affordable(lab: Lab, stacked: Mapping[str, Leaf]) -> None:
    """NotApplicable where the adapter copies what it takes apart and the copies are too large."""
    limit = lab.max_elements * 8
    if sum(leaf.numel for leaf in stacked.values()) <= limit:
        return
    key = min(stacked, key=lambda k: stacked[k].numel)
    if stacked[key].numel > limit:
        raise NotApplicable("too large")
    try:
        out = lab.call("to_hf", {key: _numbered(stacked[key])})
    except AdapterRaised:
        return
    made = sum(v.untyped_storage().nbytes() for v in out.values() if isinstance(v, torch.Tensor))
    if made >= stacked[key].numel:
        raise NotApplicable("too large")


def _numbered(leaf: Leaf) -> torch.Tensor:
    if not leaf.shape:
        return torch.zeros((), dtype=torch_dtype(leaf.dtype))
    line = torch.arange(leaf.shape[0]).to(torch_dtype(leaf.dtype))
    return line.view(-1, *[1] * (len(leaf.shape) - 1)).expand(leaf.shape)


def _probe_layer(lab: Lab, layers: int) -> str:
    """A key of a layer the adapter takes though the model lacks it, or an empty string."""
    key = next((k for k in lab.native if numbers_of(k) and lab.export.targets().get(k)), "")
    if not key:
        return ""
    high = _renumber(key, layers + 10)
    try:
        out = lab.trace("to_hf", {high: lab.native[key]}).leaves
        # A layer that is handed on under its own name is an unknown key to the adapter.
        return high if out and high not in out else ""
    except AdapterRaised:
        return ""


def _renumber(key: str, number: int) -> str:
    numbers = numbers_of(key)
    return template_of(key).format(number, *numbers[1:])


def _beyond(lab: Lab, high: str) -> Iterator[Finding]:
    """Adapters that do not know their layer count are asked about a two-digit layer."""
    key = next(k for k in lab.native if numbers_of(k) and lab.export.targets().get(k))
    wanted = {
        (template_of(t), numbers_of(t)[0] + numbers_of(high)[0] - numbers_of(key)[0])
        for t in lab.export.targets()[key]
        if numbers_of(t)
    }
    written = lab.trace("to_hf", {high: lab.native[key]}).leaves
    found = {(template_of(t), numbers_of(t)[0]) for t in written if numbers_of(t)}
    if wanted and found != wanted:
        yield Finding(
            what="a layer number of two digits is not carried over",
            keys=(high,),
            expected=", ".join(t.format(n, 0, 0) for t, n in sorted(wanted)),
            actual=", ".join(sorted(written)[:2]),
            cause="the number is cut out of the key by position",
            remedy="take the whole number",
        )


def layers(lab: Lab) -> Iterator[Finding]:
    """All tensors of one native layer go to one layer of the files, or to as many as each does."""
    found: dict[tuple[str, str], list[tuple[int, int, str, str]]] = {}
    for key, sources in lab.export.sources.items():
        for source in filter(numbers_of, sources if numbers_of(key) else ()):
            home = template_of(source).partition("{}")[0], template_of(key).partition("{}")[0]
            row = numbers_of(source)[0], numbers_of(key)[0], template_of(source), key
            found.setdefault(home, []).append(row)
    if not found:
        raise NotApplicable("no key carries a layer number on both sides")
    wrong: dict[str, tuple[str, int]] = {}
    for (name, prefix), rows in found.items():
        span, first = _span(rows), min(row[1] for row in rows)
        homes: dict[int, Counter[int]] = {}
        for number, target, *_ in rows:
            homes.setdefault(number, Counter())[(target - first) // span] += 1
        for number, target, _, key in rows:
            usual = homes[number].most_common(1)[0][0]
            if (target - first) // span != usual:
                shown = first + usual * span
                last = f" to {shown + span - 1}" if span > 1 else ""
                wrong[key] = (f"{prefix}{shown}{last} like the rest of {name}{number}", target)
    for keys in by_template(wrong).values():
        expected, target = wrong[keys[0]]
        yield Finding(
            what=f"{count(len(keys), 'tensor')} in another layer than the tensors beside",
            keys=tuple(keys),
            expected=expected,
            actual=f"layer {target}",
            cause="an index is off by one",
            remedy="use one layer number for all tensors of a layer",
        )


def _span(rows: Iterable[tuple[int, int, str, str]]) -> int:
    """How many layers of the files one native layer is: how far most go on from one to the next."""
    kinds: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for number, target, source, key in rows:
        kinds.setdefault((source, template_of(key)), set()).add((number, target))
    steps = Counter(
        (after - before) // (more - number)
        for kind in kinds.values()
        for (number, before), (more, after) in itertools.pairwise(sorted(kind))
        if more > number
    )
    return max(1, steps.most_common(1)[0][0]) if steps else 1


def partial(lab: Lab) -> Iterator[Finding]:
    """A part of the model in (a pipeline stage) gives that part out, the same as from the whole."""
    if not lab.may.partial:
        raise NotApplicable("the subject declares that partial dicts may be refused")
    parts = _stages(lab.native)
    if len(parts) < 2:
        raise NotApplicable("the model has no layers to divide into stages")
    seen: set[str] = set()
    small = len(lab.export.leaves) <= 5000
    together = components(lab)
    for name, keys in [*parts, *(subsets(together, lab.seed) if small else ())]:
        chosen = {k for c in together if keys & c for k in c}
        for finding in _part(lab, name, chosen):
            if finding.what not in seen:
                seen.add(finding.what)
                yield finding


def _stages(native: Mapping[str, Leaf]) -> list[tuple[str, set[str]]]:
    layered = {k: numbers_of(k)[0] for k in native if numbers_of(k)}
    if not layered:
        return []
    half = (max(layered.values()) + 1) // 2
    loose = [k for k in native if k not in layered]
    low = {k for k, n in layered.items() if n < half} | set(loose[: len(loose) // 2])
    return [("the first half of the layers", low), ("the second half", set(native) - low)]


def components(lab: Lab) -> list[frozenset[str]]:
    """Native keys that only convert together: parts of one file tensor, and tied names."""
    groups: dict[str, set[str]] = {key: {key} for key in lab.native}

    def join(keys: list[str]) -> None:
        merged = set().union(*(groups[k] for k in keys))
        for key in merged:
            groups[key] = merged

    for sources in lab.export.sources.values():
        join([s for s in sources if s in groups])
    for alias, source in lab.may.tied.items():
        if alias in groups and source in groups:
            join([alias, source])
    return list(dict.fromkeys(frozenset(group) for group in groups.values()))


def _part(lab: Lab, name: str, keys: set[str]) -> Iterator[Finding]:
    state = {k: leaf for k, leaf in lab.native.items() if k in keys}
    wanted = {k: s for k, s in lab.export.sources.items() if s and s <= keys}
    try:
        out = lab.trace("to_hf", state)
    except AdapterRaised as error:
        yield _refused("to_hf", name, state, error)
        return
    wrong = [k for k in wanted if out.sources.get(k) != wanted[k]]
    wrong += [k for k in out.leaves if k not in wanted]
    # A copy that means nothing to the trainer may wait for what it is a part of.
    wrong = [k for k in wrong if not lab.hf_only(k)]
    if wrong:
        yield Finding(
            what="to_hf converts a part of the model otherwise than the whole",
            keys=tuple(wrong),
            expected=f"what the whole model gives for {name} ({count(len(wanted), 'key')})",
            actual=f"{count(len(out.leaves), 'key')}, {len(wrong)} of them missing or new",
            cause="layers are counted, or a tensor outside the part is made up",
            remedy="convert each key by itself",
        )
        return
    back_wanted = {k for k, s in lab.imported.sources.items() if s and s <= wanted.keys()}
    try:
        back = lab.trace("from_hf", {k: lab.export.leaves[k] for k in wanted})
    except AdapterRaised as error:
        yield _refused("from_hf", name, dict.fromkeys(wanted), error)
        return
    # What is made from nothing (a default of a native-only tensor) belongs to no part.
    made = {k for k in back.leaves if back.sources[k] or k not in lab.imported.leaves}
    wrong = sorted(made ^ back_wanted)
    if wrong:
        new = len(made - back_wanted)
        yield Finding(
            what="from_hf converts a part of the files otherwise than the whole",
            keys=tuple(wrong),
            expected=f"what the whole gives for {name} ({count(len(back_wanted), 'key')})",
            actual=f"{count(len(made), 'key')}, {len(wrong) - new} missing, {new} new",
            cause="layers are counted, or a tensor outside the part is made up",
            remedy="convert each key by itself",
        )


def _refused(
    direction: str, name: str, state: Mapping[str, object], error: AdapterRaised
) -> Finding:
    return Finding(
        what=f"{direction} refuses a part of the model",
        keys=tuple(state)[:1],
        expected=f"{name} converted (a pipeline stage holds no more)",
        actual=str(error),
        cause="a tensor outside the stage is taken for granted",
        remedy="convert what is there, or declare partial=False with a reason",
    )
