"""What an engine says of the program that it runs as, and where that program's environment lies on this machine.

Light: commands that list engines import this.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

from unirl.core.errors import RecipeError, RunFailed

__all__ = ["COMPLETE", "FOLDER_VARIABLE", "EngineEnvironment", "cache_folder", "tree_files"]

FOLDER_VARIABLE = "UNIRL_ENVS"
"""Environment variable that moves the folder of all environments."""
COMPLETE = "unirl-environment.json"
"""File that an environment has once everything is in it: what it was made from."""


def cache_folder() -> Path:
    """Where environments lie: what `UNIRL_ENVS` names, else `~/.cache/unirl/envs`."""
    moved = os.environ.get(FOLDER_VARIABLE)
    return Path(moved).expanduser() if moved else Path.home() / ".cache" / "unirl" / "envs"


def tree_files(tree: Path) -> list[Path]:
    """Files of a source tree in an order of their own, without what Python leaves beside them."""
    return sorted(path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


@dataclass(frozen=True, kw_only=True)
class EngineEnvironment:
    """A Python environment that UniRL is not in, and the server that runs there.

    `unirl.core.spec.EngineSpec.environment` names one as `"module:attribute"`.
    """

    name: str
    """What `unirl engine-env` takes: the engine's short name."""
    package: str
    """Package that the lock files are in."""
    locks: Mapping[str, str]
    """Accelerator, `cpu` or `cuda`, -> file of the package with every requirement pinned and hashed: of the newest
    release that the engine was tried with, or of the one that `release` names."""
    python: str
    """Version of Python that the locks are for, such as `3.11`."""
    serve: str
    """`"module:function"` that the server runs: it takes nothing, and returns the calls that it answers, by name."""
    modules: tuple[str, ...] = ()
    """Modules of installed UniRL dists that the server imports, of the standard library, torch and the engine's own
    packages alone: their source goes along."""
    additions: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict[str, tuple[str, ...]]())
    """Accelerator -> packages of our own that are installed on top of its lock: source trees, each a folder with a
    pyproject.toml in an installed package, as `"package:folder"`. They bring no dependencies."""
    notes: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Accelerator -> a sentence on what its lock holds, where a user should know."""
    earlier: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: dict[str, Mapping[str, str]]())
    """Other releases -> as `locks`; what `unirl.core.spec.EngineSpec.releases` names."""
    release: str = ""
    """Empty is the newest."""

    def of(self, release: str) -> EngineEnvironment:
        """That of another release; empty is the newest. Raises RecipeError for one that there is no lock for."""
        if not release:
            return self
        if release not in self.earlier:
            others = f", or for {', '.join(sorted(self.earlier))}" if self.earlier else ""
            raise RecipeError(
                f"engine {self.name!r}: release {release!r} was asked for; there are locks for the newest, without a "
                f"name{others}."
            )
        return replace(self, locks=self.earlier[release], release=release)

    def lock(self, accel: str) -> bytes:
        """The lock file of an accelerator. Raises RecipeError when there is none."""
        if accel not in self.locks:
            raise RecipeError(
                f"engine {self.name!r}: an environment for {accel!r} was asked for; there are locks for "
                f"{', '.join(sorted(self.locks))}."
            )
        return files(self.package).joinpath(self.locks[accel]).read_bytes()

    def packages(self, accel: str) -> dict[str, str]:
        """Name -> version of every package that its lock holds."""
        pins = (line.split()[0].partition("==") for line in self.lock(accel).decode().splitlines() if "==" in line)
        return {name: version for name, _, version in pins if not name.startswith("#")}

    def folder(self, accel: str, *, within: Path | None = None) -> Path:
        """Where its environment lies, present or not: a folder of its own for every lock, version of Python, and
        content of its additions.

        within: folder of all environments, `cache_folder()` unless another one is given.
        """
        key = hashlib.sha256(self.lock(accel) + self.python.encode())
        for tree in self.trees(accel):
            for path in tree_files(tree):
                content = path.read_bytes()
                key.update(f"{tree.name}/{path.relative_to(tree).as_posix()}:{len(content)}:".encode() + content)
        return (within or cache_folder()) / f"{self.name}-{accel}-{key.hexdigest()[:12]}"

    def trees(self, accel: str) -> list[Path]:
        """Folders of the additions of an accelerator."""
        found: list[Path] = []
        for addition in self.additions.get(accel, ()):
            package, _, folder = addition.partition(":")
            tree = Path(str(files(package).joinpath(folder)))
            assert (tree / "pyproject.toml").is_file(), f"engine {self.name!r}: no source tree in {addition!r}"
            found.append(tree)
        return found

    def is_present(self, accel: str, *, within: Path | None = None) -> bool:
        """Whether its environment was made to the end."""
        return (self.folder(accel, within=within) / COMPLETE).is_file()

    def interpreter(self, accel: str, *, within: Path | None = None) -> Path:
        """The Python of its environment. Raises RunFailed, with the command that makes it, when it is not there."""
        folder = self.folder(accel, within=within)
        if not self.is_present(accel, within=within):
            raise RunFailed(
                f"engine {self.name!r} runs in an environment of its own, and {str(folder)!r} is not there. Make it: "
                f"`{self.command(accel, within=within)}`."
            )
        return folder / "bin" / "python"

    def command(self, accel: str, *, within: Path | None = None) -> str:
        """The command that makes its environment."""
        words = ["unirl", "engine-env", self.name, "--accel", accel]
        words += ["--release", self.release] if self.release else []
        words += ["--dir", str(within)] if within else []
        return " ".join(words)
