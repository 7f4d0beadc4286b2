"""Commands about recipes that the pages show a reader: composed and matched, as a run begins. Nothing is built."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from pages import PAGES, about_recipes, commands, shown_files, write_shown
from unirl.core.cli import main

ELSEWHERE = ("--resume", "warmth", "symmetry")
"""Those that need a run to resume, see tests/test_runs.py, or the plugin of a page, see tests/test_third_party.py."""
SHOWN = [command for command in commands(PAGES) if about_recipes(command)]


@pytest.mark.parametrize("command", [one for one in SHOWN if not any(word in one for word in ELSEWHERE)])
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
        words = ["compose", *[word for word in words[1:] if word != "--multirun"]]
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
