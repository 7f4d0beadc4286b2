"""An external engine's server program, and the location of its Python environment on this machine.

Light: commands that list engines import this.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

from unirl.core.errors import RecipeError, RunFailed

from .environment_files import COMPLETE, tree_files

__all__ = ["FOLDER_VARIABLE", "EngineEnvironment", "cache_folder"]

FOLDER_VARIABLE = "UNIRL_ENVS"
"""Environment variable that sets the folder of all environments."""


def cache_folder() -> Path:
    """Folder of environments: `UNIRL_ENVS`, by default `~/.cache/unirl/envs`. Raises RecipeError if it is a file."""
    moved = os.environ.get(FOLDER_VARIABLE)
    if not moved:
        return Path.home() / ".cache" / "unirl" / "envs"
    folder = Path(moved).expanduser()
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"{FOLDER_VARIABLE}: {moved!r} is a file; set it to a folder for environments.")
    return folder


@dataclass(frozen=True, kw_only=True)
class EngineEnvironment:
    """An isolated Python environment without UniRL, and the server that runs in it.

    `unirl.core.specs.spec.EngineSpec.environment` names one as `"module:attribute"`.
    """

    name: str
    """The engine's short name, as `unirl engine-env` takes it."""
    package: str
    """Package that contains the lock files."""
    locks: Mapping[str, str]
    """Accelerator, `cpu` or `cuda`, -> lock file in the package, with every requirement pinned and hashed, for the
    newest tested release of the engine, or for `release`."""
    python: str
    """Python version of the locks, such as `3.11`."""
    serve: str
    """`"module:function"` the server runs: takes no arguments and returns its calls by name."""
    modules: tuple[str, ...] = ()
    """Modules that the server imports by name: itself, and those that the engine is told to load. Their source is
    copied to it with the UniRL modules that they import, so all of them may import only the standard library, torch and
    the engine's packages."""
    additions: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict[str, tuple[str, ...]]())
    """Accelerator -> UniRL packages installed on top of its lock: source trees, each a folder with a pyproject.toml in
    an installed package, as `"package:folder"`. They have no dependencies."""
    notes: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Accelerator -> a sentence for users about its lock, where needed."""
    earlier: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: dict[str, Mapping[str, str]]())
    """Earlier release -> its `locks`; the releases in `unirl.core.specs.spec.EngineSpec.releases`."""
    release: str = ""
    """Empty is the newest."""

    def of(self, release: str) -> EngineEnvironment:
        """The environment of another release; empty is the newest. Raises RecipeError for one without a lock file."""
        if not release:
            return self
        if release not in self.earlier:
            others = f", or for {', '.join(sorted(self.earlier))}" if self.earlier else ""
            raise RecipeError(
                f"engine {self.name!r}: got release {release!r}; there are lock files for the newest, without a "
                f"name{others}."
            )
        return replace(self, locks=self.earlier[release], release=release)

    def lock(self, accel: str) -> bytes:
        """Content of an accelerator's lock file. Raises RecipeError when there is none."""
        if accel not in self.locks:
            raise RecipeError(
                f"engine {self.name!r}: no environment for {accel!r}; there are lock files for "
                f"{', '.join(sorted(self.locks))}."
            )
        return files(self.package).joinpath(self.locks[accel]).read_bytes()

    def packages(self, accel: str) -> dict[str, str]:
        """Name -> version of every package in its lock."""
        pins = (line.split()[0].partition("==") for line in self.lock(accel).decode().splitlines() if "==" in line)
        return {name: version for name, _, version in pins if not name.startswith("#")}

    def folder(self, accel: str, *, within: Path | None = None) -> Path:
        """Folder of its environment, which may not exist: unique per lock, Python version and content of its additions.

        within: folder of all environments, by default `cache_folder()`.
        """
        key = hashlib.sha256(self.lock(accel) + self.python.encode())
        for tree in self.trees(accel):
            for path in tree_files(tree):
                content = path.read_bytes()
                key.update(f"{tree.name}/{path.relative_to(tree).as_posix()}:{len(content)}:".encode() + content)
        return (within or cache_folder()) / f"{self.name}-{accel}-{key.hexdigest()[:12]}"

    def trees(self, accel: str) -> list[Path]:
        """Folders of an accelerator's additions."""
        result: list[Path] = []
        for addition in self.additions.get(accel, ()):
            package, _, folder = addition.partition(":")
            tree = Path(str(files(package).joinpath(folder)))
            assert (tree / "pyproject.toml").is_file(), f"engine {self.name!r}: no source tree in {addition!r}"
            result.append(tree)
        return result

    def is_present(self, accel: str, *, within: Path | None = None) -> bool:
        """Whether its environment exists and is complete."""
        return (self.folder(accel, within=within) / COMPLETE).is_file()

    def interpreter(self, accel: str, *, within: Path | None = None) -> Path:
        """The environment's Python. Raises RunFailed, with the command that creates it, when it is missing."""
        folder = self.folder(accel, within=within)
        if not self.is_present(accel, within=within):
            raise RunFailed(
                f"engine {self.name!r} needs its own environment, and {str(folder)!r} does not exist. Create it "
                f"with `{self.command(accel, within=within)}`, or add --make-env to `unirl train`."
            )
        return folder / "bin" / "python"

    def make(self, accel: str, *, within: Path | None = None, tell: Callable[[str], None]) -> Path:
        """Create its environment if it is missing; returns its folder. tell: called with progress lines.

        Raises RunFailed when it cannot be created.
        """
        from .install import install

        return install(self, accel, within=within, tell=tell).folder

    def command(self, accel: str, *, within: Path | None = None) -> str:
        """The command that creates its environment."""
        words = ["unirl", "engine-env", self.name, "--accel", accel]
        words += ["--release", self.release] if self.release else []
        words += ["--dir", str(within)] if within else []
        return " ".join(words)
