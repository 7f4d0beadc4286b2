"""Imports of Python files, read from their source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["imports", "module_name", "named_modules"]


def module_name(path: Path) -> str:
    """Module name of a file below a folder `src`."""
    parts = path.relative_to(next(parent for parent in path.parents if parent.name == "src")).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, top_level_only: bool = False, for_types: bool = False) -> Iterator[str]:
    """Modules that a file imports when it runs; with `for_types`, those under TYPE_CHECKING as well."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if for_types:
        tree = _Unguarded().visit(tree)
    yield from _imports(tree.body, path, top_level_only=top_level_only)


def named_modules(path: Path) -> Iterator[str]:
    """Modules of this project that a file names in string constants, as `package.module` or `package.module:attribute`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and re.fullmatch(r"unirl(\.\w+)+(:[\w.]+)?", value):
            yield value.partition(":")[0]


class _Unguarded(ast.NodeTransformer):
    """Imports under TYPE_CHECKING as if they ran."""

    def visit_If(self, node: ast.If) -> ast.If:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            node.test = ast.Constant(True)
        return node


def _imports(body: list[ast.stmt], path: Path, *, top_level_only: bool) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_name(path).split(".")
                keep = len(package) - node.level + (path.name == "__init__.py")
                base = ".".join([*package[:keep], *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse, path, top_level_only=top_level_only)
        elif not (top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for name in ("body", "orelse", "finalbody", "handlers"):
                inner = getattr(node, name, [])
                for child in inner:
                    yield from _imports(
                        child.body if isinstance(child, ast.ExceptHandler) else [child],
                        path,
                        top_level_only=top_level_only,
                    )
