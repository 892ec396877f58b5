"""Cases that nobody wrote down for a subject: parts, orders, dtypes, values, sizes, files.

First those that every run has (`listed`), then what Hypothesis draws, derandomised and without a
database: a run with the same seed draws the same cases. What is found is shrunk, and has a text
that repeats it by itself (`--example`). Nothing here judges.
"""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from string import ascii_lowercase, digits
from typing import TYPE_CHECKING, TypeVar

from conformance.fills import FILLS, HOLDS
from conformance.template import Leaf
from torchtitan_ckpt.errors import ConfigError, Problem

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")
F = TypeVar("F")
# How often a found case is tried to be made smaller.
_SHRINKS = 200


def smallest(
    cases: SearchStrategy[T], judge: Callable[[T], list[F]], *, seed: int, number: int
) -> tuple[T, list[F]] | None:
    """Of `number` drawn cases the smallest that `judge` has findings about, with them; or None."""
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from hypothesis import seed as seeded

    class Found(Exception):
        pass

    known: dict[str, list[F]] = {}
    last: list[tuple[T, list[F]]] = []

    @seeded(seed)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def run(case: T) -> None:
        name = repr(case)
        if name not in known:
            known[name] = judge(case) if not last or len(known) < number + _SHRINKS else []
        if known[name]:
            last[:] = [(case, known[name])]
            raise Found

    try:
        with _no_folder_left(), _no_constants_of_others():
            run()
    except Found:
        return last[0]
    return None


@contextmanager
def _no_folder_left() -> Iterator[None]:
    """Hypothesis keeps notes in `.hypothesis` of the working folder, which is somebody else's."""
    from hypothesis import configuration

    before = getattr(configuration, "__hypothesis_home_directory", None)
    with tempfile.TemporaryDirectory() as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(before)


@contextmanager
def _no_constants_of_others() -> Iterator[None]:
    """Hypothesis (from 6.131) also draws constants from the source of whatever modules the process
    has imported, so that a seed would not tell what is drawn."""
    from hypothesis.internal.conjecture import providers

    name = "_get_local_constants"
    before = getattr(providers, name, None)
    if before is None:
        yield
        return
    setattr(providers, name, vars(providers)["Constants"])
    providers.CONSTANTS_CACHE.cache.clear()
    try:
        yield
    finally:
        setattr(providers, name, before)
        providers.CONSTANTS_CACHE.cache.clear()


@dataclass(frozen=True, slots=True)
class Case:
    """One way to hand a model to an adapter.

    sizes   what another model is made with, or nothing: the subject's own
    part    the layers (`layers.3`) and single keys that are there, or nothing: all
    order   `own`, `reversed`, `by-name` or `shuffled-<n>`
    dtypes  `own`, `bfloat16`, or `dealt-<n>`: several in one model
    values  what is in the tensors, a kind of `FILLS`
    held    how the tensors are handed over, a kind of `HOLDS`; `as` in text
    """

    sizes: tuple[tuple[str, int], ...] = ()
    part: tuple[str, ...] = ()
    order: str = "own"
    dtypes: str = "own"
    values: str = "noise"
    held: str = "plain"

    def __str__(self) -> str:
        words = [f"{name}={size}" for name, size in self.sizes]
        if self.part:
            words.append(f"part={','.join(self.part)}")
        words += [f"order={self.order}", f"dtypes={self.dtypes}"]
        more = {"values": self.values, "as": self.held}
        return " ".join(
            words + [f"{k}={v}" for k, v in more.items() if v not in ("noise", "plain")]
        )

    @classmethod
    def read(cls, text: str) -> Case:
        """The case of a text. Raises ConfigError for a text that is none."""
        pairs = dict(word.partition("=")[::2] for word in text.split())
        order, dtypes = pairs.pop("order", "own"), pairs.pop("dtypes", "own")
        values, held = pairs.pop("values", "noise"), pairs.pop("as", "plain")
        part = tuple(filter(None, pairs.pop("part", "").split(",")))
        known = re.fullmatch(r"own|reversed|by-name|shuffled-\d+", order)
        known_kinds = values in FILLS and held in HOLDS
        if not (known and known_kinds and all(size.isdigit() for size in pairs.values())):
            raise _no_example(text, "layers=3 part=layers.1,norm.weight order=reversed dtypes=own")
        return cls(tuple((k, int(v)) for k, v in pairs.items()), part, order, dtypes, values, held)

    def simpler(self) -> Iterator[Case]:
        """The cases that have one thing less."""
        plain = Case()
        for one in fields(self):
            if getattr(self, one.name) != (usual := getattr(plain, one.name)):
                yield replace(self, **{one.name: usual})
        if len(self.part) > 1:
            for unit in self.part:
                yield replace(self, part=tuple(u for u in self.part if u != unit))

    def ordered(self, state: Mapping[str, T]) -> dict[str, T]:
        """The same entries in this order."""
        keys = sorted(state) if self.order == "by-name" else list(state)
        if self.order == "reversed":
            keys.reverse()
        if self.order.startswith("shuffled-"):
            random.Random(int(self.order.removeprefix("shuffled-"))).shuffle(keys)
        return {key: state[key] for key in keys}


def first(known: Iterable[Case], judge: Callable[[Case], list[F]]) -> tuple[Case, list[F]] | None:
    """The first case that `judge` has findings about, less whatever they do without; or None."""
    for case in known:
        if found := judge(case):
            return first(case.simpler(), judge) or (case, found)
    return None


