"""States that hold lists with one value for each group of an optimizer: taken apart and joined.

So a scheduler's state can be kept group by group, and groups divided otherwise when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan_ckpt.state.leaves import equal

_GROUP = "@group"  # marks one group's value out of such a list
# What torch's schedulers keep a value a group of.
_GROUPWISE = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums"}
)


class Differ(Exception):
    """What should be one state is several."""


def of_group(value: Any, index: int, groups: int) -> Any:
    """A state (or a part of it) as it concerns one of `groups` groups."""
    if type(value) is dict:
        return {
            key: {_GROUP: item[index]}
            if key in _GROUPWISE and type(item) is list and len(item) == groups
            else of_group(item, index, groups)
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(of_group(item, index, groups) for item in value)
    return value


def widths(state: Mapping[Any, Any]) -> set[int]:
    """How many groups a whole state is of, by each of its lists."""
    return {len(v) for k, v in state.items() if k in _GROUPWISE and type(v) is list}


def joined(views: Mapping[int, Any], live: Any) -> Any:
    """One state from those of groups, by index; a group without any keeps its `live` values.

    Raises `Differ` if they disagree about what is not a group's own.
    """
    first, *others = views.values()
    kind = type(first)
    _require(all(type(other) is kind for other in others))
    if kind is dict and first.keys() == {_GROUP}:
        _require(all(other.keys() == {_GROUP} for other in others))
        own = dict(enumerate(live)) if type(live) is list else {}
        values = own | {index: view[_GROUP] for index, view in views.items()}
        return [values[index] for index in sorted(values)]
    if kind is dict:
        _require(all(other.keys() == first.keys() for other in others))
        return {key: joined(_at(views, key), _own(live, key)) for key in first}
    if kind in (list, tuple):
        _require(all(len(other) == len(first) for other in others))
        return kind(joined(_at(views, i), _own(live, i)) for i in range(len(first)))
    _require(all(equal(first, other) for other in others))
    return first


def _at(views: Mapping[int, Any], key: Any) -> dict[int, Any]:
    return {index: view[key] for index, view in views.items()}


def _own(live: Any, key: Any) -> Any:
    try:
        return live[key]
    except (LookupError, TypeError):
        return None


def _require(agreed: bool) -> None:
    if not agreed:
        raise Differ
