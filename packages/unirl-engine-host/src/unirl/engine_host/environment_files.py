"""Environment files used both by lookup and by installation."""

from __future__ import annotations

from pathlib import Path

__all__ = ["COMPLETE", "tree_files"]

COMPLETE = "unirl-environment.json"
"""File written last into a complete environment: what it was built from."""


def tree_files(tree: Path) -> list[Path]:
    """Files of a source tree in a fixed order, without Python's caches."""
    return sorted(path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
