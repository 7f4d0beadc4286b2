"""The documents: links lead somewhere, commands are accepted, the reference can be built."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, TRAINED, WITH_FUNCTIONS, about_recipes, commands
from unirl.conformance.claims import all_claims
from unirl.core.cli import main
from unirl.core.specs.spec import KINDS
from unirl.models.causal_lm import tiny as causal_lm_tiny
from unirl.models.sd3 import tiny as sd3_tiny

SKILLS = tuple(page for page in PAGES if page.name == "SKILL.md")
RUN_ELSEWHERE = tuple(ROOT / "docs/how-to" / name for name in ("write-a-plugin.md", "plugin-from-checkpoint.md"))
"""Pages whose commands run in the environment of a plugin, in the tests that `needs_more` names."""


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


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
    """The plugin of a page (tests/test_third_party.py), a report, or a plugin written from a checkpoint
    (packages/unirl-new/tests/test_new_from_checkpoint.py)."""
    return any(word in command for word in ("warmth", "symmetry", "--diff", "--plugin unirl-model-my-llama"))


def write_published(name: str, file: Path) -> None:
    """A file of one row in the layout in which the set of this name is published."""
    image = {"bytes": b"\x89PNG", "path": None}
    row: dict[str, object] = {
        "gsm8k": {"question": "How many?", "answer": "One.\n#### 1"},
        "dapo-math-17k": {"prompt": [{"role": "user", "content": "What?"}], "reward_model": {"ground_truth": "1"}},
        "geometry3k": {"images": [image], "problem": "<image>Find x.", "answer": "1"},
        "aime": {"question": f"How many in {file.stem}?", "answer": "1"},
        "magicbrush": {"img_id": "1", "turn_index": 1, "instruction": "Add a hat.", "source_img": image},
        "gedit-bench": {
            **{"key": "1", "task_type": "style_change", "instruction_language": "en"},
            **{"instruction": "Add a hat.", "input_image": image},
        },
    }[name]
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps(row))


@pytest.mark.parametrize(
    "command",
    [
        # Collecting claims takes ten seconds.
        pytest.param(one, marks=pytest.mark.slow if one.startswith("unirl conformance") else ())
        for one in commands(PAGES)
        if not (about_recipes(one) or needs_more(one))
    ],
)
def test_a_command_that_a_page_shows_is_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands about recipes are in tests/test_shown_recipes.py."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    for name in re.findall(r"--from (checkpoints/\S+)", command):
        {"llama": causal_lm_tiny, "sd3": sd3_tiny}[Path(name).name].write(tmp_path / name, seed=0)
    if words[:2] == ["data", "convert"]:
        for source in [word for word in words[3:] if word.endswith((".parquet", ".jsonl"))][:-1]:
            write_published(words[2], tmp_path / source)
    if words[0] == "conformance" and not {"--claims", "--from"} & set(words):
        # The gate tries everything; here it is the options that count.
        if "--tier" not in words:
            words = [*words, "--tier", "static"]
        if not any(word.startswith("--") and word.removeprefix("--") in ("plugin", *KINDS) for word in words):
            words = [*words, "--plugin", "unirl-tools"]
    with pytest.raises(SystemExit) as caught:
        main(words)
    # `doctor` may have a finding about this machine.
    expected = (0, 1) if words[0] == "doctor" else (0,)
    assert caught.value.code in expected, capsys.readouterr().err


def test_the_pages_with_functions_of_a_reader_are_those_that_are_run() -> None:
    """They are run in tests/test_shown_runs.py, whose key has only these pages and recipes."""
    shown = {page: [one.split()[2] for one in commands([page]) if "=function" in one] for page in PAGES}
    assert {page.relative_to(ROOT).as_posix() for page, recipes in shown.items() if recipes} == set(WITH_FUNCTIONS)
    assert {recipe for recipes in shown.values() for recipe in recipes} == set(TRAINED)


@pytest.mark.parametrize("page", SKILLS, ids=lambda page: page.parent.name)
def test_a_skill_is_named_as_its_folder_and_shows_commands_that_are_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    front = re.match(r"---\nname: (\S+)\ndescription: (.{50,1024})\n---\n\n# ", text)
    assert front is not None and front[1] == page.parent.name
    assert not [
        one for one in commands([page]) if needs_more(one) and one not in commands([ROOT / "README.md", *RUN_ELSEWHERE])
    ]
    named = re.findall(r"`((?:docs|plugins)/[^`<]*|AGENTS\.md)`", text)
    assert named and not [path for path in named if not (ROOT / path).exists()]


def test_claims_that_a_skill_names_exist() -> None:
    names = {claim.name for claim in all_claims()}
    for page in SKILLS:
        rows = re.findall(r"^\| (`[a-z0-9-]+`(?:, `[a-z0-9-]+`)*) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert rows and {name for row in rows for name in re.findall(r"`(.+?)`", row)} <= names


def test_every_page_is_in_the_navigation_and_has_a_title() -> None:
    """`docs/build.py` makes the navigation of the site from the lists of docs/index.md."""
    index = ROOT / "docs/index.md"
    sections = re.split(r"^## ", index.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert {section.split("\n")[0].split(":")[0] for section in sections} == {
        "Tutorials",
        "How-to",
        "Reference",
        "Explanation",
    }
    listed = [target for section in sections for target in re.findall(r"^- \[.+?\]\((\S+?)\)", section, re.MULTILINE)]
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page != index]
    own = [page.relative_to(ROOT / "docs").as_posix() for page in pages if page.parent.name != "reference"]
    assert sorted(target for target in listed if not target.startswith(("..", "reference/"))) == sorted(own)
    assert all(re.search(r"^# \S", page.read_text(encoding="utf-8"), re.MULTILINE) for page in pages)


def test_the_numbers_of_the_start_page_are_those_of_the_matrix() -> None:
    (passed, failed, gaps, missing) = re.findall(
        r"CPU ([\d,]+) pass, (\d+) fail, (\d+) are declared gaps and ([\d,]+) were not run",
        (ROOT / "docs/index.md").read_text(encoding="utf-8"),
    )[0]
    matrix = (ROOT / "conformance/MATRIX.md").read_text(encoding="utf-8")
    assert f"✓ {passed} pass, ✗ {failed} fail, △ {gaps} gap, ○ {missing} not run" in matrix


@pytest.mark.slow
def test_the_reference_is_written_from_the_code(tmp_path: Path) -> None:
    """The contents of its pages are tested in tests/test_documented.py."""
    done = run(sys.executable, ROOT / "docs/reference/generate.py", "--into", "reference", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = re.findall(r"^\| `(\w+\.md)` \|", (ROOT / "docs/reference/README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(path.name for path in (tmp_path / "reference").iterdir()) == sorted(listed)
