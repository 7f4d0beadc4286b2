"""Where modules are, found without running any of their code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec

__all__ = ["find_module", "outermost_package"]


def find_module(name: str) -> ModuleSpec | None:
    """The spec of a module, or None when there is none. `importlib.util.find_spec` would import its packages."""
    result: ModuleSpec | None = None
    path: Sequence[str] | None = None
    for part in _prefixes(name):
        result = _ask_finders(part, path)
        if result is None:
            return None
        locations = result.submodule_search_locations
        if locations is None and part != name:
            return None
        if result.origin is None and locations is not None:
            # A namespace has no code to run; finders look for what is below it through `sys.modules`.
            import_module(part)
        path = None if locations is None else list(locations)
    return result


def outermost_package(name: str) -> str:
    """The outermost package with an `__init__.py` around a module, or the module itself when it stands in none.

    Everything outside it is a namespace that several dists may share.
    """
    for part in _prefixes(name):
        spec = find_module(part)
        if spec is not None and spec.origin is not None and spec.submodule_search_locations is not None:
            return part
    return name


def _prefixes(name: str) -> list[str]:
    """`a.b.c` -> `a`, `a.b`, `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _ask_finders(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        result = finder.find_spec(name, path)
        if result is not None:
            return result
    return None
