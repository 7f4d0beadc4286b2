"""The documents: links lead somewhere, commands are accepted, the reference is what the code says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from unirl.core.cli import main

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*/*/README.md"),
        *ROOT.glob("*/*/*/README.md"),
    ]
    if ".venv" not in path.parts
)
UNIRL = [sys.executable, "-m", "unirl.core"]


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def commands() -> list[str]:
    """Every `unirl` command that a page shows in an indented or fenced block."""
    found: dict[str, None] = {}
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            match = re.match(
                r"(?: {4}|\$ |)(?:python3 bootstrap\.py -- )?(unirl (?:train|compose|plugins|recipes|doctor).*)", line
            )
            if match and "reference" not in page.parts and (line.startswith("    ") or line.startswith("unirl")):
                found[match.group(1).split("  #")[0].strip()] = None
    return list(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    missing = [
        target
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not missing, f"{page.relative_to(ROOT)} links to {missing}"


def test_every_dist_has_a_readme_that_says_more_than_its_name() -> None:
    for member in [*ROOT.glob("packages/*"), *ROOT.glob("plugins/*/*")]:
        assert len((member / "README.md").read_text(encoding="utf-8")) > 400, member


def needs_more(command: str) -> bool:
    """A run to go on with (tests/test_runs.py has one), or the plugin of the plugin page (below)."""
    return "--resume" in command or "redness" in command


@pytest.mark.parametrize("command", [command for command in commands() if not needs_more(command)])
def test_a_command_that_a_page_shows_is_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"prompt {n}"}) + "\n" for n in range(64)))
    if words[0] == "train":
        # The same composition and matching that train begins with; training itself is in tests/test_runs.py.
        words = ["compose", *[word for word in words[1:] if word != "--multirun"]]
        words = [word.split(",")[0] if "=" in word else word for word in words]
    with pytest.raises(SystemExit) as caught:
        main(words)
    # `doctor` may have a finding about this machine; the tutorial shows one refusal, and says so.
    expected = (0, 1) if words[0] == "doctor" else (1,) if "sampling.eta=0" in words else (0,)
    assert caught.value.code in expected, capsys.readouterr().err


def test_the_reference_is_what_the_code_says() -> None:
    done = run(sys.executable, "docs/reference/generate.py", "--check", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_plugin_page_builds_a_reward_that_trains(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/write-a-plugin.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)```$", page, flags=re.DOTALL | re.MULTILINE):
        path = tmp_path / "plugin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    # What `pip install` would do, beside the environment instead of into it.
    site = tmp_path / "site"
    build = run(uv(), "pip", "install", "--quiet", "--no-deps", "--target", str(site), ".", cwd=tmp_path / "plugin")
    assert build.returncode == 0, build.stderr
    checked = run(*UNIRL, "plugins", "--check", cwd=tmp_path, PYTHONPATH=str(site))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "redness" in checked.stdout
    shown = next(c for c in commands() if "redness" in c)
    small = [
        "run.dir=run",
        "data.prompts_per_step=2",
        "data.samples_per_prompt=2",
        "eval.num_prompts=2",
        "eval.every=0",
    ]
    trained = run(*UNIRL, *shlex.split(shown)[1:], *small, cwd=tmp_path, PYTHONPATH=str(site))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    step = next(event for event in events if event["kind"] == "step")
    assert "reward/red/red" in step["metrics"]


def uv() -> str:
    own = ROOT / ".uv-bin" / "bin" / "uv"
    return str(own) if own.is_file() else "uv"


def test_the_python_example_of_the_core_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "packages/unirl-core/README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    small = example.replace(
        '"run.steps=1"', '"run.steps=1", "data.prompts_per_step=2", "advantage.constant_reward=skip"'
    )
    exec(compile(small, "README.md", "exec"), {})
    assert (tmp_path / "run" / "events.jsonl").is_file()
