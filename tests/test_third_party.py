"""Use by third parties: their own plugins, beside our wheels, in an environment without a checkout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from siblings import with_siblings
from unirl.conformance.claims import claim_kinds
from unirl.conformance.report.file import load
from unirl.core.plugins.registry import read_registry

# What others need is read from the settings of all packages.

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/how-to/write-a-plugin.md"
EXAMPLE = Path(__file__).parent / "third_party/unirl-reward-symmetry"
Run = Callable[..., subprocess.CompletedProcess[str]]
OURS = with_siblings("unirl-new", "unirl-quickstart")
RECIPE = """\
# A third party's model and algorithm, with our engine, backend and reward.
defaults:
  - /unirl
  - /model: acme
  - /engine: trainside
  - /backend: fsdp2
  - /algorithm: acme
  - /sampling: latent
  - /reward@reward.brightness: brightness
  - _self_

run: {max_steps: 2, dir: out}
data: {train: prompts.txt, prompts_per_step: 2, samples_per_prompt: 4}
model: {path: checkpoint}
backend: {trains: full, lr: 1e-3}
sampling: {num_inference_steps: 4, height: 32, width: 32, sde: {mode: fraction, last: 0.75}}
"""


class Environment:
    """A separate virtual environment with the wheels of the workspace, and commands that run in it, offline."""

    def __init__(self, folder: Path, *, run: Run, uv: str) -> None:
        self._run, self._uv = run, uv
        self.folder = folder
        self.bin = folder / "bin"
        run(uv, "venv", "--quiet", "--python", sys.executable, folder)
        self._borrow(Path(sysconfig.get_path("purelib")))

    def __call__(self, *words: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self._run(*words, cwd=cwd, code=code, **self.variables)

    @property
    def variables(self) -> dict[str, str]:
        return {
            "VIRTUAL_ENV": str(self.folder),
            "PATH": f"{self.bin}:{Path(self._uv).parent}:/usr/local/bin:/usr/bin:/bin",
            "UV_OFFLINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def install(self, *what: object, cwd: Path) -> None:
        self(self._uv, "pip", "install", "--quiet", *what, cwd=cwd)

    def _borrow(self, theirs: Path) -> None:
        """Show the packages of this environment there, all but our own, so that nothing is downloaded.

        Of a dist's metadata only what readers need: without RECORD no installer can take a file away through a link.
        """
        (mine,) = self.folder.glob("lib/python*/site-packages")
        for entry in theirs.iterdir():
            if entry.name.startswith(("unirl", "_virtualenv", "__pycache__")) or entry.suffix == ".pth":
                continue
            if entry.suffix != ".dist-info":
                (mine / entry.name).symlink_to(entry)
                continue
            (mine / entry.name).mkdir()
            for name in ("METADATA", "WHEEL", "entry_points.txt", "top_level.txt"):
                if (entry / name).exists():
                    (mine / entry.name / name).symlink_to(entry / name)
        (self.bin / "ruff").symlink_to(Path(sys.executable).parent / "ruff")
        program = f"#!{self.bin / 'python'}\nimport pytest\nraise SystemExit(pytest.console_main())\n"
        (self.bin / "pytest").write_text(program)
        (self.bin / "pytest").chmod(0o755)


@pytest.fixture(scope="module")
def environment(
    wheels: dict[str, Path], run: Run, uv: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("outside")
    made = Environment(folder / "venv", run=run, uv=uv)
    made.install(*(wheels[name] for name in OURS), cwd=folder)
    origin = made("python", "-c", "import unirl.core; print(unirl.core.__file__)", cwd=folder).stdout
    assert str(folder) in origin, "the wheels are to be tried, not the checkout"
    yield made


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_model_and_an_algorithm_of_somebody_else_train_and_keep_their_claims(
    environment: Environment, uv: str, tmp_path: Path
) -> None:
    dists = {"model": "unirl-model-acme", "algorithm": "acme-reinforce"}
    for kind, dist in dists.items():
        environment("unirl", "new", kind, "acme", "--dist", dist, cwd=tmp_path)
        environment(uv, "build", "--wheel", "--quiet", "--out-dir", tmp_path / "wheels", cwd=tmp_path / dist)
    built = sorted((tmp_path / "wheels").glob("*.whl"))
    assert len(built) == 2
    environment.install(*built, cwd=tmp_path)
    try:
        write = "import pathlib, acme_model.tiny as tiny; tiny.write(pathlib.Path('checkpoint'), seed=0)"
        environment("python", "-c", write, cwd=tmp_path)
        (tmp_path / "recipe.yaml").write_text(RECIPE)
        (tmp_path / "prompts.txt").write_text("a red ring\na blue disk\na green cross\n")
        environment("unirl", "train", "./recipe.yaml", cwd=tmp_path)
        events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
        steps = [event for event in events if event["kind"] == "step"]
        assert [step["step"] for step in steps] == [1, 2]
        assert all(step["metrics"]["grad_norm"] > 0 for step in steps)

        chosen = [word for dist in dists.values() for word in ("--plugin", dist)]
        environment("unirl", "conformance", *chosen, "--report", "report", cwd=tmp_path)
        outcomes = load(tmp_path / "report" / "conformance.json").outcomes
        passed = {(one.kind, one.subject) for one in outcomes if one.state == "pass"}
        assert {("model", "acme"), ("algorithm", "acme"), ("engine", "trainside+acme")} <= passed
        assert {("plugin", dist) for dist in dists.values()} <= passed
    finally:
        environment(uv, "pip", "uninstall", "--quiet", *dists.values(), cwd=tmp_path)
    environment("unirl", "plugins", cwd=tmp_path)
    refused = environment("unirl", "compose", "./recipe.yaml", cwd=tmp_path, code=2)
    assert "'acme'" in refused.stderr


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_worked_example_keeps_its_claims_without_a_gap(environment: Environment, uv: str, tmp_path: Path) -> None:
    source = tmp_path / EXAMPLE.name
    environment("cp", "-r", EXAMPLE, source, cwd=tmp_path)
    environment.install("--editable", source, "--group", f"{source / 'pyproject.toml'}:dev", cwd=tmp_path)
    try:
        environment("ruff", "check", "--no-cache", cwd=source)
        environment("ruff", "format", "--check", "--no-cache", cwd=source)
        environment("pytest", "-q", "-W", "error", "--ignore", "tests/test_conformance.py", cwd=source)
        environment("unirl", "conformance", "--plugin", EXAMPLE.name, "--report", "report", cwd=source)
        outcomes = load(source / "report" / "conformance.json").outcomes
        assert {one.state for one in outcomes} == {"pass"}
        assert "the-gradient-is-that-of-the-score" in {one.claim for one in outcomes}
    finally:
        environment(uv, "pip", "uninstall", "--quiet", EXAMPLE.name, cwd=tmp_path)


def commands() -> list[str]:
    """The commands that the page shows in indented blocks, in its order."""
    outside = re.sub(r"```.*?```", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line.strip() for line in outside.splitlines() if line.startswith("    ")]


def files() -> dict[str, str]:
    """Path -> text of the files that the page shows."""
    page = PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)```$", page, flags=re.DOTALL | re.MULTILINE))


def block(language: str, *, holding: str) -> str:
    """The one fenced block of a language that has these words."""
    page = PAGE.read_text(encoding="utf-8")
    (result,) = (text for text in re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL) if holding in text)
    return result


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_command_of_the_page_does_what_the_page_says(environment: Environment, uv: str, tmp_path: Path) -> None:
    """In the order of the page: each command runs; files are put in place before the section that tries them."""
    small = "run.dir=runs/trial data.prompts_per_step=2 data.samples_per_prompt=2 eval.every=0 eval.num_prompts=2"
    (tmp_path / "gitconfig").write_text(
        f'[url "{tmp_path}/remote.git"]\ninsteadOf = https://github.com/ada-example/unirl-reward-warmth.git\n'
        "[user]\nname = Ada\nemail = ada@example.org\n"
    )
    environment("git", "init", "--quiet", "--bare", "remote.git", cwd=tmp_path)
    own = tmp_path / "unirl-reward-warmth"
    seen: list[str] = []
    try:
        for command in commands():
            if "cd " in command:
                continue
            if command == "unirl conformance --plugin unirl-reward-warmth" and not seen.count(command):
                for name, text in files().items():
                    assert (own / name).is_file(), f"the page has {name}, which `unirl new` does not write"
                    (own / name).write_text(text)
                readme = (own / "README.md").read_text()
                (own / "README.md").write_text(readme.replace("contrast", "warmth"))
            seen.append(command)
            where = own if own.is_dir() else tmp_path
            if command == "uv build":
                project = own / "pyproject.toml"
                project.write_text(f"{project.read_text()}\n{block('toml', holding='[project.urls]')}")
            breaks = "every-setting-is-documented" in command
            config = own / "src/warmth_reward/config.py"
            if breaks:
                config.write_text(config.read_text().replace('    """Like blue images instead."""\n', ""))
            words = f"{command} {small}" if command.startswith("unirl train") else command
            done = environment(
                *("env", f"GIT_CONFIG_GLOBAL={tmp_path / 'gitconfig'}", "bash", "-c", words),
                cwd=where,
                code=1 if breaks else 0,
            )
            if command.startswith("unirl registry validate"):
                assert done.stdout == block("toml", holding="[reward]")
            if breaks:
                config.write_text(files()["src/warmth_reward/config.py"])
                for line in block("text", holding="FAIL").splitlines():
                    assert line.strip() in done.stdout, done.stdout
    finally:
        environment(uv, "pip", "uninstall", "--quiet", "unirl-reward-warmth", cwd=tmp_path)
    events = [json.loads(line) for line in (own / "runs" / "trial" / "events.jsonl").read_text().splitlines()]
    step = next(event for event in events if event["kind"] == "step")
    assert "reward/warmth/red" in step["metrics"]
    assert len(list((own / "dist").glob("*.whl"))) == len(list((own / "dist").glob("*.tar.gz"))) == 1
    tags = environment("git", "--git-dir", "remote.git", "tag", cwd=tmp_path).stdout
    assert tags == "v0.1.0\n"
    pushed = environment("git", "--git-dir", "remote.git", "ls-tree", "-r", "--name-only", "main", cwd=tmp_path).stdout
    assert "src/warmth_reward/reward.py" in pushed and "dist/" not in pushed and "runs/" not in pushed


def test_the_page_names_claims_that_exist_and_an_entry_that_the_registry_takes() -> None:
    named = re.findall(r'claim="([\w-]+)"|--claim ([\w-]+)', PAGE.read_text(encoding="utf-8"))
    assert {one or other for one, other in named} <= claim_kinds().keys()
    (part,) = read_registry(tomllib.loads(block("toml", holding="[reward]"))).parts
    assert (part.kind, part.name, part.dist) == ("reward", "warmth", "unirl-reward-warmth")
    assert part.home.startswith("https://") and part.by and len(part.summary) <= 100
