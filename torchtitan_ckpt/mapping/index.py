"""Which entry of a table answers for a key: the lookup, and the proof that it is never two.

Keys are looked up by signature (digits removed), so the cost of a key does not grow with the table
and the order of the table never matters. Unknown keys become Problems that name the nearest
template; LoRA keys and quantization scales are recognised and refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtitan_ckpt.errors import MappingError, Problem, group_keys, list_keys
from torchtitan_ckpt.mapping.rule import SIDES, Entry, Rule, templates_of
from torchtitan_ckpt.mapping.template import Binding, Domains, Template, overlap, tokens

_LORA = ("lora_", "base_layer", "modules_to_save", "base_model", "adapter_", "dora_", "lokr_")
_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", "_scales", "_blocks", "_scale_inv")


@dataclass(frozen=True, slots=True)
class Match:
    """The entry that answers for a key: number of the entry, of its template, and the binding."""

    entry: int
    index: int
    binding: Binding


class Index:
    """All templates of one side of a table."""

    def __init__(self, entries: Sequence[Entry], side: int) -> None:
        self._side = side
        self._rows: dict[str, list[tuple[int, int, Template, Domains]]] = {}
        self._texts: list[str] = []
        for number, entry in enumerate(entries):
            for where, index, template in templates_of(entry):
                if where == side:
                    row = (number, index, template, entry.where)
                    self._rows.setdefault(template.signature, []).append(row)
                    self._texts.append(template.text)

    def match(self, key: str) -> Match | None:
        signature, numbers = tokens(key)
        for number, index, template, where in self._rows.get(signature, ()):
            binding = template.bind(numbers, where)
            if binding is not None:
                return Match(number, index, binding)
        return None

    def collisions(self, entries: Sequence[Entry]) -> list[Problem]:
        """Every pair of templates that could match one key, with such a key."""
        problems = []
        for rows in self._rows.values():
            for i, (number, _, template, where) in enumerate(rows):
                for other, _, second, domain in rows[i + 1 :]:
                    key = overlap(template, where, second, domain)
                    if key is not None:
                        problems.append(
                            Problem(
                                code="mapping.two-rules",
                                what=f"two entries match one {SIDES[self._side]} key",
                                where=key,
                                expected="one entry for every key, whatever their order",
                                actual=f"{_name(entries[number])}; {_name(entries[other])}",
                                fix="limit one of them with `where`, or remove it",
                            )
                        )
        return problems

    def nearest(self, key: str) -> str | None:
        """The template most like a key, for messages."""
        shown = "{}".join(tokens(_bare(key))[0].split("\0"))
        plain = {"{}".join(tokens(_bare(text))[0].split("\0")): text for text in self._texts}
        found = difflib.get_close_matches(shown, list(plain), n=1, cutoff=0.5)
        return plain[found[0]] if found else None

    def unknown(self, keys: Iterable[str]) -> list[Problem]:
        """Problems for keys that no entry answers for: LoRA, scales, and the others by group."""
        lora, scales, other = [], [], []
        for key in keys:
            if any(part.startswith(_LORA) for part in key.split(".")):
                lora.append(key)
            elif key.endswith(_SCALES):
                scales.append(key)
            else:
                other.append(key)
        side = SIDES[self._side]
        problems = []
        if lora:
            problems.append(
                Problem(
                    code="mapping.lora",
                    what=f"{len(lora)} LoRA/PEFT keys; adapters are not converted",
                    where=list_keys(lora),
                    expected=f"the {side} keys of a full model",
                    fix="merge the adapter into the weights first (PEFT: merge_and_unload())",
                )
            )
        if scales:
            problems.append(
                Problem(
                    code="mapping.quantized-key",
                    what=f"{len(scales)} keys of a quantized checkpoint; no entry takes scales",
                    where=list_keys(scales),
                    expected="dequantized weights",
                    cause="the checkpoint was read without dequantizing it",
                    fix="load it with initial_load_in_hf_quantized (dequantize=True)",
                )
            )
        return problems + self._unknown_groups(other)

    def _unknown_groups(self, keys: list[str]) -> list[Problem]:
        if not keys:
            return []
        groups = group_keys(keys)
        hints = []
        for text, _ in groups[:4]:
            near = self.nearest(text)
            hints.append(f"{text} -> {near}" if near else f"{text} -> nothing like it")
        return [
            Problem(
                code="mapping.unknown-keys",
                what=f"{len(keys)} {SIDES[self._side]} keys that no rule matches",
                where=list_keys(keys),
                actual="nearest: " + "; ".join(hints),
                cause="renamed, of another family or generation, or outside the configured layers",
                fix="add a rule, or declare the loss with NativeOnly/HfOnly and a reason",
            )
        ]


def _bare(text: str) -> str:
    """A template or group of keys with each `{...}` made a digit, so that it looks like a key."""
    out, depth = [], 0
    for char in text:
        if char == "{":
            depth += 1
            out.append("0")
        elif char == "}":
            depth -= 1
        elif not depth:
            out.append(char)
    return "".join(out)


def _name(entry: Entry) -> str:
    return str(entry) if isinstance(entry, Rule) else f"{type(entry).__name__}({entry.key})"


def raise_all(problems: Sequence[Problem]) -> None:
    """Raise one MappingError with every problem, if there is any."""
    if problems:
        raise MappingError(*problems)
