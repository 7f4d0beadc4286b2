"""The pages of the documents, and what they show a reader to save and to run."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = tuple(
    sorted(
        [
            *ROOT.glob("*.md"),
            *(ROOT / "docs").rglob("*.md"),
            *ROOT.glob("*/*/README.md"),
            *ROOT.glob("*/*/*/README.md"),
            *ROOT.glob(".agents/skills/*/SKILL.md"),
        ]
    )
)
WITH_FUNCTIONS = (
    ".agents/skills/write-a-reward/SKILL.md",
    "README.md",
    "docs/how-to/environments.md",
    "docs/tutorials/quickstart.md",
    "plugins/rewards/rules/README.md",
)
"""Pages that train on the reader's own function."""
TRAINED = ("quickstart", "quickstart-text", "quickstart-tools")
"""The recipes that they train."""


def commands(pages: Iterable[Path]) -> list[str]:
    """Every `unirl` command that these pages show in an indented or fenced block."""
    result: dict[str, None] = {}
    for page in pages:
        for line in page.read_text(encoding="utf-8").splitlines():
            match = re.match(
                r"(?: {4}|\$ |)(?:python3 bootstrap\.py -- )?(unirl (?:train|compose|plan|plugins|recipes|doctor|conformance|new|data|league).*)",
                line,
            )
            if match and "reference" not in page.parts and (line.startswith("    ") or line.startswith("unirl")):
                result[match.group(1).split("  #")[0].strip()] = None
    return list(result)


def about_recipes(command: str) -> bool:
    """Whether a command composes or lists recipes and parts, or begins so and is not shown what comes after."""
    return command.split()[1] in ("train", "compose", "plugins", "recipes", "league")


@functools.cache
def shown_files(pages: tuple[Path, ...]) -> Mapping[str, str]:
    """Files that these pages tell a reader to save: Python blocks whose first line is a comment with the name."""
    result: dict[str, str] = {}
    for page in pages:
        for name, code in re.findall(
            r"```python\n# ([\w/]+\.py)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL
        ):
            assert result.setdefault(name, code) == code, f"{page} shows another {name}"
    return result


def write_shown(folder: Path, pages: tuple[Path, ...]) -> None:
    for name, code in shown_files(pages).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
