"""The value of an arithmetic expression, without running it as code: numbers, + - * / // % **, and parentheses."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from math import isfinite

__all__ = ["CannotCompute", "value_of"]

LENGTH = 1000
"""Most characters of an expression."""
BITS = 512
"""Most bits of an integer: 154 digits."""
WRITTEN = re.compile(r"[\d\seE.,+\-*/%^()]*", re.ASCII)
GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
"""Commas between groups of three digits."""

Number = int | float
BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY: Mapping[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class CannotCompute(ValueError):
    """Why an expression has no value."""


def value_of(text: str) -> str:
    """The value of an expression in decimal, fractions to 12 digits. `^` is a power, and commas may group digits.

    Raises CannotCompute for anything that is not arithmetic, and for numbers out of range.
    """
    if len(text) > LENGTH:
        raise CannotCompute(f"the expression has {len(text)} characters, at most {LENGTH} are allowed")
    if not WRITTEN.fullmatch(text):
        raise CannotCompute("not an arithmetic expression")
    try:
        tree = ast.parse(GROUPED.sub("", text.strip()).replace("^", "**"), mode="eval")
        value = _checked(_value(tree.body))
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise CannotCompute("not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise CannotCompute("division by zero") from error
    except OverflowError as error:
        raise CannotCompute("the number is too large") from error
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)  # pyright: ignore[reportArgumentType]
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _checked(_power(left, right))
        if type(node.op) in BINARY:
            return _checked(BINARY[type(node.op)](left, right))
    raise CannotCompute("not an arithmetic expression")


def _power(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and abs(left) > 1 and left.bit_length() * right > BITS:
        raise CannotCompute("the number is too large")
    result: object = left**right
    if isinstance(result, complex):
        raise CannotCompute("not a real number")
    assert isinstance(result, int | float)
    return result


def _checked(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > BITS:
        raise CannotCompute("the number is too large")
    if isinstance(value, float) and not isfinite(value):
        raise CannotCompute("the number is too large")
    return value
