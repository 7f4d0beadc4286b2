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
from unirl.core.specs.spec import KINDS
from unirl.models.causal_lm import tiny as causal_lm_tiny
from unirl.models.sd3 import tiny as sd3_tiny

pytestmark = pytest.mark.whole_tree

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
    result: dict[str, None] = {}
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            match = re.match(
                r"(?: {4}|\$ |)(?:python3 bootstrap\.py -- )?(unirl (?:train|compose|plan|plugins|recipes|doctor|conformance|new|data|league).*)",
                line,
            )
            if match and "reference" not in page.parts and (line.startswith("    ") or line.startswith("unirl")):
                result[match.group(1).split("  #")[0].strip()] = None
    return list(result)


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
    """A run to go on with (tests/test_runs.py has one), the plugin of a page (tests/test_third_party.py), a report; or
    a plugin written from a checkpoint (packages/unirl-conformance/tests/test_new_from_checkpoint.py)."""
    elsewhere = ("--resume", "warmth", "symmetry", "--diff", "--plugin unirl-model-my-llama")
    return any(word in command for word in elsewhere)


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


def shown_files() -> dict[str, str]:
    """Files that pages tell a reader to save: Python blocks whose first line is a comment with the name."""
    result: dict[str, str] = {}
    for page in PAGES:
        for name, code in re.findall(
            r"```python\n# ([\w/]+\.py)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL
        ):
            assert result.setdefault(name, code) == code, f"{page} shows another {name}"
    return result


def write_shown(folder: Path) -> None:
    for name, code in shown_files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)


@pytest.mark.parametrize("command", [command for command in commands() if not needs_more(command)])
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
    write_shown(tmp_path)
    for name in re.findall(r"--from (checkpoints/\S+)", command):
        {"llama": causal_lm_tiny, "sd3": sd3_tiny}[Path(name).name].write(tmp_path / name, seed=0)
    if words[:2] == ["data", "convert"]:
        for source in [word for word in words[3:] if word.endswith((".parquet", ".jsonl"))][:-1]:
            write_published(words[2], tmp_path / source)
    if words[0] == "train":
        # The same composition and matching that train begins with; training itself is in tests/test_runs.py.
        words = ["compose", *[word for word in words[1:] if word != "--multirun"]]
        words = [word.split(",")[0] if "=" in word else word for word in words]
    if words[0] == "league":
        words = [*words, "--dry-run"]
    if words[0] == "conformance" and not {"--claims", "--from"} & set(words):
        # The gate tries everything; here it is the options that count.
        if "--tier" not in words:
            words = [*words, "--tier", "static"]
        if not any(word.startswith("--") and word.removeprefix("--") in ("plugin", *KINDS) for word in words):
            words = [*words, "--plugin", "unirl-conformance"]
    with pytest.raises(SystemExit) as caught:
        main(words)
    # Plugins of this folder are imported once per process; the next command has them in another folder.
    for name in shown_files():
        sys.modules.pop(Path(name).stem, None)
    # `doctor` may have a finding about this machine; each tutorial shows one refusal, and says so.
    is_refused = bool({"sampling.eta=0", "sampling.temperature=0"} & set(words))
    expected = (0, 1) if words[0] == "doctor" else (1,) if is_refused else (0,)
    assert caught.value.code in expected, capsys.readouterr().err


FUNCTIONS = [command for command in commands() if "=function" in command]


@pytest.mark.slow
@pytest.mark.parametrize("command", FUNCTIONS)
def test_a_function_that_a_page_shows_is_trained_on(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_shown(tmp_path)
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
    assert len(steps) == 2 and all("reward/mine" in step for step in steps), sorted(steps[0])


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
    assert exported == ["shapes-lora", "sums-lora", "shapes", "sums", "shapes-average"]
    assert all((tmp_path / name / "README.md").is_file() for name in exported)


def test_the_pages_that_a_reader_begins_with_show_a_function_of_their_own() -> None:
    for page in ("README.md", "docs/tutorials/quickstart.md"):
        assert "reward.mine=function" in (ROOT / page).read_text(encoding="utf-8"), page


def test_the_reference_is_what_the_code_says() -> None:
    done = run(sys.executable, "docs/reference/generate.py", "--check", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_python_example_of_the_core_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "packages/unirl-core/README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    small = example.replace(
        '"run.max_steps=1"', '"run.max_steps=1", "data.prompts_per_step=2", "advantage.constant_reward=skip"'
    )
    exec(compile(small, "README.md", "exec"), {})
    assert (tmp_path / "run" / "events.jsonl").is_file()
