"""The tests of a prompt, from the layouts in which code datasets publish them."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, cast

__all__ = ["read_tests"]

Test = dict[str, Any]
"""A program with `input` and `output`, a call with `arguments` and `results`, or a `program` of asserts."""


def read_tests(metadata: Mapping[str, Any]) -> list[Test]:
    """The tests of one prompt, in the order of its metadata `tests`.

    | `tests` | as in | one test is |
    | text, with `entry_point` if it defines `check(candidate)` | HumanEval | the whole text |
    | other text | | each top-level `assert`, with the statements before it that are none |
    | list of texts | MBPP | each text |
    | object: `inputs`, `outputs`, and `fn_name` for calls | APPS, TACO | each input |
    | list of objects: `input`, `output`, `testtype` (`stdin` or `functional`) | LiveCodeBench | each object |

    Text that is a JSON object or list counts as that.
    Raises ValueError, as the end of a sentence about `tests`.
    """
    tests: Any = metadata["tests"]
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from error
    if isinstance(tests, str):
        return _of_program(tests, has_entry=bool(metadata.get("entry_point")))
    if isinstance(tests, Mapping):
        return _of_columns(cast("Mapping[str, Any]", tests), metadata)
    if not isinstance(tests, list) or not tests:
        raise ValueError(
            "is empty" if tests == [] else f"is {type(tests).__name__}, expected text, a list or an object"
        )
    return [_of_item(item, metadata, number) for number, item in enumerate(cast("list[Any]", tests))]


def _of_program(text: str, *, has_entry: bool) -> list[Test]:
    body = _parsed(text).body
    if has_entry and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body):
        return [{"program": text, "has_check": True}]
    if not any(isinstance(node, ast.Assert) for node in body):
        # One test, whatever it does; `pass` alone would pass.
        if not any(isinstance(node, ast.Assert) for node in ast.walk(ast.Module(body, []))):
            raise ValueError("has no assert")
        return [{"program": text, "has_check": False}]
    tests: list[Test] = []
    before: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.Assert):
            program = "\n".join(map(ast.unparse, [*before, node]))
            tests.append({"program": program, "has_check": False})
        else:
            before.append(node)
    return tests


def _of_columns(tests: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[Test]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError("is an object, expected two lists of one length in it: `inputs` and `outputs`")
    is_call = bool(tests.get("fn_name") or metadata.get("entry_point"))
    return [
        _call(list(given), [output, *(output[:1] if isinstance(output, list) else [])])
        if is_call and isinstance(given, list)
        else _program(given, output)
        for given, output in zip(inputs, outputs, strict=True)
    ]


def _of_item(item: Any, metadata: Mapping[str, Any], number: int) -> Test:
    if isinstance(item, str):
        _parsed(item)
        return {"program": item, "has_check": False}
    if not isinstance(item, Mapping) or not {"input", "output"} <= item.keys():
        raise ValueError(
            f"has {item!r:.80} at place {number}, expected an assert or an object with `input` and `output`"
        )
    if item.get("testtype", "stdin") == "stdin":
        return _program(item["input"], item["output"])
    if not metadata.get("entry_point"):
        raise ValueError("has functional tests, which need metadata `entry_point`")
    try:
        arguments = [json.loads(line) for line in item["input"].splitlines() if line.strip()]
        return _call(arguments, [json.loads(item["output"])])
    except ValueError as error:
        raise ValueError(f"has a functional test at place {number} that is not JSON line by line: {error}") from error


def _program(given: Any, output: Any) -> Test:
    """APPS has some inputs and outputs as lists of lines."""
    texts = ["\n".join(map(str, value)) if isinstance(value, list) else value for value in (given, output)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"has input {given!r:.40} and output {output!r:.40}, expected text")
    return {"input": texts[0], "output": texts[1]}


def _call(arguments: list[Any], results: list[Any]) -> Test:
    return {"arguments": arguments, "results": results}


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"has a test that is not Python: {error}") from error
