"""Docstrings after the fields of a class, read from its source: Python itself keeps none of them."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

__all__ = ["documented_fields", "undocumented_fields"]


def documented_fields(cls: type[Any]) -> dict[str, str]:
    """Name -> the text after each field of a class, and of each it inherits where that defines it, on one line."""
    result: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__ not in sys.stdlib_module_names:
            result |= _own(base)
    return result


def undocumented_fields(cls: type[Any], *, prefix: str = "") -> Iterator[str]:
    """Fields of a dataclass without a text, by dotted name; those of the dataclasses that it holds too."""
    texts = documented_fields(cls)
    hints = get_type_hints(cls)
    for item in fields(cls):
        if not texts.get(item.name):
            yield f"{prefix}{item.name}"
        for inner in (hints[item.name], *get_args(hints[item.name])):
            if isinstance(inner, type) and is_dataclass(inner):
                yield from undocumented_fields(inner, prefix=f"{prefix}{item.name}.")


@cache
def _own(cls: type[Any]) -> dict[str, str]:
    tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return {name: text for field, after in itertools.pairwise(node.body) for name, text in _pair(field, after)}
    return {}


def _pair(field: ast.stmt, after: ast.stmt) -> Iterator[tuple[str, str]]:
    match after:
        case ast.Expr(value=ast.Constant(value=str(text))):
            targets = [field.target] if isinstance(field, ast.AnnAssign) else []
            targets = field.targets if isinstance(field, ast.Assign) else targets
            yield from ((target.id, " ".join(text.split())) for target in targets if isinstance(target, ast.Name))
        case _:
            return
