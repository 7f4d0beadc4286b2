"""Files of installed dists: those that shadow the shared namespaces, and those that another dist has overwritten or
deleted."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path
from typing import cast

from ..errors import PluginConflict
from ..names import canonical
from .hookspec import API_GROUP

__all__ = [
    "NAMESPACES",
    "check_namespaces",
    "damaged_dists",
    "damaged_files",
    "find_shadows",
    "shared_files",
]

NAMESPACES = (
    "unirl",
    "unirl.models",
    "unirl.engines",
    "unirl.backends",
    "unirl.algorithms",
    "unirl.rewards",
    "unirl.trackers",
    "unirl.launchers",
    "unirl.transports",
)
"""Namespace packages shared by many dists. A dist that ships an `__init__.py` for one hides the parts of all others."""


def find_shadows(path: Iterable[str]) -> Iterator[str]:
    """A sentence for each file on this module path that turns a shared namespace into an ordinary package or module."""
    seen: set[Path] = set()
    for entry in path:
        root = Path(entry or ".").resolve()
        if root in seen or not root.is_dir():
            continue
        seen.add(root)
        for namespace in NAMESPACES:
            place = root.joinpath(*namespace.split("."))
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if file.is_file():
                    owner = _owner_of(file, root)
                    yield (
                        f"{file} makes {namespace!r} a plain module, which hides every other dist that shares it. "
                        + (
                            f"It belongs to {owner.name} {owner.version}: {_way_out(owner)}"
                            if owner
                            else "No dist owns it: delete it."
                        )
                    )


def check_namespaces() -> None:
    """Raise PluginConflict when a shared namespace is an ordinary package or module: parts of other dists are hidden,
    or another project's files are in their place. Takes a file look-up for each folder and namespace."""
    unirl = sys.modules[NAMESPACES[0]]
    below = [name.partition(".")[2] for name in NAMESPACES[1:]]
    is_plain = getattr(unirl, "__file__", None) is not None or any(
        Path(folder, name, "__init__.py").is_file() or Path(folder, f"{name}.py").is_file()
        for folder in unirl.__path__
        for name in below
    )
    if is_plain and (sentences := list(find_shadows(sys.path))):
        raise PluginConflict(" ".join(sentences))


def damaged_dists() -> str:
    """Which dists of this project and of plugins have files that are not as their records say, and how to mend them;
    empty for none. The record of an editable dist has no sources."""
    damaged: dict[str, str] = {}
    for name, dist in sorted(_dists(), key=lambda one: one[0]):
        if not canonical(name).startswith("unirl-") and not dist.entry_points.select(group=API_GROUP):
            continue
        if bad := damaged_files(dist):
            more = f" and {len(bad) - 1} more" if bad[1:] else ""
            damaged[f"{name}=={dist.version}"] = f"{name} ({bad[0]}{more})"
    if not damaged:
        return ""
    return (
        f"Files are missing or are not those that were installed, by the records of {', '.join(damaged.values())}. "
        f"Reinstall: `{_reinstall(damaged)}`. If another dist has the same files, uninstall it first, or use a fresh "
        "environment."
    )


def damaged_files(dist: Distribution) -> list[str]:
    """Modules of a dist that are missing or not as its record says. The record of an editable dist has none."""
    return [path for path, item in _modules(dist).items() if not _is_as_recorded(item)]


def shared_files(dist: Distribution) -> dict[str, list[str]]:
    """Other installed dist and version -> its modules that this dist has as well: the later install overwrote them."""
    own = _modules(dist).keys()
    others = {f"{name}=={other.version}": other for name, other in _dists() if canonical(name) != canonical(dist.name)}
    return {name: shared for name, other in others.items() if (shared := sorted(own & _modules(other).keys()))}


def _dists() -> Iterator[tuple[str, Distribution]]:
    """The installed dists by name; of two copies on the path the first, and none without METADATA."""
    seen: set[str] = set()
    for dist in distributions():
        try:
            name = cast("str | None", dist.metadata["Name"])
        except (KeyError, TypeError, ValueError, OSError):
            continue
        if name and canonical(name) not in seen:
            seen.add(canonical(name))
            yield name, dist


def _modules(dist: Distribution) -> Mapping[str, PackagePath]:
    """Recorded files of a dist below its packages, by path: no scripts, no metadata, no bytecode."""
    files = {item.as_posix(): item for item in dist.files or ()}
    skipped = (".dist-info", "__pycache__", "..")
    return {path: item for path, item in files.items() if "/" in path and not any(word in path for word in skipped)}


def _is_as_recorded(item: PackagePath) -> bool:
    try:
        content = Path(str(item.locate())).read_bytes()
    except OSError:
        return False
    if item.hash is None:
        return True
    digest = hashlib.new(item.hash.mode, content).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=") == item.hash.value


def _reinstall(requirements: Iterable[str]) -> str:
    return f"pip install --force-reinstall --no-deps {' '.join(requirements)}"


def _way_out(owner: Distribution) -> str:
    """What to do about a dist that shadows a namespace, as the end of a sentence."""
    sharing = sorted(shared_files(owner))
    if not sharing:
        return f"uninstall it: `pip uninstall {owner.name}`."
    return (
        "use a fresh environment without it. Or uninstall it, and reinstall those that have the same files, which it "
        f"has overwritten or takes with it: `pip uninstall -y {owner.name} && {_reinstall(sharing)}`."
    )


def _owner_of(file: Path, root: Path) -> Distribution | None:
    """The installed dist that lists a file, or whose editable folder this is."""
    for dist in distributions():
        for item in dist.files or ():
            if item.name == file.name and Path(str(dist.locate_file(item))).resolve() == file:
                return dist
            # An editable install lists a .pth file that holds its source folder.
            if item.suffix == ".pth":
                pth = Path(str(dist.locate_file(item)))
                if pth.is_file() and str(root) in pth.read_text(encoding="utf-8", errors="replace").split("\n"):
                    return dist
    return None
