"""Side effects and loaded packages of an import in a fresh interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from unirl.conformance.doubles.fresh_import import FreshImport, import_fresh
from unirl.core.plugins.loading import PluginRecord

HOOK = """
from unirl.core.plugins.hookspec import hookimpl


@hookimpl
def unirl_trackers():
    return []
"""


def imported(folder: Path, monkeypatch: pytest.MonkeyPatch, **codes: str) -> dict[str, FreshImport]:
    """Import modules with this code in front of a hook: name -> result."""
    monkeypatch.syspath_prepend(str(folder))
    for name, code in codes.items():
        (folder / f"fresh_{name}.py").write_text(f"{code}\n{HOOK}", encoding="utf-8")
    records = [
        PluginRecord(name=name, dist="planted", version="1", module=f"fresh_{name}", status="loaded") for name in codes
    ]
    return {name: result for (_, name), result in import_fresh(records).items()}


EFFECTS = {
    "environment": ("import os; os.environ.setdefault('PLANTED', '1')", "sets the environment variable PLANTED"),
    "file": ("open('planted.txt', 'w').close()", "writes the file planted.txt"),
    "mkdir": ("import os; os.mkdir('planted')", "makes the folder planted"),
    "process": ("import subprocess; subprocess.run(['true'])", "starts the process true"),
    "network": ("import socket; socket.socket().bind(('127.0.0.1', 0))", "opens a network port"),
    "print": ("print('hello')", "prints 'hello'"),
    "descriptor": ("import os; os.write(2, b'from below')", "prints 'from below'"),
    "logging": ("import logging; logging.basicConfig(level='DEBUG')", "sets up logging"),
    "handler": ("import logging; logging.getLogger('x').addHandler(logging.StreamHandler())", "sets up logging"),
    "warnings": ("import warnings; warnings.simplefilter('ignore')", "changes the filters of warnings"),
    "signal": ("import signal; signal.signal(signal.SIGTERM, lambda *a: None)", "handles signals"),
    "thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "threads",
    ),
    "path": ("import sys; sys.path.append('/planted')", "changes sys.path"),
    "chdir": ("import os; os.chdir('/')", "changes the working directory"),
    "patch": (
        "from unirl.core import names; names.did_you_mean = lambda *a: ''",
        "replaces something in unirl.core.names: .*did_you_mean",
    ),
    "patched_class": (
        "from unirl.core.plugins.catalog import Catalog; Catalog.names = None",
        "replaces something in unirl.core.*Catalog.*names",
    ),
    "hook_of_errors": ("import sys; sys.excepthook = lambda *a: None", "replaces sys.excepthook"),
}
HARMLESS = {
    "null_handler": "import logging; logging.getLogger('x').addHandler(logging.NullHandler())",
    "reads": "open(__file__).close()",
    "standard_library": "import asyncio, multiprocessing, tempfile, unittest, xml.dom, concurrent.futures",
}


def test_every_side_effect_is_named_and_reading_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = imported(tmp_path, monkeypatch, **{name: code for name, (code, _) in EFFECTS.items()}, **HARMLESS)
    assert {name: result[name].error for name in result if result[name].error} == {}
    assert {name: result[name].effects for name in HARMLESS if result[name].effects} == {}
    for name, (_, says) in EFFECTS.items():
        with pytest.raises(AssertionError, match=says):
            raise AssertionError("; ".join(result[name].effects))


def test_every_plugin_meets_a_clean_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = imported(tmp_path, monkeypatch, first="import sqlite3", ends="import os; os._exit(7)", second="")
    assert "sqlite3" in result["first"].loaded["importing fresh_first"]
    assert "sqlite3" not in result["second"].loaded["importing fresh_second"]
    assert result["second"].error == ""
    assert result["ends"].error == "the interpreter ended with 7"


def test_imports_of_commands_and_of_listing_parts_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fresh_command.py").write_text("import xmlrpc\ncommand = None\n", encoding="utf-8")
    info = tmp_path / "planted-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[unirl.commands]\ngreet = fresh_command:command\n", encoding="utf-8")
    (tmp_path / "fresh_settings.py").write_text("import sqlite3\n", encoding="utf-8")
    code = """
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import EngineSpec

@hookimpl
def unirl_engines():
    import decimal
    return [EngineSpec(name="x", summary="s", build="m:b", config="fresh_settings:Config")]
"""
    steps = imported(tmp_path, monkeypatch, listed=code)["listed"].loaded
    assert "decimal" in steps["calling its hooks that list parts"]
    assert "xmlrpc" in steps["importing its command 'greet'"]
    assert "sqlite3" in steps["importing fresh_settings"]
