#!/usr/bin/env python3
"""Print the test folders of dists that changed since a commit, and of dists that depend on one of them.

    python tools/changed_dists.py origin/main

One path a line, relative to the root: folders of dists, and `tests` where one of them is installed by the quickstarts,
which those tests run. All paths are printed where a file outside the dists changed that any test may depend on. Exits
with 1 where the commit is unknown.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTED_NOWHERE = ("docs/", "conformance/", "benchmarks/", "recipes/", "registry/", "LICENSE")
"""Paths that no slow test reads; Markdown files anywhere are others."""
SYSTEM = "unirl-quickstart"
"""The dist whose dependencies the tests in `tests` run."""


def main(base: str) -> int:
    command = ["git", "diff", "--name-only", "--merge-base", base]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{base}: {done.stderr.strip()}", file=sys.stderr)
        return 1
    files = [file for file in done.stdout.split() if not file.startswith(TESTED_NOWHERE) and not file.endswith(".md")]
    print("\n".join(_selected(files)))
    return 0


def _selected(files: list[str]) -> list[str]:
    folders, needs = {}, {}
    for project in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml")]:
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        folders[table["name"]] = project.parent.relative_to(ROOT).as_posix()
        needs[table["name"]] = {re.split(r"[^\w-]", word)[0] for word in table.get("dependencies", ())}
    changed = {name for name, folder in folders.items() if any(file.startswith(f"{folder}/") for file in files)}
    tests = [file for file in files if file.startswith("tests/test_")]
    if any(not file.startswith((*(f"{folder}/" for folder in folders.values()), "tests/test_")) for file in files):
        changed = set(folders)
    while more := {name for name in folders if name not in changed and needs[name] & changed}:
        changed |= more
    return sorted({folders[name] for name in changed} | ({"tests"} if SYSTEM in changed else set(tests)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(sys.argv[1]))
