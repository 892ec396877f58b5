"""What a mapping table is made of: `Rule`, `NativeOnly`, `HfOnly` and `Tied`.

A rule relates one tensor on one side to one or many on the other, through ops written from native
to Hugging Face. Construction proves what can be proved of a rule alone: templates parse,
placeholders balance or are consumed by an op, the ops go one way and have inverses. What concerns
several rules is proved by `Mapping`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from torchtitan_ckpt.errors import MappingError, Problem
from torchtitan_ckpt.mapping.ops import Cast, Fuse, Op, Split, Stack, Unstack
from torchtitan_ckpt.mapping.template import Binding, Domain, Template, parse
from torchtitan_ckpt.mapping.view import Link, Shape, View

NATIVE, HF = 0, 1
SIDES = ("native", "hf")

# Casts that keep every value, NaN payloads aside.
_EXACT = {
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float64"),
    ("float16", "float64"),
    ("float32", "float64"),
    ("float8_e4m3fn", "bfloat16"),
    ("float8_e4m3fn", "float32"),
    ("float8_e5m2", "bfloat16"),
    ("float8_e5m2", "float32"),
    ("int32", "int64"),
    ("int8", "int32"),
    ("int8", "int64"),
    ("uint8", "int64"),
    ("bool", "uint8"),
}


def bad_rule(where: str, what: str, fix: str, expected: str = "", actual: str = "") -> MappingError:
    return MappingError(
        Problem(
            code="mapping.bad-rule",
            what=what,
            where=where,
            expected=expected,
            actual=actual,
            fix=fix,
        )
    )


@dataclass(frozen=True, slots=True, init=False)
class Rule:
    """`native` tensors become `hf` tensors through `ops`; the way back is derived.

    `where` limits placeholders to sets of numbers (layers of one kind, the experts). `shape` and
    `dtype` describe each Hugging Face tensor, for manifests; `pinned` says that an export dtype
    does not apply to it; `quant` names the family's layout for it in quantized checkpoints.
    """

    native: tuple[Template, ...]
    hf: tuple[Template, ...]
    ops: tuple[Op, ...]
    where: Mapping[str, Domain] = field(hash=False)
    shape: Shape | None
    dtype: str | None
    pinned: bool
    quant: str | None

    def __init__(
        self,
        native: str | Sequence[str],
        hf: str | Sequence[str],
        *ops: Op,
        where: Mapping[str, Domain] | None = None,
        shape: Shape | None = None,
        dtype: str | None = None,
        pinned: bool = False,
        quant: str | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "native", _templates(native))
        put(self, "hf", _templates(hf))
        put(self, "ops", tuple(ops))
        put(self, "where", dict(where or {}))
        put(self, "shape", shape)
        put(self, "dtype", dtype)
        put(self, "pinned", pinned)
        put(self, "quant", quant)
        _check(self)

    @property
    def sides(self) -> tuple[tuple[Template, ...], tuple[Template, ...]]:
        return self.native, self.hf

    @property
    def big(self) -> int:
        """The side that holds one tensor of which the other side's are parts."""
        return HF if any(op.joins > 0 for op in self.ops) else NATIVE

    @property
    def chain(self) -> tuple[Op, ...]:
        """The ops from the big tensor to the small ones."""
        if self.big == NATIVE:
            return self.ops
        return tuple(op.inverse for op in reversed(self.ops))

    @property
    def key_names(self) -> tuple[str, ...]:
        """Placeholders that only the small side has, in the order in which they are unstacked."""
        return tuple(op.name for op in self.chain if isinstance(op, Unstack))

    @property
    def casts(self) -> tuple[Cast, ...]:
        return tuple(op for op in self.ops if isinstance(op, Cast))

    @property
    def identity(self) -> bool:
        return not self.ops

    def __str__(self) -> str:
        left = " + ".join(template.text for template in self.native)
        right = " + ".join(template.text for template in self.hf)
        return f"{left} <-> {right}"

    def links(self, shape: Shape) -> tuple[Link, ...]:
        """How each small template's tensors lie in a big one of this shape, or ShapeError."""
        return _links(self.chain, shape)

    def big_shape(self, shapes: Sequence[Shape], counts: Mapping[str, int]) -> Shape:
        """The big tensor's shape from that of each small template. May raise ShapeError."""
        row = list(shapes)
        for op in reversed(self.chain):
            width = op.count if isinstance(op, Split) else 1
            row = [op.whole(row[i : i + width], dict(counts)) for i in range(0, len(row), width)]
        return row[0]


