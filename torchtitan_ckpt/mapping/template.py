"""Key templates: whole keys with named decimal placeholders, and whether two can match one key.

`layers.{layer}.moe.experts.{expert}.w1` matches whole keys only. A placeholder stands for one
decimal number without leading zeros, optionally shifted (`{mtp+61}`), and is bounded by characters
that are no digits; so every run of digits in a key is one token and overlap of two templates is
decided by unifying two token lists. No template is ever turned into a regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from torchtitan_ckpt.errors import MappingError, Problem

# The values that a placeholder may take; a name that is absent may be any natural number.
Domain = range | frozenset[int]
Domains = Mapping[str, Domain]
Binding = dict[str, int]

_DIGITS = re.compile("[0-9]+")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_INSIDE = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)(?:([+-])([0-9]+))?")


def tokens(key: str) -> tuple[str, list[str]]:
    """A key's signature (each run of digits replaced by NUL) and those runs."""
    return _DIGITS.sub("\0", key), _DIGITS.findall(key)


@dataclass(frozen=True, slots=True)
class Slot:
    """A run of digits in a template: a placeholder `name + shift`, or, without a name, `text`."""

    name: str
    shift: int
    text: str


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template. `names` are its placeholders in order of appearance, each once."""

    text: str
    signature: str
    slots: tuple[Slot, ...]
    names: tuple[str, ...]

    def bind(self, numbers: Iterable[str], domains: Domains) -> Binding | None:
        """Values of the placeholders for a key with this signature, or None without a match."""
        binding: Binding = {}
        for slot, text in zip(self.slots, numbers, strict=True):
            if not slot.name:
                if slot.text != text:
                    return None
                continue
            if text[0] == "0" and text != "0":
                return None
            value = int(text) - slot.shift
            domain = domains.get(slot.name)
            if value < 0 or (domain is not None and value not in domain):
                return None
            if binding.setdefault(slot.name, value) != value:
                return None
        return binding

    def render(self, binding: Mapping[str, int]) -> str:
        """The key for these values."""
        parts = self.signature.split("\0")
        out = [parts[0]]
        for slot, part in zip(self.slots, parts[1:], strict=True):
            out.append(str(binding[slot.name] + slot.shift) if slot.name else slot.text)
            out.append(part)
        return "".join(out)

    def partial(self, binding: Mapping[str, int]) -> str:
        """The template with the bound placeholders filled in, for messages."""
        parts = self.signature.split("\0")
        out = [parts[0]]
        for slot, part in zip(self.slots, parts[1:], strict=True):
            if not slot.name:
                out.append(slot.text)
            elif slot.name in binding:
                out.append(str(binding[slot.name] + slot.shift))
            else:
                out.append("{" + slot.name + "}")
            out.append(part)
        return "".join(out)


def _bad(text: str, why: str) -> MappingError:
    return MappingError(
        Problem(
            code="mapping.bad-template",
            what=f"not a key template: {why}",
            where=text,
            expected="a whole key with placeholders such as {layer} or {mtp+61}",
            fix="each placeholder must be a name, bounded by characters that are no digits",
        )
    )


@cache
def parse(text: str) -> Template:
    """Parse a template; raises MappingError when it is not one."""
    if not text or "\0" in text:
        raise _bad(text, "it is empty or contains NUL")
    slots: list[Slot] = []
    signature: list[str] = []
    names: dict[str, None] = {}
    position = 0
    for match in _PLACEHOLDER.finditer(text):
        inside = _INSIDE.fullmatch(match[1])
        if inside is None:
            raise _bad(text, f"{match[0]} is no placeholder")
        before, after = text[: match.start()], text[match.end() :]
        if before[-1:].isdigit() or after[:1].isdigit() or after[:1] == "{" or before[-1:] == "}":
            raise _bad(text, f"{match[0]} touches a digit or another placeholder")
        _literal(text[position : match.start()], signature, slots)
        shift = int(inside[3] or 0) * (-1 if inside[2] == "-" else 1)
        names[inside[1]] = None
        slots.append(Slot(inside[1], shift, ""))
        signature.append("\0")
        position = match.end()
    _literal(text[position:], signature, slots)
    joined = "".join(signature)
    if "{" in joined or "}" in joined:
        raise _bad(text, "unbalanced braces")
    return Template(text, joined, tuple(slots), tuple(names))


def _literal(text: str, signature: list[str], slots: list[Slot]) -> None:
    form, numbers = tokens(text)
    signature.append(form)
    slots.extend(Slot("", 0, number) for number in numbers)


def overlap(a: Template, in_a: Domains, b: Template, in_b: Domains) -> str | None:
    """A key that both templates match, or None when there is none. Exact, never a guess."""
    if a.signature != b.signature:
        return None
    links = _Links()
    for left, right in zip(a.slots, b.slots, strict=True):
        if not left.name and not right.name:
            if left.text != right.text:
                return None
            continue
        for slot in (left, right):
            if not slot.name and slot.text[0] == "0" and slot.text != "0":
                return None
        if not links.join(_node("a", left), _node("b", right)):
            return None
    domains: dict[tuple[str, str], Domain | None] = {}
    domains.update({("a", name): in_a.get(name) for name in a.names})
    domains.update({("b", name): in_b.get(name) for name in b.names})
    values = links.solve(domains)
    if values is None:
        return None
    return a.render({name: values[("a", name)] for name in a.names})


_Node = tuple[str, str]
_ZERO: _Node = ("", "")


def _node(side: str, slot: Slot) -> tuple[_Node, int]:
    """A slot's number as (variable, constant): number = value(variable) + constant."""
    return ((side, slot.name), slot.shift) if slot.name else (_ZERO, int(slot.text))


