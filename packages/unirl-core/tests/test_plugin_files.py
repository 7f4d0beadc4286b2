"""Plugins that are single files, and how a command chooses which plugins it sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from interruptible import interruptible
from unirl.core.cli import main
from unirl.core.errors import PluginBroken, PluginNotFound, RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.files import file_version, plugin_files

GROUP = "nothing-is-installed.v1"
GOOD = '''
    """One tracker."""
    from unirl.core.specs.part_config import PartConfig
    from unirl.core.plugins.hookspec import hookimpl
    from unirl.core.specs.spec import TrackerSpec
    from dataclasses import dataclass

    @dataclass
    class Config(PartConfig):
        level: int = 1

    def build(config):
        return config.level

    @hookimpl
    def unirl_trackers():
        return [TrackerSpec(name="{name}", summary="s", build=f"{{__name__}}:build", config=f"{{__name__}}:Config")]
'''
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """`write(name, code)` writes a plugin file; what it imports is forgotten afterwards."""
    before = set(sys.modules)

    def write(name: str, code: str) -> Path:
        file = tmp_path / f"{name}.py"
        file.write_text(dedent(code))
        return file

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def discovered(folder: Path) -> Catalog:
    return Catalog.discover(group=GROUP, files=plugin_files(folder))


def test_a_file_provides_its_parts_under_its_path_and_content(write: Write, tmp_path: Path) -> None:
    file = write("planted_notes", GOOD.format(name="notes"))
    catalog = discovered(tmp_path)
    result = catalog.get("tracker", "notes")
    assert (result.dist, result.version) == (str(file), file_version(file))
    assert [(record.name, record.status) for record in catalog.records] == [("planted_notes", "loaded")]
    assert catalog.resolve(result.spec.build)(catalog.resolve(result.spec.config)(level=3)) == 3


BROKEN = {
    "raises": ("raise RuntimeError('no licence')", "raised RuntimeError: no licence .*planted_bad.py:1"),
    "interrupts": ("raise KeyboardInterrupt('me')", "raised KeyboardInterrupt: me .*planted_bad.py:1"),
    "exits": ("exit(0)", "raised SystemExit: 0"),
    "lacks": ("import a_module_that_is_not_there", "needs 'a_module_that_is_not_there', which is not installed"),
    "syntax": ("def (", "SyntaxError"),
    "no hook": ("x = 1", "it implements no hook of unirl.v1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_does_not_hide_the_others(write: Write, tmp_path: Path, case: str) -> None:
    code, says = BROKEN[case]
    write("planted_good", GOOD.format(name="notes"))
    write("planted_bad", code)
    catalog = discovered(tmp_path)
    assert catalog.names("tracker") == ["notes"]
    with pytest.raises(PluginBroken, match=f"^tracker 'planted_bad': plugin 'planted_bad' .* is broken: .*{says}"):
        catalog.get("tracker", "planted_bad")
    assert "planted_bad" not in sys.modules or case == "no hook"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("json", "a module 'json' already exists .* rename the file"),
        ("antigravity", "a module 'antigravity' already exists"),
        ("my-notes", "'my-notes' is not a Python identifier; rename it, with underscores for dashes"),
    ],
)
def test_a_name_that_cannot_be_a_module_of_its_own_is_refused(
    write: Write, tmp_path: Path, name: str, says: str
) -> None:
    write(name, GOOD.format(name="notes"))
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(discovered(tmp_path).records[0].error)
    assert json.loads("1") == 1 and "antigravity" not in sys.modules


def test_a_file_may_be_left_out_by_its_name(write: Write, tmp_path: Path) -> None:
    write("planted_heavy", "raise RuntimeError")
    catalog = Catalog.discover(group=GROUP, files=plugin_files(tmp_path), disabled=["planted_heavy"])
    assert [record.status for record in catalog.records] == ["disabled"]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--plugins-dir: got .*gone', expected a folder"):
        plugin_files(tmp_path / "gone")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(args)
    out = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out.out + out.err


@pytest.mark.parametrize("how", ["option", "variable"])
def test_commands_see_the_files_of_a_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    write("planted_notes", GOOD.format(name="notes"))
    monkeypatch.chdir(tmp_path.parent)
    if how == "variable":
        monkeypatch.setenv("UNIRL_PLUGINS_DIR", str(tmp_path))
    options = ["--plugins-dir", tmp_path.name] if how == "option" else []
    code, out = run(capsys, "plugins", "--json", "--kind", "tracker", *options)
    assert code == 0, out
    assert {"notes"} <= {part["name"] for part in json.loads(out)["parts"]}
    assert ("UNIRL_PLUGINS_DIR" in os.environ) == (how == "variable"), "an option is for its own command alone"


def test_unirl_disable_leaves_plugins_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("UNIRL_DISABLE", "rules, wandb")
    code, out = run(capsys, "plugins", "--json")
    status = {record["name"]: record["status"] for record in json.loads(out)["plugins"]}
    assert code == 0 and (status["rules"], status["wandb"], status["sd3"]) == ("disabled", "disabled", "loaded")
    monkeypatch.setenv("UNIRL_DISABLE", "ruls")
    code, out = run(capsys, "plugins")
    assert code == PluginNotFound.exit_code and "did you mean 'rules'" in out


def test_a_search_finds_known_parts_by_all_words_and_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNIRL_DISABLE", "wandb")
    found = {}
    for words in (["Biases", "weights"], ["tracker"], ["wandb", "no such word"]):
        code, out = run(capsys, "plugins", "search", *words, "--json")
        assert code == 0
        found[words[0]] = {part["name"]: part["get"] for part in json.loads(out)["parts"]}
    assert found["Biases"] == {"wandb": "install it: `pip install unirl-tracker-wandb`"} and found["wandb"] == {}
    assert found["tracker"]["report"] == "installed"
    code, out = run(capsys, "plugins", "search", "--kind", "transport")
    assert code == 0 and "transfer-queue" in out and "wandb" not in out
    code, out = run(capsys, "plugins", "search", "no such word")
    assert code == 0 and "`unirl new`" in out


def test_two_plugins_with_one_part_are_named_with_what_to_do(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("planted_one", GOOD.format(name="notes"))
    write("planted_two", GOOD.format(name="notes"))
    code, out = run(capsys, "plugins", "--kind", "tracker", "--plugins-dir", str(tmp_path))
    assert code == 1
    assert f"tracker 'notes' is also provided by {tmp_path / 'planted_two.py'}" in out
    assert "disable its plugin with UNIRL_DISABLE=NAME" in out


def test_ctrl_c_while_a_plugin_is_imported_stops_the_command(write: Write, tmp_path: Path) -> None:
    write("planted_slow", "import time\nprint('importing', flush=True)\ntime.sleep(60)")
    command = interruptible("plugins", "--plugins-dir", tmp_path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    assert (process.returncode, out, error.strip()) == (130, "", "stopped")
