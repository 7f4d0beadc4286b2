"""Register a new dist of this checkout: run it after adding the folder.

    python3 tools/add_dist.py            # add what is missing
    python3 tools/add_dist.py --check    # list what is missing; exit code 1 if anything is

The workspace includes every folder of `packages/*` and `plugins/*/*`. For each dist this script links the LICENSE and
its recipes in `recipes/`, adds its lines to `registry/plugins.toml` and `uv.lock`, and installs it editable. Run it
with the Python of `.venv`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REGISTRY = ROOT / "registry" / "plugins.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="list what is missing and change nothing")
    check = parser.parse_args().check
    missing = [*_licences(check), *_recipes(check)]
    new = _not_locked()
    missing += [f"uv.lock: {name} is missing" for name in new]
    absent = _not_installed()
    missing += [f".venv: {name} is missing" for name in absent]
    if new and not check:
        _run(_uv(), "lock", "--quiet")
    if not check:
        for name in absent:
            # Its requirements are those of the lock, which bootstrap.py installs.
            _run(
                _uv(),
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--python",
                sys.executable,
                "--editable",
                _dists()[name],
            )
    lines = _unregistered()
    missing += [f"registry/plugins.toml: {kind} {name} is missing" for kind, name, _ in lines]
    if not check:
        for kind, name, line in lines:
            _register(kind, name, line)
    for text in missing:
        print(text if check else f"added: {text.removesuffix(' is missing')}")
    if check and missing:
        raise SystemExit("Run `python3 tools/add_dist.py` to add all of it.")


def _dists() -> dict[str, Path]:
    """Name of each dist -> its folder."""
    files = sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml")])
    return {tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"]: file.parent for file in files}


def _licences(check: bool) -> list[str]:
    return [
        _linked(folder / "LICENSE", ROOT / "LICENSE", check)
        for folder in _dists().values()
        if _lacks(folder / "LICENSE")
    ]


def _recipes(check: bool) -> list[str]:
    """Links that the folder `recipes` lacks to entries of dists' `recipes` packages; made unless `check`."""
    result = [
        entry
        for folder in _dists().values()
        for recipes in folder.glob("src/unirl/**/recipes")
        for entry in sorted(recipes.iterdir())
        if entry.suffix == ".yaml" or (entry.is_dir() and any(entry.glob("*.yaml")))
    ]
    return [_linked(ROOT / "recipes" / e.name, e, check) for e in result if _lacks(ROOT / "recipes" / e.name)]


def _lacks(path: Path) -> bool:
    return not path.exists() and not path.is_symlink()


def _linked(link: Path, target: Path, check: bool) -> str:
    if not check:
        link.symlink_to(os.path.relpath(target, link.parent))
    return f"{link.relative_to(ROOT)} is missing"


def _not_locked() -> list[str]:
    locked = {package["name"] for package in tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]}
    return [name for name in _dists() if name not in locked]


def _not_installed() -> list[str]:
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    return [name for name in _dists() if name not in installed]


def _unregistered() -> list[tuple[str, str, str]]:
    """(kind, name, line) of each part of these dists that the registry does not have, or has as planned.

    Read in a separate process: this one does not see packages that were installed a moment ago.
    """
    code = (
        "import json; from unirl.core.plugins.catalog import Catalog; print(json.dumps("
        "[[f.spec.kind, f.spec.name, f.dist, f.spec.summary] for f in Catalog.discover().parts()]))"
    )
    parts = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    known = tomllib.loads(REGISTRY.read_text(encoding="utf-8"))
    own = _dists()
    result: list[tuple[str, str, str]] = []
    for kind, name, dist, summary in parts:
        entry = known.get(kind, {}).get(name)
        if dist in own and (entry is None or entry.get("planned")):
            # A TOML string is a JSON string; the registry takes 100 characters and a full stop.
            text = json.dumps(summary.rstrip(".")[:98] + ".", ensure_ascii=False)
            result.append((kind, name, f'{name} = {{ dist = "{dist}", summary = {text} }}'))
    return result


def _register(kind: str, name: str, line: str) -> None:
    """Put a line under its kind, in the order of the alphabet, in place of one that was planned."""
    lines = REGISTRY.read_text(encoding="utf-8").splitlines()
    if f"[{kind}]" not in lines:
        lines += ["", f"[{kind}]"]
    first = lines.index(f"[{kind}]") + 1
    last = next((n for n in range(first, len(lines)) if not lines[n]), len(lines))
    names = [entry.split(" =")[0] for entry in lines[first:last]]
    if name in names:
        lines[first + names.index(name)] = line
    else:
        lines.insert(first + sum(other < name for other in names), line)
    REGISTRY.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _uv() -> str:
    own = ROOT / ".uv-bin" / "bin" / "uv"
    result = shutil.which("uv") or (str(own) if own.is_file() else None)
    if result is None:
        raise SystemExit("uv is missing; `python3 bootstrap.py --dev` installs it.")
    return result


def _run(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"`{' '.join(map(str, words))}` failed with exit code {done.returncode}.")


if __name__ == "__main__":
    main()
