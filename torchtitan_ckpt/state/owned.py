"""The flat keys of optimizer state in a file, by what owns them: a parameter, or a label.

Parameter names hold dots, and so do keys of nested state: the longest name that is known owns a
key. What the names mean stands in `optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchtitan_ckpt.errors import Problem
from torchtitan_ckpt.state.slots import Fleet, Slot


class Owned:
    """The flat keys of a file, by the parameter (or label) that owns them."""

    def __init__(self, keys: Iterable[str], fleet: Fleet) -> None:
        names = {name for slot in fleet.slots for name in slot.names.all}
        labels = [owner for owner, _, _ in (*fleet.empty_groups(), *fleet.globals())]
        names.update(labels, map(first_of_class, labels))
        self._sections: dict[str, dict[str, dict[str, str]]] = {"state": {}, "param_groups": {}}
        for key in keys:
            section, _, rest = key.partition(".")
            owner = _longest_owner(rest, names)
            if owner is not None and section in self._sections:
                suffixes = self._sections[section].setdefault(owner, {})
                suffixes[rest[len(owner) + 1 :]] = key

    def keys(self, owner: str | None) -> Iterator[tuple[str, dict[str, str]]]:
        """`(section, {suffix: whole key})` of one owner."""
        for section, owners in self._sections.items():
            yield section, owners.get(owner or "", {})

    def state(self, owner: str | None) -> dict[str, str]:
        return self._sections["state"].get(owner or "", {})

    def group(self, owner: str | None) -> dict[str, str]:
        return self._sections["param_groups"].get(owner or "", {})

    def owner_of(self, slot: Slot, problems: list[Problem]) -> str | None:
        """The name under which the file has this parameter: its own, or an alias of the tie."""
        found = [n for n in slot.names.all if self.state(n) or self.group(n)]
        if len(found) > 1:
            problems.append(
                Problem(
                    code="optimizer.tie-differs",
                    what=f"one tied parameter, two optimizer states: {', '.join(found)}",
                    cause="the run that saved did not tie them",
                    fix="untie them in this model, or leave the optimizer out of the load",
                )
            )
        return found[0] if found else None

    def without_parameter(self, fleet: Fleet) -> Iterator[str]:
        """Owners among the labels that the file has, each once."""
        labels = [owner for owner, _, _ in (*fleet.empty_groups(), *fleet.globals())]
        found = dict.fromkeys(self.label_of(label) for label in labels)
        yield from (owner for owner in found if owner is not None)

    def label_of(self, label: str) -> str | None:
        """The label that the file has for `label`: the same, or that of the first of the class.

        The number of optimizers of a class changes with the pipeline degree.
        """
        for owner in (label, first_of_class(label)):
            if self.state(owner) or self.group(owner):
                return owner
        return None


def first_of_class(label: str) -> str:
    """`@empty.AdamW.3.1` as `@empty.AdamW.0.1`."""
    kind, name, _, *group = label.split(".")
    return ".".join([kind, name, "0", *group])


def _longest_owner(rest: str, names: set[str]) -> str | None:
    end = rest.rfind(".")
    while end > 0:
        if rest[:end] in names:
            return rest[:end]
        end = rest.rfind(".", 0, end)
    return None
