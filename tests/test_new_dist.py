"""A new dist of this repository: its folder, then one command, and every test across dists accepts it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]
PYPROJECT = """\
[project]
name = "unirl-reward-planted"
version = "0.1.0"
description = "A reward that is planted by a test"
requires-python = ">=3.11,<3.14"
license = "Apache-2.0"
license-files = ["LICENSE"]
dependencies = ["unirl-core>=0.1,<0.2"]

[project.entry-points."unirl.v1"]
planted = "unirl.rewards.planted.plugin"

[build-system]
requires = ["uv_build>=0.9,<0.14"]
build-backend = "uv_build"

[tool.uv.build-backend]
module-name = "unirl.rewards.planted"

[tool.uv.sources]
unirl-core = { workspace = true }
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of this checkout, links as links, with a new dist in its place."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name, follow_symlinks=False)
    package = tmp_path / "plugins/rewards/planted/src/unirl/rewards/planted"
    (package / "recipes/planted").mkdir(parents=True)
    for file in ("__init__.py", "py.typed"):
        (package / file).touch()
    (package / "plugin.py").write_text("from unirl.core.plugins.hookspec import hookimpl\n")
    (package / "recipes/planted/one.yaml").write_text("defaults: [/unirl]\n")
    (tmp_path / "plugins/rewards/planted/pyproject.toml").write_text(PYPROJECT)
    return tmp_path


def tool(tree: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("add_dist", tree / "tools" / "add_dist.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_missing_for_any_dist_of_this_checkout() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "add_dist.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_what_a_new_dist_lacks_is_listed_and_then_there(tree: Path) -> None:
    add_dist = tool(tree)
    missing = ["plugins/rewards/planted/LICENSE is missing", "recipes/planted is missing"]
    for check in (True, False):
        assert [*add_dist._licences(check), *add_dist._recipes(check)] == missing
    assert [*add_dist._licences(True), *add_dist._recipes(True)] == []
    assert (tree / "plugins/rewards/planted/LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (tree / "recipes/planted/one.yaml").is_file()
    assert add_dist._not_locked() == ["unirl-reward-planted"]


def test_a_part_gets_its_line_in_the_registry_where_the_alphabet_puts_it(tree: Path) -> None:
    add_dist = tool(tree)
    for name in ("planted", "prometheus", "aaa"):
        add_dist._register(
            "tracker", name, f'{name} = {{ dist = "unirl-tracker-{name}", summary = "Planted by a test." }}'
        )
    entries = tomllib.loads((tree / "registry/plugins.toml").read_text(encoding="utf-8"))["tracker"]
    assert list(entries) == sorted(entries) and "planned" not in entries["prometheus"]
    before = tomllib.loads((ROOT / "registry/plugins.toml").read_text(encoding="utf-8"))["tracker"]
    assert entries.keys() == {*before, "planted", "aaa"}


@pytest.mark.slow
def test_the_workspace_and_the_tests_across_dists_take_it_in_with_nothing_else_edited(
    tree: Path, run: Run, uv: str
) -> None:
    add_dist = tool(tree)
    add_dist._licences(False)
    listed = run(uv, "workspace", "list", cwd=tree).stdout
    assert "unirl-reward-planted" in listed
    run(uv, "build", "--package", "unirl-reward-planted", "--wheel", "--quiet", "--out-dir", tree / "wheels", cwd=tree)
    assert len(list((tree / "wheels").glob("unirl_reward_planted-*.whl"))) == 1
    done = run(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/test_arrows.py",
        "-k",
        "planted",
        "-p",
        "no:cacheprovider",
        cwd=tree,
    )
    assert " passed" in done.stdout
