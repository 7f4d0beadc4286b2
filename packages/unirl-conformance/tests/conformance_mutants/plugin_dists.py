"""Little dists, written as an installer leaves them: a package, and metadata that `importlib.metadata` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["GROUP", "Dist"]

GROUP = "planted.v1"
"""Another group than the real one, so that nobody else in this process finds these plugins."""

HEAD = """\
from unirl.core.specs.capability import Cap, Needs
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import AlgorithmSpec, BackendSpec, EngineSpec, Gap, Miniature, ModelSpec, RewardSpec, TrackerSpec

PLAIN = {{"summary": "A part that is planted.", "build": "{package}.part:build", "config": "{package}.config:Config"}}


@hookimpl
def unirl_trackers():
    return [TrackerSpec(**{{**PLAIN, "name": "{part}", {tracker}}})]
"""
CONFIG = '''\
from dataclasses import dataclass, field

from unirl.core.specs.config import PartConfig


@dataclass
class Inner:
    depth: int = 1
    """How deep it goes."""


@dataclass
class Config(PartConfig):
    width: int = 1
    """How wide it is."""
    inner: Inner = field(default_factory=Inner)
    """What is inside."""
'''
PART = """\
def build(config, **context):
    return object()


def write(folder, *, seed):
    pass


def parity(folder, *, prompts, sampling, initial):
    pass


def needs_more(config, more):
    pass
"""
README = (
    "# {name}\n\nProvides the tracker `{part}`, which is planted to be tried.\n\n" + "It is a part like others. " * 20
)


@dataclass(frozen=True, kw_only=True)
class Dist:
    """A dist with one plugin that provides one tracker and is well, but for what is changed here."""

    name: str
    tracker: str = ""
    """Arguments of the tracker's spec that differ, as they stand in a dict: `"summary": ""`."""
    code: str = ""
    """Appended to its plugin.py."""
    config: str = CONFIG
    files: Mapping[str, bytes] = field(default_factory=lambda: dict[str, bytes]())
    """Further files, by their path where the package stands."""
    apart: Mapping[str, bytes] = field(default_factory=lambda: dict[str, bytes]())
    """Files of a second source folder of an editable install, which this process does not import from."""
    without: tuple[str, ...] = ()
    """Paths left out."""
    headers: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Changed lines of its METADATA; an empty one is left out."""
    requires: tuple[str, ...] = ("unirl-core",)
    readme: str = README
    point: str = ""
    """Name of its entry point, where that is not the part's."""
    part: str = ""
    """Name of the tracker, where that is not the dist's."""
    layout: str = "wheel"
    """`wheel`, or an editable install whose sources stand in `src` or, `flat`, in the project's folder."""

    @property
    def package(self) -> str:
        return self.name.replace("-", "_")

    def write(self, folder: Path) -> list[Path]:
        """Install it below `folder`. Returns what must be on the module path."""
        site = folder / "site"
        info = site / f"{self.package}-{self.version}.dist-info"
        info.mkdir(parents=True)
        project = folder / "projects" / self.name
        root = {"wheel": site, "src": project / "src", "flat": project}[self.layout]
        listed = self._write_files(root, self._sources())
        metadata = {
            "METADATA": self._metadata(),
            "entry_points.txt": f"[{GROUP}]\n{self.point or self._part} = {self.package}.plugin\n",
        }
        if "License-File" in self._headers:
            metadata["licenses/LICENSE"] = "Everybody may use it.\n"
        if self.layout != "wheel":
            self._write_project(project)
            self._write_files(project / "apart", self.apart)
            address = {"url": project.as_uri(), "dir_info": {"editable": True}}
            metadata["direct_url.json"] = json.dumps(address)
            pth = f"{self.package}.pth"
            (site / pth).write_text(f"{root}\n" + (f"{project / 'apart'}\n" if self.apart else ""), encoding="utf-8")
            listed = [pth]
        listed += self._write_files(site, {f"{info.name}/{name}": text.encode() for name, text in metadata.items()})
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in listed), encoding="utf-8")
        return list(dict.fromkeys([site, root]))

    @property
    def version(self) -> str:
        return self.headers.get("Version", "1.0")

    @property
    def _part(self) -> str:
        return self.part or self.name

    def _sources(self) -> dict[str, bytes]:
        values = {"package": self.package, "part": self._part, "tracker": self.tracker}
        files = {
            f"{self.package}/__init__.py": b"",
            f"{self.package}/py.typed": b"",
            f"{self.package}/plugin.py": f"{HEAD.format(**values)}{self.code}".encode(),
            f"{self.package}/config.py": self.config.encode(),
            f"{self.package}/part.py": PART.encode(),
            **self.files,
        }
        return {name: content for name, content in files.items() if name not in self.without}

    def _write_files(self, root: Path, files: Mapping[str, bytes]) -> list[str]:
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        return list(files)

    @property
    def _headers(self) -> dict[str, str]:
        plain = {
            "Metadata-Version": "2.4",
            "Name": self.name,
            "Version": "1.0",
            "Summary": "A plugin that is planted",
            "License-Expression": "Apache-2.0",
            "License-File": "LICENSE",
            "Requires-Python": ">=3.11",
        }
        # What an editable install says of itself now stands in its pyproject.toml.
        stale = {"Summary": "", "License-Expression": "", "License-File": "", "Requires-Python": ""}
        result = {**plain, **({} if self.layout == "wheel" else stale), **self.headers}
        return {name: value for name, value in result.items() if value}

    def _metadata(self) -> str:
        lines = [f"{name}: {value}" for name, value in self._headers.items()]
        readme = self.readme.format(name=self.name, part=self._part) if self.layout == "wheel" else ""
        return "\n".join([*lines, *(f"Requires-Dist: {line}" for line in self.requires), "", readme])

    def _write_project(self, folder: Path) -> None:
        (folder / "LICENSE").write_text("Everybody may use it.\n", encoding="utf-8")
        (folder / "README.md").write_text(self.readme.format(name=self.name, part=self._part), encoding="utf-8")
        (folder / "pyproject.toml").write_text(
            f"""\
[project]
name = "{self.name}"
version = "{self.version}"
description = "A plugin that is planted"
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
license-files = ["LICENSE"]
dependencies = {json.dumps(list(self.requires))}
""",
            encoding="utf-8",
        )
