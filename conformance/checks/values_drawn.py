"""Chapter `values`, third part: what a search draws converts as the whole model does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from conformance.checks._words import count, differences
from conformance.checks.dtypes import bf16, deals, dealt
from conformance.checks.keys_groups import components
from conformance.fills import FILLS, HOLDS, filled
from conformance.fingerprint import State, blank
from conformance.lab import AdapterRaised, Lab, NotApplicable
from conformance.search import Case, cases, first, listed, smallest
from conformance.subject import numbers_of
from conformance.template import Leaf
from conformance.verdict import Finding
from torchtitan_ckpt.errors import ConfigError, Problem

# Drawn cases for a small model; a larger one gets fewer.
_CASES, _ELEMENTS = 64, 4_000_000
_ORACLE = "what the whole model gives: plain tensors of any values, in its own order"


def drawn(lab: Lab) -> Iterator[Finding]:
    """Parts, orders, dtypes, values and sizes not written down convert as the whole model does."""
    bench = Bench(lab)
    if lab.example:
        yield from bench.judge(Case.read(lab.example))
        return
    size = sum(leaf.numel for leaf in lab.value_native.values())
    number = max(4, min(_CASES, _ELEMENTS // max(1, size)))
    units = bench.units if bench.divisible else ()
    known = list(listed(units, lab.subject.sizes, deals(lab), number // 2))
    found = first(known, bench.judge) or smallest(
        cases(units, lab.subject.sizes, deals(lab)),
        bench.judge,
        seed=lab.seed,
        number=max(number // 2, number - len(known)),
    )
    if found:
        yield from found[1]


class Whole(NamedTuple):
    """A model converted whole: what went in, what came out, and what should have come out."""

    state: State
    written: State
    wanted: State


class Bench:
    """One subject's model, converted whole once for each kind of its tensors."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._others: dict[tuple[tuple[str, int], ...], Bench] = {}

    @functools.cached_property
    def units(self) -> list[str]:
        """Layers, as `layers.3`, and keys outside them, in the model's order."""
        return list(dict.fromkeys(map(_unit, self.lab.value_native)))

    @property
    def divisible(self) -> bool:
        """Whether parts convert, and it is known what each file key is made from."""
        sources = self.lab.export.sources
        return bool(self.lab.may.partial) and all(
            s or self.lab.hf_only(k) for k, s in sources.items()
        )

    def judge(self, case: Case) -> list[Finding]:
        """What is wrong with a case; nothing where the adapter does as it should."""
        bench = self._of(case.sizes)
        try:
            found = list(bench._wrong(case))
        except AdapterRaised as error:
            cause, remedy = _because(case)
            found = [
                Finding(
                    what=f"{error.direction} refuses a model that it should take",
                    keys=bench._blamed(case, error),
                    expected=_ORACLE,
                    actual=str(error),
                    cause=cause,
                    remedy=remedy,
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

    def _of(self, sizes: tuple[tuple[str, int], ...]) -> Bench:
        """The bench of the model of these sizes."""
        for name, _ in sizes:
            if name not in self.lab.subject.sizes:
                raise _unknown("size", name)
        if not sizes:
            return self
        if sizes not in self._others:
            self._others[sizes] = Bench(self.lab.resized(dict(sizes)))
        return self._others[sizes]

    def _wrong(self, case: Case) -> Iterator[Finding]:
        lab, whole, why = self.lab, self._whole(case.dtypes, case.values), _because(case)
        keys = self._keys(case.part) if case.part else whole.state.keys()
        state = {k: v for k, v in whole.state.items() if k in keys}
        wanted = whole.wanted
        if case.part:
            wanted = {t: wanted[t] for k in state for t in self._targets.get(k, ()) if t in wanted}
        as_it_is = not case.part and case.order == "own" and case.held == "plain"
        out = whole.written if as_it_is else self._export(case, state)
        if case.held == "shared":  # of a tied pair that is one tensor, one name is enough
            wanted = {k: v for k, v in wanted.items() if k in out or k not in lab.hf_tied}
        # A copy that means nothing to the trainer may wait for what it is a part of.
        wanted, made = (
            {k: v for k, v in side.items() if not lab.hf_only(k)} for side in (wanted, out)
        )
        wrong = list(_told("to_hf", wanted, made, _ORACLE, why))
        if case.sizes or case.dtypes != "own":
            wrong += self._against_reference(whole, why)
        yield from wrong
        if wrong:
            return
        back = self._import(case, out)
        returned = {
            k: v
            for k, v in state.items()
            if not (lab.native_only(k) or lab.lossy(k) or lab.alias(k)) and self._read(k, case)
        }
        mine = {k: v for k, v in back.items() if k in returned}
        # A declared policy of dtypes is the business of `dtypes.policy`.
        mine |= {k: returned[k] for k, v in mine.items() if v.dtype != returned[k].dtype}
        yield from _told("from_hf", returned, mine, "what to_hf was given", why)

    def _export(self, case: Case, state: State) -> State:
        return self.lab.convert("to_hf", case.ordered(state), held=HOLDS[case.held].make)

    def _import(self, case: Case, files: State) -> State:
        hold = HOLDS[case.held]
        given = {k: v.detach() for k, v in case.ordered(files).items()}
        return self.lab.convert("from_hf", given, held=hold.make if hold.files else dict)

    def _blamed(self, case: Case, error: AdapterRaised) -> tuple[str, ...]:
        """The first key that is refused by itself as well, else the first there is."""
        state = self._state(case.dtypes, case.values)
        for group in components(self.lab) if self.lab.may.partial else ():
            part, out = {k: v for k, v in state.items() if k in group}, {}
            try:
                out = self._export(case, part)
                self._import(case, out)
            except AdapterRaised as again:
                if type(again.error) is type(error.error):
                    return tuple(out or part)[:1]
        return tuple(state)[:1]

    def _against_reference(self, whole: Whole, why: Why) -> Iterator[Finding]:
        lab = self.lab
        try:
            theirs = lab.ask("to_hf", whole.state)
        except NotApplicable:
            return
        pairs = {
            k: v
            for k, v in theirs.items()
            if not lab.lossy(k)
            and not lab.hf_only(k)
            and k in whole.written
            # Where either has a policy of dtypes there is nothing to compare bit by bit.
            and v.dtype == whole.written[k].dtype
        }
        same = {k: whole.written[k] for k in pairs}
        yield from _told("to_hf", pairs, same, f"reference {lab.reference.name}", why)

    @functools.lru_cache(maxsize=4)  # noqa: B019 (a few models, and no longer than their check)
    def _whole(self, dtypes: str, values: str) -> Whole:
        state = self._state(dtypes, values)
        written = self.lab.convert("to_hf", state)
        if values == "noise":
            return Whole(state, written, written)
        # The keys and shapes are those of any other values.
        leaves = self.lab.value_hf
        right = {k: v for k, v in written.items() if k in leaves and v.shape == leaves[k].shape}
        lost = blank({k: leaf for k, leaf in leaves.items() if k not in right}, "cpu")
        return Whole(state, written, right | lost)

    def _state(self, dtypes: str, values: str) -> State:
        tied = self.lab.may.tied
        return filled(values, self._noise(dtypes), {*tied, *tied.values()})

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def _noise(self, dtypes: str) -> State:
        return self.lab.noise(self._leaves(dtypes))

    def _leaves(self, dtypes: str) -> dict[str, Leaf]:
        lab = self.lab
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

    @functools.cached_property
    def _targets(self) -> dict[str, list[str]]:
        return self.lab.export.targets()

    @functools.cached_property
    def _groups(self) -> dict[str, frozenset[str]]:
        """Key -> the keys that only convert together with it, and itself."""
        return {key: group for group in components(self.lab) for key in group}

    def _keys(self, part: tuple[str, ...]) -> set[str]:
        """The keys of a part, and those that only convert together with one of them."""
        for unit in part:
            if unit not in self.units:
                raise _unknown("part", unit)
        keys = (k for k in self.lab.value_native if _unit(k) in part)
        return {one for key in keys for one in self._groups[key]}

    def _read(self, key: str, case: Case) -> bool:
        """Whether an import returns a native key; of another size, all."""
        return bool(case.sizes) or key in self.lab.imported.leaves


def _unit(key: str) -> str:
    parts = key.split(".")
    for index, part in enumerate(parts):
        if numbers_of(key) and part.isdigit():
            return ".".join(parts[: index + 1])
    return key


Why = tuple[str, str]


def _because(case: Case) -> Why:
    """Cause and remedy: what is odd about this case, and so about the smallest that shows it."""
    if case.held != "plain":
        return HOLDS[case.held].cause, HOLDS[case.held].remedy
    if case.values != "noise":
        return (
            f"a tensor that is {FILLS[case.values].words} is left out, merged or replaced",
            "decide by names and by the config, and move whatever a tensor holds",
        )
    if case.sizes:
        return "a size of the model is known by heart", "take sizes from the config or the shapes"
    if case.part:
        return (
            "something counts, pairs or remembers what it is given",
            "convert each tensor by its own name and number",
        )
    if case.order != "own":
        return "the order of the dict is used", "find members by number, not by position"
    return "the conversion depends on the dtype", "move elements, whatever they are"


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
