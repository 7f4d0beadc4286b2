"""Files that an installed package provides for recipes: `${asset:NAME,PATH}`."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from ..errors import RecipeError
from ..names import did_you_mean
from ..plugins.entry_points import ASSETS_GROUP, Point, entry_points
from ..plugins.registry import install_hint

__all__ = ["asset", "by_name_only", "package_folder"]

_by_name: ContextVar[bool] = ContextVar("_by_name", default=False)


def asset(name: str, path: str = "") -> str:
    """Absolute path of a file or folder of an asset package. Nothing of the package is imported.

    name: of its entry point in the group `unirl.assets`, whose value is a package.  path: inside that package.
    Raises RecipeError when no installed package has that name, or when the package has no such file.
    """
    reference = f"${{asset:{name},{path}}}"
    if _by_name.get():
        return reference
    result = {point.name: point for point in entry_points(ASSETS_GROUP)}
    if name not in result:
        hint = did_you_mean(name, result) or f". {install_hint('asset', name)}".rstrip()
        raise RecipeError(f"{reference}: no installed package provides the asset {name!r}{hint}")
    folder = package_folder(result[name].value)
    if folder is None:
        raise RecipeError(f"{reference}: the package named by {_owner(result[name])} is missing; reinstall it.")
    file = folder / path
    if not file.exists():
        there = next(parent for parent in file.parents if parent.is_dir())
        where = there.relative_to(folder).as_posix() if there.is_relative_to(folder) else "."
        raise RecipeError(f"{reference}: {_owner(result[name])} has no {path!r}; {where} contains {_listing(there)}.")
    return str(file)


@contextmanager
def by_name_only() -> Generator[None]:
    """Within this context an asset resolves to its reference, not its local path, so hashes agree on all machines."""
    token = _by_name.set(True)
    try:
        yield
    finally:
        _by_name.reset(token)


def package_folder(package: str) -> Path | None:
    """Folder of an installed package; None when it is not installed.

    Neither the package nor its parents are imported, except where an editable install hides its folders. Namespace
    packages have several folders; the first that contains the rest of the name is taken.
    """
    top, *rest = package.split(".")
    spec = sys.modules[top].__spec__ if top in sys.modules else importlib.util.find_spec(top)
    if spec is None or spec.submodule_search_locations is None:
        return None
    # There is a location for each dist of the namespace: objects of Path would take most of the time.
    folders = ("/".join((location, *rest)) for location in spec.submodule_search_locations)
    result = next((Path(folder) for folder in folders if os.path.isdir(folder)), None)  # noqa: PTH112
    if result is None and rest:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            return None
        locations = list(spec.submodule_search_locations or ()) if spec else []
        result = Path(locations[0]) if locations else None
    return result


def _owner(point: Point) -> str:
    return f"{point.dist} {point.version}"


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(("_", ".")))
    return ", ".join(names) or "nothing"
