"""What a checkout holds: dists, and the parts, commands and recipes in them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .dists import Dist, dotted, is_source, read_dist

__all__ = ["Tree"]


@dataclass
class Tree:
    """A checkout, as it is on disk now."""

    root: Path
    _dist_of: dict[Path, Dist | None] = field(default_factory=dict, repr=False)

    @cached_property
    def dists(self) -> tuple[Dist, ...]:
        files = [*self.root.glob("packages/*/pyproject.toml"), *self.root.glob("plugins/*/*/pyproject.toml")]
        return tuple(read_dist(path) for path in sorted(files))

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Of all dists: dotted name -> file; a package without `__init__.py` is not among them."""
        return {
            dotted(path.relative_to(dist.source)): path
            for dist in self.dists
            for path in dist.source.rglob("*.py")
            if is_source(path)
        }

    @cached_property
    def parts(self) -> dict[str, set[Dist]]:
        """Name of a part or of a recipe -> the dists that have one of this name. Parts are those of the
        registry, which a test compares with what is installed."""
        kinds = [kind for kind in self.registry if kind != "command"]
        result = self.registered(kinds)
        for path, name in self.recipes.items():
            dist = self.dist_of(path)
            assert dist is not None, f"{path} lies outside of all dists"
            result.setdefault(name, set()).add(dist)
        return result

    @cached_property
    def commands(self) -> dict[str, set[Dist]]:
        """Name of a command that a plugin adds -> its dist."""
        return self.registered(["command"])

    @cached_property
    def registry(self) -> dict[str, dict[str, dict[str, str]]]:
        return tomllib.loads((self.root / "registry" / "plugins.toml").read_text(encoding="utf-8"))

    def registered(self, kinds: Iterable[str]) -> dict[str, set[Dist]]:
        by_name, result = {dist.name: dist for dist in self.dists}, dict[str, set[Dist]]()
        for name, part in [pair for kind in kinds for pair in self.registry.get(kind, {}).items()]:
            if part["dist"] in by_name:
                result.setdefault(name, set()).add(by_name[part["dist"]])
        return result

    @cached_property
    def everyday(self) -> set[str]:
        """Names of parts that usually mean something else: all rewards, and models that are also packages in `uv.lock`. No
        default in `packages/` names such a part."""
        lock = tomllib.loads((self.root / "uv.lock").read_text(encoding="utf-8"))["package"]
        models = self.registry.get("model", {}).keys()
        return {*self.registry.get("reward", ()), *(models & {package["name"] for package in lock})}

    @cached_property
    def recipes(self) -> dict[Path, str]:
        """File of a recipe -> its name."""
        result: dict[Path, str] = {}
        for dist in self.dists:
            for path in dist.data:
                if path.suffix == ".yaml" and "recipes" in path.parts:
                    last = len(path.parts) - 1 - path.parts[::-1].index("recipes")
                    result[path] = "/".join(path.with_suffix("").parts[last + 1 :])
        return result

    def dist_of(self, path: Path) -> Dist | None:
        """The dist that a file describes or is shipped in."""

        def is_of(dist: Dist) -> bool:
            return path.is_relative_to(dist.source) or path == dist.folder / "pyproject.toml"

        if path not in self._dist_of:
            self._dist_of[path] = next(filter(is_of, self.dists), None)
        return self._dist_of[path]
