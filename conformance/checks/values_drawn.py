"""Chapter `values`, third part: what a search draws converts as the whole model does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from conformance.checks._words import count, differences
from conformance.checks.dtypes import bf16, deals, dealt
from conformance.checks.keys_groups import components
from conformance.fingerprint import State
from conformance.lab import AdapterRaised, Lab, NotApplicable
from conformance.search import Case, cases, smallest
from conformance.subject import numbers_of
from conformance.template import Leaf
from conformance.verdict import Finding
from torchtitan_ckpt.errors import ConfigError, Problem

# Drawn cases for a small model; a larger one gets fewer.
_CASES, _ELEMENTS = 64, 4_000_000


def drawn(lab: Lab) -> Iterator[Finding]:
    """Parts, orders, dtypes and sizes that nobody wrote down convert as the whole model does."""
    bench = Bench(lab)
    if lab.example:
        yield from bench.judge(Case.read(lab.example))
        return
    size = sum(leaf.numel for leaf in lab.value_native.values())
    found = smallest(
        cases(bench.units if lab.may.partial else (), lab.subject.sizes, deals(lab)),
        bench.judge,
        seed=lab.seed,
        number=max(4, min(_CASES, _ELEMENTS // max(1, size))),
    )
    if found:
        yield from found[1]


class Bench:
    """One subject's models by size, converted whole, each once."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    @functools.cached_property
    def units(self) -> list[str]:
        """Layers, as `layers.3`, and keys outside them, in the model's order."""
        return list(dict.fromkeys(map(_unit, self.lab.value_native)))

    def judge(self, case: Case) -> list[Finding]:
        """What is wrong with a case; nothing where the adapter does as it should."""
        try:
            found = list(self._wrong(case))
        except AdapterRaised as error:
            found = [
                Finding(
                    what=f"{error.direction} refuses a model that it should take",
                    keys=tuple(list(self.lab.value_native)[:1]),
                    expected="a conversion, as of the model in its own order",
                    actual=str(error),
                    cause="the number of layers, experts or heads, the order or the dtypes are "
                    "taken for granted",
                    remedy="take sizes from the config and members by number",
                )
            ]
        return [
            replace(
                one,
                coordinate=f"{one.coordinate} of {case}".removeprefix(" of "),
                example=str(case),
            )
            for one in found
        ]

    def _wrong(self, case: Case) -> Iterator[Finding]:
        for name, _ in case.sizes:
            if name not in self.lab.subject.sizes:
                raise _unknown("size", name)
        lab = self.lab.resized(dict(case.sizes))
        whole, written = self._whole(case.sizes, case.dtypes)
        keys = self._keys(case.part) if case.part else set(whole)
        state = case.ordered({k: v for k, v in whole.items() if k in keys})
        wanted = written
        if case.part:
            sources = lab.export.sources
            wanted = {k: v for k, v in written.items() if sources[k] and sources[k] <= keys}
        out = lab.convert("to_hf", state)
        # A copy that means nothing to the trainer may wait for what it is a part of.
        wanted, made = (
            {k: v for k, v in side.items() if not lab.hf_only(k)} for side in (wanted, out)
        )
        why = _because(case)
        wrong = list(_told("to_hf", wanted, made, "the whole model in its own order", why))
        if case.sizes or case.dtypes != "own":
            wrong += self._against_reference(lab, whole, written, why)
        yield from wrong
        if wrong:
            return
        back = lab.convert("from_hf", case.ordered(out))
        returned = {
            k: v
            for k, v in state.items()
            if not (lab.native_only(k) or lab.lossy(k) or lab.alias(k) or k not in self._read(lab))
        }
        mine = {k: v for k, v in back.items() if k in returned}
        # A declared policy of dtypes is the business of `dtypes.policy`.
        mine |= {k: returned[k] for k, v in mine.items() if v.dtype != returned[k].dtype}
        yield from _told("from_hf", returned, mine, "what to_hf was given", why)

    def _against_reference(
        self, lab: Lab, whole: State, written: State, why: Why
    ) -> Iterator[Finding]:
        try:
            theirs = lab.ask("to_hf", whole)
        except NotApplicable:
            return
        pairs = {
            k: v
            for k, v in theirs.items()
            if not lab.lossy(k)
            and not lab.hf_only(k)
            and k in written
            # Where either has a policy of dtypes there is nothing to compare bit by bit.
            and v.dtype == written[k].dtype
        }
        same = {k: written[k] for k in pairs}
        yield from _told("to_hf", pairs, same, f"reference {lab.reference.name}", why)

    @functools.cache  # noqa: B019 (a bench lives as long as its check)
    def _whole(self, sizes: tuple[tuple[str, int], ...], dtypes: str) -> tuple[State, State]:
        lab = self.lab.resized(dict(sizes))
        state = lab.noise(self._leaves(lab, dtypes))
        return state, lab.convert("to_hf", state)

    @staticmethod
    def _leaves(lab: Lab, dtypes: str) -> dict[str, Leaf]:
        if dtypes == "own":
            return lab.value_native
        number = dtypes.removeprefix("dealt-")
        if dtypes == "bfloat16":
            cast = bf16(lab)
        elif number.isdigit() and int(number) < deals(lab):
            cast = dealt(lab, int(number))
        else:
            raise _unknown("dtypes", dtypes)
        return {k: cast[k] for k in lab.value_native}

    def _keys(self, part: tuple[str, ...]) -> set[str]:
        """The keys of a part, and those that only convert together with one of them."""
        for unit in part:
            if unit not in self.units:
                raise _unknown("part", unit)
        keys = {k for k in self.lab.value_native if _unit(k) in part}
        return {k for c in components(self.lab) if c & keys for k in c}

    def _read(self, lab: Lab) -> set[str]:
        """Native keys that an import returns; of another size, all."""
        return set(lab.imported.leaves if lab is self.lab else lab.native)


def _unit(key: str) -> str:
    parts = key.split(".")
    for index, part in enumerate(parts):
        if numbers_of(key) and part.isdigit():
            return ".".join(parts[: index + 1])
    return key


Why = tuple[str, str]


def _because(case: Case) -> Why:
    """Cause and remedy: what is drawn about this case, and so about the smallest that shows it."""
    if case.sizes:
        return "a size of the model is known by heart", "take sizes from the config or the shapes"
    if case.part:
        return (
            "something counts, pairs or remembers what it is given",
            "convert each tensor by its own name and number",
        )
    if case.order != "own":
        return "the order of the dict is used", "find members by number, not by position"
    return (
        "the conversion depends on the dtype or on the values",
        "move elements, whatever they are",
    )


def _told(direction: str, wanted: State, have: State, oracle: str, why: Why) -> Iterator[Finding]:
    for one in differences(wanted, have):
        yield Finding(
            what=f"{direction} gives {len(one.keys)} of {count(len(wanted), 'tensor')} otherwise",
            keys=one.keys,
            coordinate=one.coordinate,
            expected=oracle,
            actual=one.actual,
            cause=why[0],
            remedy=why[1],
            oracle=oracle,
        )


def _unknown(word: str, value: str) -> ConfigError:
    return ConfigError(
        Problem(
            code="check.no-example",
            what=f"--example names a {word} that this subject does not have",
            actual=value,
            fix="copy it from the finding",
        )
    )
