"""Files that `unirl new` writes, and its refusals. Whether they work when installed: test_new_installed.py."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement
from unirl.core.cli import main
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.plugins.registry import KnownPart, Registry
from unirl.core.specs.spec import RewardSpec
from unirl.new.kinds import KINDS, NewKind
from unirl.new.names import LONGEST, Names, check_names
from unirl.new.render import render, write

LONG = "the-longest-name-that-may-be-x"
"""As long as a name may be: lines that hold it are as long as they get."""
REWARD = RewardSpec(name="taste", summary="s", build="m:b", config="m:C", scale="s", media="image")
CATALOG = Catalog.of({"acme": SimpleNamespace(unirl_rewards=hookimpl(lambda: [REWARD]))})
REGISTRY = Registry(
    [
        KnownPart(kind="reward", name="clip", dist="unirl-reward-clip", summary="s", planned=True),
        KnownPart(kind="reward", name="ocr", dist="some-ocr", summary="s"),
    ]
)


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["new", *args])
    out = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out.out, out.err


def test_the_command_writes_a_plugin_and_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = str(tmp_path / "some folder")
    code, out, _ = run(
        "reward", "sharpness", "--into", into, "--author", "Ada Example <ada@example.org>", capsys=capsys
    )
    folder = tmp_path / "some folder" / "unirl-reward-sharpness"
    assert code == 0
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == {
        ".github/workflows/conformance.yml",
        ".gitignore",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        *(
            f"src/sharpness_reward/{name}"
            for name in ("__init__.py", "config.py", "plugin.py", "py.typed", "reward.py")
        ),
        "tests/test_conformance.py",
        "tests/test_reward.py",
    }
    for name in written:
        assert f"  {name}\n" in out
    for line in (f"cd '{folder}'", "unirl conformance --plugin unirl-reward-sharpness", "pytest"):
        assert f"  {line}\n" in out
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["authors"] == [{"name": "Ada Example", "email": "ada@example.org"}]
    assert list(tmp_path.rglob(".unirl-new-*")) == []


def test_the_command_leaves_setuptools_importable(tmp_path: Path) -> None:
    then_setuptools = "import sys; from unirl.core.cli import main\ntry: main(sys.argv[1:])\nfinally: import setuptools"
    command = (sys.executable, "-W", "ignore", "-c", then_setuptools, "new", "reward", "sharpness", "--into", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_that_is_there_is_refused_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "unirl-tracker-notes"
    folder.mkdir()
    (folder / "mine.txt").write_text("work of a week")
    code, _, err = run("tracker", "notes", "--into", str(tmp_path), capsys=capsys)
    assert code == 2 and "is there already, and nothing in it is overwritten" in err
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="cannot be written"):
        write({"a": "text"}, tmp_path / "file" / "plugin")
    with pytest.raises(RecipeError, match="cannot be written"):
        write({"a": "text", "a/b": "a is no folder"}, tmp_path / "plugin")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("name", "dist", "says"),
    [
        ("Sharpness", "", "did you mean 'sharpness'?"),
        ("FlowGRPO", "", "did you mean 'flow-grpo'?"),
        ("so_sharp", "", "did you mean 'so-sharp'?"),
        ("sharp--er", "", "did you mean 'sharp-er'?"),
        ("3d", "", "beginning with a letter"),
        ("../sharp", "", "lower case letters and digits"),
        ("", "", "lower case letters and digits"),
        (LONG + "x", "", f"at most {LONGEST} characters"),
        ("taste", "", "reward 'taste' is installed here, from acme 0"),
        ("clip", "", "reward 'clip' is planned as unirl-reward-clip in the registry"),
        ("ocr", "", "reward 'ocr' is that of some-ocr in the registry"),
        ("fine", "some-ocr", "there is a dist 'some-ocr' already"),
        ("fine", "pytest", "there is a dist 'pytest' already"),
        ("fine", "Acme_Fine", "expected its normalised form, 'acme-fine'"),
        ("fine", "../fine", "--dist: got '../fine'"),
    ],
)
def test_names_that_are_taken_or_cannot_be_are_refused(name: str, dist: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_names(Names.of("reward", name, dist=dist), catalog=CATALOG, registry=REGISTRY)
    assert says in str(caught.value)


def test_a_name_whose_package_would_hide_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sharp_reward.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RecipeError, match="package 'sharp_reward' can be imported here already"):
        check_names(Names.of("reward", "sharp"), catalog=CATALOG, registry=REGISTRY)


def test_a_name_of_another_kind_is_free() -> None:
    assert len(LONG) == LONGEST
    for name in ("taste", "clip", LONG):
        check_names(Names.of("tracker", name), catalog=CATALOG, registry=REGISTRY)


@pytest.mark.parametrize("author", ["<ada@example.org", "Ada <ada>", "a < b"])
def test_an_author_of_another_form_is_refused(author: str) -> None:
    with pytest.raises(RecipeError, match="--author"):
        render(Names.of("reward", "sharp"), author=author)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_whole(kind: NewKind) -> None:
    """No mark of a template is left, and every file that machines read can be read."""
    names = Names.of(kind, "some-part", dist="acme-some-part")
    written = render(names, author='A "quoted" name')
    for name, text in written.items():
        text = re.sub(r"\$\{\{ .*? \}\}|\$\{GITHUB_REF_NAME#v\}", "", text)
        assert not re.search(r"\{\{|\{%|\{#", text), name
        assert text == "" or (text.endswith("\n") and not text.endswith("\n\n")), name
    project = tomllib.loads(written["pyproject.toml"])
    assert project["project"]["name"] == "acme-some-part"
    assert project["project"]["authors"] == [{"name": 'A "quoted" name'}]
    assert project["project"]["entry-points"]["unirl.v1"] == {"some-part": f"some_part_{kind}.plugin"}
    required = {Requirement(line).name for line in project["project"]["dependencies"]}
    assert "unirl-core" in required and not required & {"unirl-conformance", "pytest"}
    steps = yaml.safe_load(written[".github/workflows/conformance.yml"])["jobs"]["conformance"]["steps"]
    assert any("unirl conformance --plugin acme-some-part" in step.get("run", "") for step in steps)
    assert "Apache License" in written["LICENSE"]
    assert len(written["README.md"]) > 1000


def test_requirements_follow_the_release_that_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for release, bound in (("0.4.2", ">=0.4,<0.5"), ("3.1.0", ">=3.1,<4")):
        monkeypatch.setattr("unirl.new.render.version", lambda dist, found=release: found)
        assert f'"unirl-core{bound}"' in render(Names.of("reward", "sharp"))["pyproject.toml"]


def test_every_template_is_used() -> None:
    folder = files("unirl.new").joinpath("templates")
    named = {"README.md", "plugin.py", "config.py"}
    for kind, shape in KINDS.items():
        result = {entry.name for entry in folder.joinpath(kind).iterdir()}
        expected = {*named, f"test_{kind}.py", *(f"{module}.py" for module in shape.modules)}
        assert result == {f"{name}.jinja" for name in expected}


@pytest.mark.parametrize("name", ["x", "some-part", LONG])
def test_what_is_written_is_formatted_and_linted_by_its_own_settings(tmp_path: Path, name: str) -> None:
    for kind in KINDS:
        names = Names.of(kind, name)
        write(render(names), tmp_path / names.dist)
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", tmp_path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_what_is_written_is_typed(tmp_path: Path) -> None:
    for kind in KINDS:
        names = Names.of(kind, "some-part")
        write(render(names), tmp_path / names.dist)
    roots = [{"root": str(folder), "extraPaths": [str(folder / "src")]} for folder in tmp_path.iterdir()]
    settings = {"executionEnvironments": roots, "typeCheckingMode": "standard", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--project", tmp_path, "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_names_are_told_apart_from_the_part_to_the_class() -> None:
    names = Names.of("algorithm", "flow-x2")
    assert dataclasses.asdict(names) == {"kind": "algorithm", "name": "flow-x2", "dist": "unirl-algo-flow-x2"}
    assert (names.package, names.class_name) == ("flow_x2_algorithm", "FlowX2")