@lru_cache(maxsize=4096)
def _links(chain: tuple[Op, ...], shape: Shape) -> tuple[Link, ...]:
    views: tuple[View, ...] = (View.whole(shape),)
    for op in chain:
        views = tuple(part for view in views for part in op.split(view))
    return tuple(Link.of(view) for view in views)


def _templates(text: str | Sequence[str]) -> tuple[Template, ...]:
    return (parse(text),) if isinstance(text, str) else tuple(parse(one) for one in text)


def _check(rule: Rule) -> None:
    where = str(rule)
    for op in rule.ops:
        if not isinstance(op, Op):
            raise bad_rule(where, f"{op!r} is no op", "use the ops of torchtitan_ckpt.mapping")
        if op.inverse.inverse != op:
            raise bad_rule(where, f"{op!r} is not the inverse of its inverse", "correct the op")
        if isinstance(op, Cast) and not op.loss and (op.before, op.after) not in _EXACT:
            raise bad_rule(
                where,
                f"the cast from {op.before} to {op.after} loses values and does not say so",
                'declare it: Cast(before, after, loss="...")',
            )
    signs = {op.joins for op in rule.ops} - {0}
    if len(signs) > 1:
        raise bad_rule(
            where,
            "some ops make one tensor of many and others many of one",
            "split it into two rules, or write the ops from the one tensor to the many",
        )
    small, big = rule.sides[1 - rule.big], rule.sides[rule.big]
    parts = 1
    for op in rule.chain:
        parts *= op.count if isinstance(op, (Split, Fuse)) else 1
    if len(big) != 1 or len(small) != parts:
        raise bad_rule(
            where,
            "the ops and the number of templates do not agree",
            "give one template a part, or the Split or Fuse that is missing",
            expected=f"1 {SIDES[rule.big]} and {parts} {SIDES[1 - rule.big]}",
            actual=f"{len(big)} and {len(small)}",
        )
    _check_placeholders(rule, where, big[0], small)


def _check_placeholders(rule: Rule, where: str, big: Template, small: tuple[Template, ...]) -> None:
    consumed = rule.key_names
    doubled = sorted({name for name in consumed if consumed.count(name) > 1 or name in big.names})
    if doubled:
        raise bad_rule(
            where,
            f"placeholder {{{doubled[0]}}} is consumed by an op and still there",
            "Stack and Unstack consume a placeholder that only the many tensors have",
        )
    for name in consumed:
        domain = rule.where.get(name)
        if domain is not None and set(domain) != set(range(len(domain))):
            raise bad_rule(
                where,
                f"the numbers of the consumed placeholder {{{name}}} do not start at 0",
                "shift it in the template instead: {" + name + "+1}",
            )
    for template in small:
        missing = sorted((set(big.names) | set(consumed)) - set(template.names))
        extra = sorted(set(template.names) - set(big.names) - set(consumed))
        if missing or extra:
            name = (missing or extra)[0]
            raise bad_rule(
                where,
                f"placeholder {{{name}}} does not balance",
                f"name it on both sides, or consume it with Unstack({name!r})",
                expected="{" + "}, {".join([*big.names, *consumed]) + "}",
                actual=template.text,
            )
    unknown = sorted(set(rule.where) - set(big.names) - set(consumed))
    if unknown:
        raise bad_rule(
            where,
            f"`where` names {{{unknown[0]}}}, which no template of the rule has",
            "correct the name or remove the entry",
        )


def check_single(template: Template, where: Mapping[str, Domain], what: str) -> None:
    unknown = sorted(set(where) - set(template.names))
    if unknown:
        raise bad_rule(
            template.text,
            f"`where` of {what} names {{{unknown[0]}}}, which its key does not have",
            "correct the name or remove the entry",
        )


