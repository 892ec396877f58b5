"""Arithmetic over config fields, for the shapes and conditions in family tables.

`"num_attention_heads*head_dim"` or `"not tie_word_embeddings"`: integers, names, + - * // %, `and`,
`or`, `not`, comparisons. Parsed with `ast` and walked here; nothing is ever executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torchtitan_ckpt.errors import MappingError, Problem, nearest

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Config(Mapping[str, Any]):
    """Config fields with the family's defaults, which are expressions over other fields."""

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any], family: str = ""
    ) -> None:
        self._values = values
        self._defaults = defaults
        self._family = family

    def __getitem__(self, name: str) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if name in self._defaults:
            default = self._defaults[name]
            if not isinstance(default, str):
                return default
            try:
                return evaluate(default, self)
            except MappingError:
                raise self._missing(name) from None
        if name in self._values:
            return None
        raise self._missing(name)

    def __iter__(self) -> Any:
        return iter({**self._defaults, **self._values})

    def __len__(self) -> int:
        return len({**self._defaults, **self._values})

    def _missing(self, name: str) -> MappingError:
        near = nearest(name, self._values)
        return MappingError(
            Problem(
                code="mapping.config-field",
                what=f"the config has no field {name}",
                where=self._family,
                expected=f"{name}, as in the config.json of this family",
                actual=f"nearest field: {near}" if near else "",
                fix="add the field, or choose the family that the config belongs to",
            )
        )


@cache
def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def evaluate(text: str, config: Mapping[str, Any]) -> Any:
    """The value of an expression. Raises MappingError for a missing field."""
    return _walk(_parse(text.strip()), config)


def _walk(node: ast.expr, config: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return config[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_walk(left, config), _walk(right, config))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _BINARY:
            return _BINARY[type(op)](_walk(left, config), _walk(right, config))
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _walk(inner, config)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_walk(inner, config)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_walk(value, config) for value in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_walk(value, config) for value in values)
    raise MappingError(
        Problem(
            code="mapping.bad-expression",
            what=f"not an expression that tables may use: {ast.unparse(node)}",
            fix="use integers, config fields, + - * // %, comparisons, and, or, not",
        )
    )
