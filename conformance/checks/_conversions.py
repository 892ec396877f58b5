"""Pictures of a conversion on the ranks of a split model, for checks about it; not a chapter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from conformance.adapted import Told
from conformance.checks._words import by_template
from conformance.lab import Lab
from conformance.shares import together
from conformance.spread import Picture, Row, Spread
from conformance.subject import template_of

_HEADS = ("as the model is split", "what to_hf gives", "what from_hf gives back")
_MOST = 3


def conversions(lab: Lab, named: Iterable[str]) -> tuple[Picture, ...]:
    """Of the native tensors behind the keys that findings name, one a template; else of one."""
    groups = by_template(own for key in named for own in _natives(lab, key))
    keys = [group[0] for group in groups.values()][:_MOST] or [_telling(lab)]
    return tuple(_picture(lab, key) for key in keys)


def _natives(lab: Lab, key: str) -> list[str]:
    """The native tensor of a finding's key, which may be a file's."""
    if key in lab.value_native:
        return [key]
    return [own for own in lab.value_native if own in lab.export.sources.get(key, ())][:1]


def _telling(lab: Lab) -> str:
    """A stack of experts if there is one, else a matrix of a layer: the most that is converted."""
    targets = lab.export.targets()

    def telling(key: str) -> tuple[bool, int, bool, int]:
        made, of_a_layer = len(targets.get(key, ())), template_of(key) != key
        return made > 0, len(lab.value_native[key].shape), of_a_layer, made

    return max(lab.value_native, key=telling)


def _picture(lab: Lab, key: str) -> Picture:
    made = lab.export.targets().get(key, [])
    rows = tuple(
        Row(
            split,
            (
                _unnamed(_held(ranks, "model", [key])),
                _held(ranks, "to_hf", made),
                _unnamed(_held(ranks, "from_hf", [key])),
            ),
        )
        for split, ranks in lab.ranks.results
    )
    return Picture(f"{key} · {lab.subject.name}", _HEADS, rows)


def _held(ranks: Sequence[Told], stage: str, keys: Sequence[str]) -> tuple[Spread, ...]:
    """What each rank tells that it has of some tensors after a stage."""
    if not all(stage in told.held for told in ranks):
        return (Spread((), (), words="not told: the adapter raised"),)
    if not keys:
        return (Spread((), (), words="no tensor that is known to come of it"),)
    return together({key: [told.held[stage].get(key) for told in ranks] for key in keys})


def _unnamed(held: Iterable[Spread]) -> tuple[Spread, ...]:
    """Without the one key that the picture's title has."""
    return tuple(replace(one, keys=()) for one in held)
