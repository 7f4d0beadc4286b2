"""Install every dist of the checkout, editable, without pip, a build backend or a network.

    python benchmarks/gpu/install_tree.py [--site FOLDER]

Writes what an installer would: one `.pth` file with the source folders, and for each dist a `.dist-info` folder with
METADATA (README and licence included), entry points and RECORD. FOLDER must be one that Python reads `.pth` files of;
by default it is that of this interpreter.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
import tomllib
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["install"]

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=Path(sysconfig.get_path("purelib")))
    options = parser.parse_args()
    print(f"{install(ROOT, options.site)} dists in {options.site}")


def install(root: Path, site: Path) -> int:
    """Install the dists of a checkout into a folder; returns how many."""
    site.mkdir(parents=True, exist_ok=True)
    projects = sorted([*root.glob("packages/*/pyproject.toml"), *root.glob("plugins/*/*/pyproject.toml")])
    for file in projects:
        write_dist_info(file.parent, tomllib.loads(file.read_text())["project"], site)
    sources = "".join(f"{file.parent / 'src'}\n" for file in projects)
    (site / "unirl_checkout.pth").write_text(sources)
    return len(projects)


def write_dist_info(dist: Path, project: Mapping[str, Any], site: Path) -> None:
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    files = {
        "METADATA": "\n".join([*fields(project), "", (dist / project["readme"]).read_text()]),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: install_tree\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "INSTALLER": "install_tree\n",
        "entry_points.txt": "\n".join(entry_points(project)),
        **{f"licenses/{name}": (dist / name).read_text() for name in project.get("license-files", ())},
    }
    rows = [f"{info.name}/RECORD,,"]
    for name, text in files.items():
        path = info / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        data = path.read_bytes()
        digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{info.name}/{name},sha256={digest},{len(data)}")
    (info / "RECORD").write_text("\n".join([*rows, ""]))


def fields(project: Mapping[str, Any]) -> Iterator[str]:
    """Core metadata, PyPA specification, version 2.4."""
    yield "Metadata-Version: 2.4"
    yield f"Name: {project['name']}"
    yield f"Version: {project['version']}"
    yield f"Summary: {project['description']}"
    yield f"License-Expression: {project['license']}"
    yield from (f"License-File: {name}" for name in project.get("license-files", ()))
    yield from (f"Requires-Dist: {one}" for one in project.get("dependencies", ()))
    for extra, requirements in project.get("optional-dependencies", {}).items():
        yield f"Provides-Extra: {extra}"
        for one in requirements:
            requirement, _, marker = one.partition(";")
            both = f"({marker.strip()}) and " if marker else ""
            yield f"Requires-Dist: {requirement.strip()} ; {both}extra == '{extra}'"
    yield f"Requires-Python: {project['requires-python']}"
    yield "Description-Content-Type: text/markdown"


def entry_points(project: Mapping[str, Any]) -> Iterator[str]:
    for group, points in {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}.items():
        if points:
            yield f"[{group}]"
            yield from (f"{name} = {target}" for name, target in points.items())
            yield ""


if __name__ == "__main__":
    main()
