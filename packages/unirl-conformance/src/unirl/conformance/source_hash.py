"""Hashes of source files by their code: comments, docstrings and layout do not count."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping

__all__ = ["source_digest", "source_hash"]


def source_hash(files: Mapping[str, bytes]) -> str:
    """64 hex digits over named files, in whatever order they are given.

    files: name -> content. A file whose name ends in `.py` counts by its code alone, any other by its bytes.

    Raises SyntaxError for a `.py` that is not Python.
    """
    whole = hashlib.sha256()
    for name, content in sorted(files.items()):
        counted = _code(ast.parse(content, filename=name)).encode() if name.endswith(".py") else content
        whole.update(f"{name} {len(counted)}\n".encode())
        whole.update(counted)
    return whole.hexdigest()


def source_digest(source: str) -> str:
    """64 hex digits over the code of one Python source. Raises SyntaxError when it is not Python."""
    return hashlib.sha256(_code(ast.parse(source)).encode()).hexdigest()


def _code(value: object) -> str:
    """A syntax tree as text, without strings that are statements: docstrings, and the texts after fields.

    Empty fields are left out, as `ast.dump` does in some releases of Python and not in others.
    """
    if isinstance(value, ast.AST):
        fields = ((name, inner) for name, inner in ast.iter_fields(value) if inner is not None and inner != [])
        return f"{type(value).__name__}({', '.join(f'{name}={_code(inner)}' for name, inner in fields)})"
    if isinstance(value, list):
        items: list[object] = value  # pyright: ignore[reportUnknownVariableType]
        return f"[{', '.join(_code(item) for item in items if not _is_text(item))}]"
    return repr(value)


def _is_text(value: object) -> bool:
    return isinstance(value, ast.Expr) and isinstance(value.value, ast.Constant) and isinstance(value.value.value, str)
