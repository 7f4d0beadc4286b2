"""Runs that pages show to a reader: training on the reader's own function, exports, the example of the core."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from pages import ROOT, WITH_FUNCTIONS, commands, write_shown
from PIL import Image
from unirl.core.cli import main

# Pages name their parts, which no string of this module does.

FILES = tuple(ROOT / name for name in WITH_FUNCTIONS)
FUNCTIONS = [command for command in commands(FILES) if "=function" in command]


@pytest.mark.slow
@pytest.mark.parametrize("command", FUNCTIONS)
def test_a_function_that_a_page_shows_is_trained_on(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_shown(tmp_path, FILES)
    small = [
        "run.max_steps=2",
        "run.dir=out",
        "data.prompts_per_step=4",
        "data.eval=''",
        "advantage.constant_reward=skip",
    ]
    with pytest.raises(SystemExit) as caught:
        main([*shlex.split(command)[1:], *small])
    assert caught.value.code == 0, capsys.readouterr().err
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    name = "reward/environment" if "environment=" in command else "reward/mine"
    assert len(steps) == 2 and all(name in step for step in steps), sorted(steps[0])


@pytest.mark.slow
def test_the_page_about_exports_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [
        "run.max_steps=2",
        "run.save_every=1",
        "data.prompts_per_step=2",
        "data.samples_per_prompt=2",
        "data.eval=''",
    ]
    small += ["advantage.constant_reward=skip", "backend.ema.kind=constant", "~tracker.report"]
    text = (ROOT / "docs/how-to/export.md").read_text(encoding="utf-8")
    exported: list[str] = []
    # In the order of the page.
    for command, code in re.findall(
        r"^    (unirl [^\n]*)$|^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE
    ):
        if code:
            exec(compile(code, "export.md", "exec"), {})
            continue
        words = shlex.split(command)[1:]
        with pytest.raises(SystemExit) as caught:
            main([*words, *(small if words[0] == "train" else [])])
        assert caught.value.code == 0, f"{command}: {capsys.readouterr().err}"
        if words[0] == "export":
            exported.append(words[words.index("--to") + 1])
    assert exported == ["shapes-lora", "sums-lora", "shapes-comfy", "shapes", "sums", "shapes-average"]
    programs = {name: program_of(tmp_path / name / "README.md") for name in exported}
    assert [name for name, program in programs.items() if not program] == ["shapes-comfy"]
    for name, program in programs.items():
        (tmp_path / "sample.png").unlink(missing_ok=True)
        exec(compile(program, f"the card of {name}", "exec"), {})
        if program and name.startswith("shapes"):
            with Image.open(tmp_path / "sample.png") as image:
                assert image.size == (64, 64)


def program_of(card: Path) -> str:
    """What the card of an export says to run; empty where it has nothing."""
    return "".join(re.findall(r"^```python\n(.*?)^```$", card.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


def test_the_python_example_of_the_core_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "packages/unirl-core/README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    small = example.replace(
        '"run.max_steps=1"', '"run.max_steps=1", "data.prompts_per_step=2", "advantage.constant_reward=skip"'
    )
    exec(compile(small, "README.md", "exec"), {})
    assert (tmp_path / "run" / "events.jsonl").is_file()