class _Links:
    """Equations `x + c = y + d` between variables, kept as a union-find with offsets."""

    def __init__(self) -> None:
        self._parent: dict[_Node, tuple[_Node, int]] = {}

    def _root(self, node: _Node) -> tuple[_Node, int]:
        offset = 0
        while node in self._parent:
            node, step = self._parent[node]
            offset += step
        return node, offset

    def join(self, left: tuple[_Node, int], right: tuple[_Node, int]) -> bool:
        (root_a, off_a), (root_b, off_b) = self._root(left[0]), self._root(right[0])
        # value(root_a) + off_a + left[1] = value(root_b) + off_b + right[1]
        delta = off_b + right[1] - off_a - left[1]
        if root_a == root_b:
            return delta == 0
        if root_a == _ZERO:
            root_a, root_b, delta = root_b, root_a, -delta
        self._parent[root_a] = (root_b, delta)
        return True

    def solve(self, domains: Mapping[_Node, Domain | None]) -> dict[_Node, int] | None:
        groups: dict[_Node, list[tuple[_Node, int]]] = {}
        for node in domains:
            root, offset = self._root(node)
            groups.setdefault(root, []).append((node, offset))
        values: dict[_Node, int] = {}
        for root, members in groups.items():
            base = self._base(root, members, domains)
            if base is None:
                return None
            values.update({node: base + offset for node, offset in members})
        return values

    @staticmethod
    def _base(
        root: _Node, members: list[tuple[_Node, int]], domains: Mapping[_Node, Domain | None]
    ) -> int | None:
        bounded = [
            (domain, offset) for node, offset in members if (domain := domains[node]) is not None
        ]
        candidates: Iterable[int]
        if root == _ZERO:
            candidates = [0]
        elif bounded:
            domain, offset = min(bounded, key=lambda item: len(item[0]))
            candidates = (value - offset for value in domain)
        else:
            candidates = [max(0, *(-offset for _, offset in members))]
        for base in candidates:
            if all(base + offset >= 0 for _, offset in members) and all(
                base + offset in domain for domain, offset in bounded
            ):
                return base
        return None
