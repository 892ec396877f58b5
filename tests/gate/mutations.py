"""Random edits of a right conversion: rename, swap, drop, permute, cast, round, off by one, ...

    python -m tests.gate.mutations [SEED [NUMBER]]

judges so many mutants, and says which checks caught how many. Exit code 1 when one lives.

A mutant applies one edit to what `to_hf` returns, or to what `from_hf` is given, or undoes in the
second what it does in the first, so that the round trip closes where it can. It is equivalent when
it changes nothing: both directions then give the right adapter's results, key for key and bit for
bit, on all-different values.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from conformance.contract import CONTRACT
from conformance.engine import Bench, one_thread
from conformance.fingerprint import noise, same_bits
from conformance.template import Leaf
from tests.specimens import right
from tests.specimens.edits import edited, via
from tests.specimens.right import Right, State

Change = Callable[[State], State]
SIDES = ("export", "import", "both")
# Cheapest first; the chapters that a mutant of keys or values can fail.
CHECKS = [c for c in CONTRACT if c.level <= 2 and c.chapter in ("keys", "shapes", "dtypes")] + [
    c for c in CONTRACT if c.chapter == "values"
]


@dataclass(frozen=True)
class Mutant:
    """One edit: what it is, where it is applied, and the adapter."""

    words: str
    side: str
    adapter: type


def _only(key: str, there: Any, again: Any) -> tuple[Change, Change]:
    def one(change: Any) -> Change:
        return lambda s: {k: change(v) if k == key else v for k, v in s.items()}

    return one(there), one(again)


def _rename(draw: random.Random, keys: list[str]) -> tuple[str, Change, Change]:
    key = draw.choice(keys)
    at = draw.randrange(len(key))
    new = key[:at] + draw.choice("abxyz") + key[at:]
    return (
        f"rename {key} to {new}",
        lambda s: {new if k == key else k: v for k, v in s.items()},
        lambda s: {key if k == new else k: v for k, v in s.items()},
    )


def _swap(draw: random.Random, keys: list[str]) -> tuple[str, Change, Change]:
    shapes = right.files()
    key = draw.choice(keys)
    twins = [k for k in keys if k != key and shapes[k] == shapes[key]] or [key]
    other = draw.choice(twins)

    def run(state: State) -> State:
        if key not in state or other not in state:
            return state
        return {**state, key: state[other], other: state[key]}

    return f"swap {key} and {other}", run, run


def _drop(draw: random.Random, keys: list[str]) -> tuple[str, Change, Change]:
    key = draw.choice(keys)
    gone: Change = lambda s: {k: v for k, v in s.items() if k != key}  # noqa: E731
    return f"drop {key}", gone, gone


def _permute(draw: random.Random, keys: list[str]) -> tuple[str, Change, Change]:
    key = draw.choice([k for k in keys if right.files()[k][0]])
    size = right.files()[key][0][0]
    order = list(range(size))
    draw.shuffle(order)
    back = [order.index(i) for i in range(size)]
    return f"rows of {key} as {order}", *_only(key, lambda v: v[order], lambda v: v[back])


def _transpose(draw: random.Random, keys: list[str]) -> tuple[str, Change, Change]:
    key = draw.choice([k for k in keys if len(right.files()[k][0]) == 2])
    turn = lambda v: v.transpose(0, 1)  # noqa: E731
    return f"transpose {key}", *_only(key, turn, turn)


def _flip(draw: random.Random, keys: list[str]) -> tuple[str, Change, Change]:
    key = draw.choice([k for k in keys if right.files()[k][0]])
    axis = draw.randrange(len(right.files()[key][0]))
    turn = lambda v: v.flip(axis)  # noqa: E731
    return f"flip axis {axis} of {key}", *_only(key, turn, turn)


def _cast(draw: random.Random, keys: list[str]) -> tuple[str, Change, Change]:
    key = draw.choice(keys)
    was = torch.int64 if "hash" in key else torch.bool if "mask" in key else torch.float32
    kind = draw.choice([torch.bfloat16, torch.float16, torch.float64, torch.int32])
    return f"cast {key} to {kind}", *_only(key, lambda v: v.to(kind), lambda v: v.to(was))


def _round(draw: random.Random, keys: list[str]) -> tuple[str, Change, Change]:
    key = draw.choice([k for k in keys if "hash" not in k and "mask" not in k])
    kind = draw.choice([torch.bfloat16, torch.float16])
    return f"round {key} to {kind}", *_only(key, via(kind), lambda v: v)


def _off_by_one(draw: random.Random, keys: list[str]) -> tuple[str, Change, Change]:
    from conformance.subject import numbers_of, template_of

    key = draw.choice([k for k in keys if numbers_of(k)])
    place = draw.randrange(len(numbers_of(key)))
    template, step = template_of(key), draw.choice((1, -1))

    def move(by: int) -> Change:
        def one(k: str) -> str:
            if template_of(k) != template:
                return k
            numbers = list(numbers_of(k))
            numbers[place] += by
            return template.format(*numbers) if numbers[place] >= 0 else k

        return lambda s: {one(k): v for k, v in s.items()}

    return f"number {place} of {template} {step:+d}", move(step), move(-step)


def _roll(draw: random.Random, keys: list[str]) -> tuple[str, Change, Change]:
    key = draw.choice([k for k in keys if right.files()[k][0]])
    axis = draw.randrange(len(right.files()[key][0]))
    return (
        f"roll axis {axis} of {key}",
        *_only(key, lambda v: v.roll(1, axis), lambda v: v.roll(-1, axis)),
    )


KINDS = (
    *(_rename, _swap, _drop, _permute, _transpose),
    *(_flip, _roll, _cast, _round, _off_by_one),
)


def mutants(seed: int, number: int) -> list[Mutant]:
    """`number` mutants; each kind and each side equally often."""
    draw = random.Random(seed)
    keys = list(right.files())
    found = []
    for index in range(number):
        kind = KINDS[index % len(KINDS)]
        side = SIDES[index // len(KINDS) % len(SIDES)]
        words, there, again = kind(draw, keys)
        adapter = edited(
            there if side != "import" else None,
            before_import={"export": None, "import": there, "both": again}[side],
        )
        found.append(Mutant(words, side, adapter))
    return found


def equivalent(mutant: Mutant) -> bool:
    """Whether a mutant does what the right adapter does, on values that are all different."""
    natives = noise({k: Leaf(*leaf) for k, leaf in right.native().items()}, 3)
    files = Right().to_hf(dict(natives))
    try:
        out, back = mutant.adapter().to_hf(dict(natives)), mutant.adapter().from_hf(dict(files))
    except Exception:
        return False
    return _same(out, files) and _same(back, Right().from_hf(dict(files)))


def _same(one: State, two: State) -> bool:
    return one.keys() == two.keys() and all(
        one[k].shape == two[k].shape and same_bits(one[k], two[k]) for k in one
    )


def caught_by(mutant: Mutant) -> str:
    """The first check that fails on a mutant, or an empty string."""
    bench = Bench(right.subject("mutant", mutant.adapter))
    with one_thread():
        return next((c.id for c in CHECKS if bench.run(c).verdict == "fail"), "")


def judged(seed: int, number: int) -> dict[str, list[str]]:
    """The words of mutants by what became of them: a check's id, `equivalent` or `alive`."""
    found: dict[str, list[str]] = {"alive": [], "equivalent": []}
    for mutant in mutants(seed, number):
        fate = "equivalent" if equivalent(mutant) else caught_by(mutant) or "alive"
        found.setdefault(fate, []).append(f"{mutant.side}: {mutant.words}")
    return found


def main(seed: str = "2", number: str = "600") -> int:
    found = judged(int(seed), int(number))
    alive, same = found.pop("alive"), found.pop("equivalent")
    caught = sum(map(len, found.values()))
    print(f"{number} mutants of seed {seed}: {len(same)} equivalent, {caught} of the other caught")
    for check, words in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(words):6} {check}")
    print("\n".join(f"alive: {words}" for words in alive) or "none lives")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