@dataclass(frozen=True, slots=True)
class NativeOnly:
    """A native key that Hugging Face has no place for; `why` is printed and counted.

    `default` fills it on import where `shape` is known; None leaves it to the model. `peer` names
    it across native generations, so that a migration keeps its value.
    """

    key: str
    default: float | None
    why: str
    where: Mapping[str, Domain] = field(default_factory=dict, hash=False)
    shape: Shape | None = None
    dtype: str = "float32"
    peer: str = ""

    def __post_init__(self) -> None:
        _needs_why(self.key, self.why, "NativeOnly")
        check_single(self.template, self.where, "NativeOnly")

    @property
    def template(self) -> Template:
        return parse(self.key)


@dataclass(frozen=True, slots=True)
class HfOnly:
    """A Hugging Face key without a native counterpart: accepted and left out, with its reason.

    `parts` are what stands in a file of this key when it is listed in a manifest.
    """

    key: str
    why: str
    where: Mapping[str, Domain] = field(default_factory=dict, hash=False)
    shape: Shape | None = None
    dtype: str | None = None
    quant: str | None = None

    def __post_init__(self) -> None:
        _needs_why(self.key, self.why, "HfOnly")
        check_single(self.template, self.where, "HfOnly")

    @property
    def template(self) -> Template:
        return parse(self.key)


@dataclass(frozen=True, slots=True)
class Tied:
    """`key` holds the values of `to`, on one side, when `when`.

    On the native side the key always exists: it is filled from `to` on import and must equal it on
    export. On the Hugging Face side it is written only when `emit` or when its `group` is switched
    on, and is compared with `to` where a file has both. `import_loss` declares that the two may
    differ in a file and that `to` wins.
    """

    key: str
    to: str
    when: bool = True
    side: str = "hf"
    why: str = "a copy of another tensor"
    group: str = "tied"
    emit: bool = False
    import_loss: str = ""
    where: Mapping[str, Domain] = field(default_factory=dict, hash=False)
    shape: Shape | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        _needs_why(self.key, self.why, "Tied")
        check_single(self.template, self.where, "Tied")
        if self.side not in SIDES:
            raise bad_rule(self.key, f"Tied has no side {self.side!r}", "use 'native' or 'hf'")
        extra = sorted(set(self.target.names) - set(self.template.names))
        if extra:
            raise bad_rule(
                self.key,
                f"`to` has the placeholder {{{extra[0]}}} that the key does not have",
                "a tied key must say which tensor it copies",
            )

    @property
    def template(self) -> Template:
        return parse(self.key)

    @property
    def target(self) -> Template:
        return parse(self.to)


Entry = Rule | NativeOnly | HfOnly | Tied


def _needs_why(key: str, why: str, what: str) -> None:
    if not why.strip():
        raise bad_rule(key, f"{what} without a reason", "write why; it is printed and counted")


def templates_of(entry: Entry) -> Iterator[tuple[int, int, Template]]:
    """Every (side, index, template) that an entry answers for."""
    if isinstance(entry, Rule):
        for side, row in enumerate(entry.sides):
            for index, template in enumerate(row):
                yield side, index, template
    elif isinstance(entry, Tied):
        yield SIDES.index(entry.side), 0, entry.template
    else:
        yield (NATIVE if isinstance(entry, NativeOnly) else HF), 0, entry.template


def describe(op: Op) -> str:
    """An op as a person reads it, for `map KEY` and messages."""
    if isinstance(op, (Stack, Unstack)):
        return f"{type(op).__name__.lower()} {{{op.name}}} on dim {op.dim}"
    if isinstance(op, (Split, Fuse)):
        sizes = "equal parts" if op.sizes is None else f"sizes {list(op.sizes)}"
        return f"{type(op).__name__.lower()} dim {op.dim} ({op.count} {sizes})"
    if isinstance(op, Cast):
        return f"cast {op.before} to {op.after}" + (f" ({op.loss})" if op.loss else "")
    return repr(op)


def binding_key(binding: Binding, names: Sequence[str]) -> tuple[int, ...]:
    return tuple(binding[name] for name in names)
