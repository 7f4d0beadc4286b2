"""The source that a server needs of UniRL, which is not installed in the engine's environment."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from importlib.util import find_spec, resolve_name
from pathlib import Path

__all__ = ["source_files"]


def source_files(modules: Iterable[str]) -> dict[str, Path]:
    """Name -> file of these modules and of every UniRL module that they import, also within functions.

    Imports for type checkers alone are left out.
    """
    result: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in result:
            spec = find_spec(module)
            assert spec is not None and spec.origin is not None, f"no source of {module}"
            result[module] = Path(spec.origin)
            waiting += _imports(ast.parse(result[module].read_bytes()).body, package=module.rpartition(".")[0])
    return result


def _imports(nodes: Iterable[ast.AST], *, package: str) -> Iterator[str]:
    """Modules of UniRL that these statements import at run time."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("unirl."))
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            yield from _modules(base, [alias.name for alias in node.names]) if base.startswith("unirl.") else ()
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from _imports(node.orelse, package=package)
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _imports(ast.iter_child_nodes(node), package=package)


def _modules(base: str, names: list[str]) -> Iterator[str]:
    """The module that `from base import names` reads, or those where `base` is a package."""
    spec = find_spec(base)
    if spec is None or spec.submodule_search_locations is None:
        yield base
    else:
        yield from (f"{base}.{name}" for name in names)
