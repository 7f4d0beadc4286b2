"""Commands that the pages show a reader: those about recipes are composed and matched, as a run begins, and all come with
the dists that a page installs. Nothing is built."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from pages import PAGES, ROOT, about_recipes, commands, shown_files, write_shown
from siblings import with_siblings
from unirl.core.cli import main
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose

ELSEWHERE = ("--resume", "warmth", "symmetry")
"""Those that need a run to resume, see tests/test_runs.py, or the plugin of a page, see tests/test_third_party.py."""
SHOWN = [command for command in commands(PAGES) if about_recipes(command)]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, marks=pytest.mark.torchao if "backend.quantize=" in one else ())
        for one in SHOWN
        if not any(word in one for word in ELSEWHERE)
    ],
)
def test_a_command_that_a_page_shows_is_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    rows = [json.dumps({"prompt": f"prompt {n}", "answer": "1", "tests": ["assert f() == 1"]}) for n in range(64)]
    for name in {"prompts.jsonl", *re.findall(r"data\.\w+=(\w[\w-]*\.jsonl)", command)}:
        (tmp_path / name).write_text("\n".join(rows))
    for name in re.findall(r"instruction=([\w-]+\.txt)", command):
        (tmp_path / name).write_text("Rate {text_prompt}: <|VQ_reward|><|MQ_reward|><|TA_reward|>")
    for name in re.findall(r"--settings (\S+)", command):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("quickstart: {algorithms: {awm: [backend.lr=3e-5]}}")
    write_shown(tmp_path, PAGES)
    if words[0] == "train":
        # What train begins with; training itself is in tests/test_runs.py.
        words = ["compose", *[word for word in words[1:] if word not in ("--multirun", "--continue")]]
        words = [word.split(",")[0] if "=" in word else word for word in words]
    if words[0] == "league":
        words = [*words, "--dry-run"]
    with pytest.raises(SystemExit) as caught:
        main(words)
    # Plugins of this folder are imported once per process; the next command has them in another folder.
    for name in shown_files(PAGES):
        sys.modules.pop(Path(name).stem, None)
    # Each tutorial shows one refusal, and says so.
    is_refused = bool({"sampling.eta=0", "sampling.temperature=0"} & set(words))
    assert caught.value.code == int(is_refused), capsys.readouterr().err


PROJECTS = [
    tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    for file in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml"))
]
OWNERS = {
    command: project["name"]
    for project in PROJECTS
    for command in project.get("entry-points", {}).get("unirl.commands", ())
}
"""Command -> its dist."""
INSTALL = r"pip install ((?:['\"]?unirl-[\w-]+(?:\[[\w,-]+\])?['\"]? ?)+)"


def installed(*lines: str) -> set[str]:
    """The dists of the workspace that these lines install, with all that they require."""
    return set(with_siblings(*re.findall(r"unirl-[\w-]+", " ".join(lines))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_come_with_the_dists_that_it_installs(page: Path) -> None:
    """The page of a part adds it to an installation that trains, as README says, and which every backend brings."""
    text = page.read_text(encoding="utf-8")
    lines = re.findall(INSTALL, text)
    if not lines:
        return
    if "--group dev" in text and page.with_name("pyproject.toml").is_file():
        lines.append(page.with_name("pyproject.toml").read_text(encoding="utf-8"))
    there = installed(*lines) | ({"unirl-loop"} if page != ROOT / "README.md" else set())
    shown = re.findall(r"^(?: {4}|\$ |)unirl ([a-z][a-z-]*)", text, flags=re.MULTILINE)
    assert {command: OWNERS[command] for command in shown if OWNERS[command] not in there} == {}
    assert all("unirl-loop" in installed(project["name"]) for project in PROJECTS if "-backend-" in project["name"])


def test_the_recipe_shown_below_an_install_line_needs_no_other_dist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a ring"}))
    monkeypatch.chdir(tmp_path)
    shown = re.findall(rf"{INSTALL}\n    unirl train (.*)", (ROOT / "README.md").read_text(encoding="utf-8"))
    for line, words in shown:
        recipe, *overrides = words.split()
        there = installed(line)
        off = {record.dist for record in Catalog.discover().records} - there
        catalog = Catalog.discover(disabled=off)
        assert match(compose(recipe, overrides, catalog=catalog), catalog=catalog).accepted
    assert len(shown) == 2
