"""Dependencies between the dists of the workspace."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def with_siblings(*names: str) -> list[str]:
    """These dists of the workspace, and all others of it that they need, each once."""
    files = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml")]
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    needs = {
        project["name"]: [re.split(r"[^\w-]", line)[0] for line in project.get("dependencies", ())]
        for project in projects
    }
    result: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in needs and name not in result:
            result[name] = None
            waiting += needs[name]
    return list(result)
