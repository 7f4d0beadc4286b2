"""The dists of the workspace, and which files are part of the sources."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["Dist", "dotted", "is_data", "is_source", "read_dist"]

TRACE = re.compile(r"__pycache__|.*\.egg-info|\..*_cache")
"""What runs, tools and installations leave behind."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dist:
    """A dist of the workspace."""

    name: str
    folder: Path
    entry_points: tuple[str, ...]
    """Modules that the group `unirl.v1` names."""
    scripts: dict[str, str]
    """Command -> its module."""
    needs: tuple[str, ...]
    """Names of the dists that it depends on."""

    @property
    def source(self) -> Path:
        return self.folder / "src"

    @cached_property
    def data(self) -> tuple[Path, ...]:
        """Files that affect its behaviour besides its own modules: everything that is not Python, and the projects
        inside its package, which engines install."""
        inner = [path.parent for path in self.source.rglob("pyproject.toml")]
        shipped = (
            path
            for path in self.source.rglob("*")
            if path.is_file() and (is_data(path) or (is_source(path) and any(map(path.is_relative_to, inner))))
        )
        return (self.folder / "pyproject.toml", *sorted(shipped))


def read_dist(path: Path) -> Dist:
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return Dist(
        name=project["name"],
        folder=path.parent,
        entry_points=tuple(project.get("entry-points", {}).get("unirl.v1", {}).values()),
        scripts={name: target.partition(":")[0] for name, target in project.get("scripts", {}).items()},
        needs=tuple(re.split(r"[^\w-]", line)[0] for line in project.get("dependencies", ())),
    )


def dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_data(path: Path) -> bool:
    return path.suffix != ".py" and is_source(path)


def is_source(path: Path) -> bool:
    """Whether it is part of the sources, not left behind by a run, a tool or an installation."""
    return not any(TRACE.fullmatch(part) for part in path.parts)