def listed(
    units: Sequence[str], sizes: Mapping[str, Sequence[int]], deals: int, number: int
) -> Iterator[Case]:
    """The cases that a run has whatever its seed: kinds, layers, and `number` orders and sizes."""
    # Two kinds at a time, where neither hides what the other shows.
    yield Case(values="equal", held="shared")
    yield Case(values="equal-slices", held="offset")
    yield Case(values="zero-tail", held="transposed")
    yield Case(values="zeros", held="ordered")
    yield Case(values="ones")
    yield Case(values="nan")
    yield Case(held="parameters")
    yield Case(held="frozen")
    layers = _layers(units)
    for layer in layers:
        yield Case(part=(layer,))
    if layers and len(layers) < len(units):
        yield Case(part=tuple(unit for unit in units if unit not in layers))
    for some in (2, 3, 4):
        if some <= len(layers):
            yield Case(part=tuple(layers[-some:]), order="reversed")
    orders = (
        Case(order=order, dtypes=f"dealt-{n}")
        for n in range(deals)
        for order in ("by-name", "reversed")
    )
    others = (Case(sizes=((name, size),)) for name in sizes for size in sizes[name])
    yield from itertools.islice(itertools.chain(orders, others), number)


def _layers(units: Sequence[str]) -> list[str]:
    return [unit for unit in units if unit.rpartition(".")[2].isdigit()]


def cases(
    units: Sequence[str], sizes: Mapping[str, Sequence[int]], deals: int
) -> SearchStrategy[Case]:
    """Cases of a model of these units (layers and single keys); a simple one is a small one."""
    from hypothesis import strategies as st

    orders = st.sampled_from(("own", "reversed", "by-name")) | st.integers(0, 9).map(
        "shuffled-{}".format
    )
    dealt = ["own", "bfloat16", *(f"dealt-{n}" for n in range(deals))]
    parts: SearchStrategy[tuple[str, ...]] = st.just(())
    for some in filter(None, (_layers(units), list(units))):
        parts |= st.lists(st.sampled_from(some), min_size=1, max_size=4, unique=True).map(tuple)
    found = st.builds(
        Case, st.just(()), parts if units else st.just(()), orders, st.sampled_from(dealt)
    )
    if not sizes:
        return _handed(found)
    others = {name: st.sampled_from(list(values)) for name, values in sizes.items()}
    drawn = st.fixed_dictionaries({}, optional=others).map(lambda one: tuple(one.items()))
    resized = st.builds(Case, drawn, st.just(()), orders, st.sampled_from(("own", "bfloat16")))
    return _handed(found | resized)


def _handed(found: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """Half of the cases with other values, or held otherwise: equal values hide what is moved."""
    from hypothesis import strategies as st

    kinds = [(values, held) for values in FILLS for held in HOLDS]
    ways = st.sampled_from([*kinds[:1] * len(kinds), *kinds])
    return st.builds(lambda case, way: replace(case, values=way[0], held=way[1]), found, ways)


def subsets(
    components: Sequence[frozenset[str]], seed: int, number: int = 8
) -> Iterator[tuple[str, set[str]]]:
    """Parts of a model that convert by themselves: `number` draws, small ones first."""
    if len(components) < 3:
        return
    draw = random.Random(seed)
    for index in range(number):
        size = 1 if index == 0 else draw.randint(1, len(components) - 1)
        keys = set().union(*draw.sample(list(components), size))
        yield f"a drawn part of {len(keys)} keys (seed {seed}, draw {index})", keys


_DTYPES = ("float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool", "float64")


def states() -> SearchStrategy[dict[str, Leaf]]:
    """State dicts to be written to files: shapes, dtypes, keys, orders."""
    from hypothesis import strategies as st

    leaf = st.builds(
        Leaf,
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
        st.sampled_from(_DTYPES),
    )
    # Without an alphabet a table of all characters is made first, which takes a second.
    key = st.from_regex(
        r"[a-z]{1,3}(\.[0-9]{1,2}){0,2}\.[a-z_]{1,8}",
        fullmatch=True,
        alphabet=ascii_lowercase + digits + "._",
    )
    return st.dictionaries(key, leaf, min_size=1, max_size=6)


def text_of_state(leaves: Mapping[str, Leaf]) -> str:
    """`a.w=float32[2,3] a.b=int8[]`."""
    shapes = {key: ",".join(map(str, leaf.shape)) for key, leaf in leaves.items()}
    return " ".join(f"{key}={leaf.dtype}[{shapes[key]}]" for key, leaf in leaves.items())


def state_of_text(text: str) -> dict[str, Leaf]:
    """The state of a text. Raises ConfigError for a text that is none."""
    out = {}
    for word in text.split():
        found = re.fullmatch(r"([\w.]+)=(\w+)\[([\d,]*)\]", word)
        if found is None or found[2] not in _DTYPES:
            raise _no_example(text, "a.w=float32[2,3] a.b=int8[]")
        out[found[1]] = Leaf(tuple(int(n) for n in found[3].split(",") if n), found[2])
    return out


def _no_example(text: str, like: str) -> ConfigError:
    return ConfigError(
        Problem(
            code="check.no-example",
            what="--example is not a case of this check's search",
            expected=f"as in `{like}`",
            actual=repr(text),
            fix="copy it from the finding",
        )
    )
