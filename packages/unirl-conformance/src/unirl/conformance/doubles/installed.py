"""What is installed of a dist: what it says of itself, and its files. Editable installs are read where they stand."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.parse import urlparse
from urllib.request import url2pathname

from .modules import find_module, outermost_package

__all__ = ["Installed", "InstalledFile"]


@dataclass(frozen=True, kw_only=True)
class InstalledFile:
    name: PurePosixPath
    """Relative to the folder that is on the module path; with `..` for what was put elsewhere."""
    path: Path


@dataclass(frozen=True)
class Installed:
    """A dist as it is installed here."""

    dist: Distribution

    @cached_property
    def project_folder(self) -> Path | None:
        """The source folder of an editable install."""
        text = self.dist.read_text("direct_url.json")
        result: dict[str, Any] = json.loads(text) if text else {}
        if not result.get("dir_info", {}).get("editable"):
            return None
        return Path(url2pathname(urlparse(result["url"]).path))

    @cached_property
    def _project(self) -> dict[str, Any]:
        """The `[project]` table of an editable install: its metadata dates from its installation, this from now."""
        file = self.project_folder / "pyproject.toml" if self.project_folder else None
        if file is None or not file.is_file():
            return {}
        return tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})

    def _header(self, name: str) -> list[str]:
        result = cast(Any, self.dist.metadata).get_all(name) or []
        return [str(value) for value in result if str(value).strip() not in ("", "UNKNOWN")]

    @property
    def version(self) -> str:
        return self.dist.version

    @property
    def summary(self) -> str:
        return self._project.get("description") or next(iter(self._header("Summary")), "")

    @property
    def readme(self) -> str:
        stated: Any = self._project.get("readme", {})
        stated = {"file": stated} if isinstance(stated, str) else stated
        name = stated.get("file", "")
        if name and self.project_folder:
            file = self.project_folder / name
            return file.read_text(encoding="utf-8") if file.is_file() else ""
        if "text" in stated:
            return stated["text"]
        # Old metadata has it in a header, newer below the headers.
        body = cast(Any, self.dist.metadata).get_payload()
        return next(iter(self._header("Description")), "") or (body if isinstance(body, str) else "")

    @property
    def requires_python(self) -> str:
        return self._project.get("requires-python") or next(iter(self._header("Requires-Python")), "")

    @property
    def requires(self) -> list[str]:
        """Requirement lines, those of extras apart."""
        if "dependencies" in self._project:
            return self._project["dependencies"]
        return [line for line in self.dist.requires or () if "extra ==" not in line]

    @property
    def licence(self) -> str:
        """Its licence in a word, as any of the three ways to state one has it."""
        stated = self._project.get("license", "")
        if isinstance(stated, dict):
            stated = "in a file" if "file" in stated else str(cast(Any, stated).get("text", ""))
        classifiers = [line for line in self._header("Classifier") if line.startswith("License ::")]
        named = [str(stated), *self._header("License-Expression"), *self._header("License"), *classifiers]
        return next((text for text in named if text), "")

    @property
    def licence_files(self) -> list[Path]:
        """Files with the text of a licence: below its metadata, or in the folder of an editable install."""
        inside = [file.path for file in self.files if file.name.parts[0].endswith((".dist-info", ".egg-info"))]
        beside = list(self.project_folder.iterdir()) if self.project_folder else []
        return [path for path in [*inside, *beside] if path.name.upper().startswith(("LICEN", "COPYING"))]

    @cached_property
    def packages(self) -> list[str]:
        """The outermost package, or module, of each of its entry points: what is its own."""
        modules = {point.value.partition(":")[0].strip() for point in self.dist.entry_points}
        return sorted({outermost_package(module) for module in modules})

    @cached_property
    def files(self) -> list[InstalledFile]:
        """Every file that installing it puts there, generated ones apart; of an editable install those it stands for.

        Raises FileNotFoundError when the dist has no list of its files.
        """
        listed = self.dist.files
        if listed is None:
            raise FileNotFoundError(f"{self.dist.name} has no RECORD, so nobody can tell which files are its own")
        result = [
            InstalledFile(name=PurePosixPath(item.as_posix()), path=Path(str(self.dist.locate_file(item))))
            for item in listed
        ]
        if self.project_folder is not None:
            # The hooks of the editable install itself: `<name>.pth`, `__editable___<name>_finder.py`.
            hooks = [file for file in result if file.name.suffix == ".pth" or file.name.name.startswith("__editable__")]
            roots = [root for file in hooks if file.name.suffix == ".pth" for root in _roots(file.path)]
            result = [file for file in result if file not in hooks]
            result += self._sources(roots)
        return [file for file in result if not _is_generated(file.name)]

    def _sources(self, roots: Sequence[Path]) -> Iterator[InstalledFile]:
        """Files of an editable install. Of a flat project, which holds tests and docs too, its packages."""
        whole = [root for root in roots if root != self.project_folder]
        for root in whole:
            for path in _walk(root):
                yield InstalledFile(name=PurePosixPath(path.relative_to(root).as_posix()), path=path)
        for package in self.packages if not whole else ():
            place = PurePosixPath(*package.split("."))
            spec = find_module(package)
            assert spec is not None, f"{package} is listed as a package and cannot be found"
            for folder in spec.submodule_search_locations or ():
                for path in _walk(Path(folder)):
                    yield InstalledFile(name=place / path.relative_to(folder).as_posix(), path=path)
            if spec.submodule_search_locations is None and spec.origin:
                yield InstalledFile(name=place.with_suffix(".py"), path=Path(spec.origin))


def _roots(pth: Path) -> list[Path]:
    lines = pth.read_text(encoding="utf-8").splitlines() if pth.is_file() else []
    return [Path(line) for line in lines if line.strip() and not line.startswith(("import ", "import\t", "#"))]


def _walk(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def _is_generated(name: PurePosixPath) -> bool:
    """Byte code, and what setuptools leaves next to the sources of an editable install."""
    return "__pycache__" in name.parts or any(part.endswith(".egg-info") for part in name.parts[:1])
