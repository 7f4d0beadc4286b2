"""Importing plugins in a fresh interpreter, and what that brings along and leaves behind.

This file is also the program that does it: it starts as `python afresh.py`, reads a job from stdin, imports the core,
and forks once per plugin, so that every plugin meets the same clean interpreter and pays milliseconds for it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirl.core.plugins.loading import PluginRecord

__all__ = ["Imported", "Step", "import_afresh"]

KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")
"""All that the fresh interpreter inherits: what this process set on importing the plugins must not hide that again."""
TIMEOUT_S = 120.0
"""For all plugins together; importing a light one takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Step:
    what: str
    """What was done, such as "importing acme.plugin"."""
    imported: tuple[str, ...]
    """Top-level packages that came along and were not there before."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What importing a plugin did."""

    steps: tuple[Step, ...]
    effects: tuple[str, ...]
    """Visible side effects, each a phrase: "sets the environment variable X"."""
    error: str
    """Why it could not be imported this way; empty when it could."""


def import_afresh(plugins: Sequence[PluginRecord]) -> dict[tuple[str, str], Imported]:
    """(dist, plugin) -> what listing its parts, adding its commands and importing its config modules did."""
    job = {
        "path": sys.path,
        "plugins": [{"dist": p.dist, "name": p.name, "version": p.version, "module": p.module} for p in plugins],
    }
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: scratch for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
        kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        done = subprocess.run(
            # -B: byte code that Python writes would look like a file that the plugin writes.
            [sys.executable, "-B", __file__],
            input=json.dumps(job),
            env={**kept, **folders},
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, f"the fresh interpreter ended with {done.returncode}: {done.stderr}"
    return {
        (plugin.dist, plugin.name): Imported(
            steps=tuple(Step(what=step["what"], imported=tuple(step["imported"])) for step in result["steps"]),
            effects=tuple(result["effects"]),
            error=result["error"],
        )
        for plugin, result in zip(plugins, json.loads(done.stdout), strict=True)
    }


def main() -> None:
    """The program: a job on stdin, a list of findings on stdout."""
    startup = set(sys.modules)
    job = json.loads(sys.stdin.read())
    # Without this file's own folder, which the interpreter put first.
    sys.path[:] = job["path"]
    import_module("click")
    import_module("unirl.core.plugins.catalog")
    print(json.dumps([_in_a_fork(plugin, startup) for plugin in job["plugins"]]))


def _in_a_fork(plugin: dict[str, str], startup: set[str]) -> dict[str, Any]:
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as out:
            out.write(json.dumps(asdict(_import(plugin, startup))))
        # Not sys.exit: what the plugin registered with atexit is not this program's to run.
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    code = os.waitstatus_to_exitcode(status)
    return {"steps": [], "effects": [], "error": f"the interpreter that imported it ended with {code}"}


def _import(plugin: dict[str, str], startup: set[str]) -> Imported:
    from unirl.core.plugins.loading import describe_failure

    with tempfile.TemporaryFile() as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
        effects: list[str] = []
        steps: list[Step] = []
        error = ""
        before = _state()
        watch = _Watch(effects)
        known = startup
        try:
            for what, action in _actions(plugin):
                action()
                tops = {name.partition(".")[0] for name in set(sys.modules) - known}
                steps.append(Step(what=what, imported=tuple(sorted(tops))))
                known = set(sys.modules)
        except BaseException as raised:  # noqa: BLE001 - reported; a plugin that exits must not end the program
            error = describe_failure(raised)
        watch.on = False
        effects += _changes(before, _state())
        sys.stdout.flush()
        sys.stderr.flush()
        printed.seek(0)
        reply = printed.read().decode(errors="replace").strip()
        if reply:
            effects.append(f"prints {reply.splitlines()[0][:80]!r}")
    return Imported(steps=tuple(steps), effects=tuple(dict.fromkeys(effects)), error=error)


def _actions(plugin: dict[str, str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """What `unirl --help`, `unirl plugins` and composing a recipe do with a plugin."""
    from importlib.metadata import EntryPoint

    import click
    from unirl.core.plugins.hookspec import API_GROUP
    from unirl.core.plugins.loading import PluginRecord, register

    point = EntryPoint(plugin["name"], plugin["module"], API_GROUP)
    yield f"importing {point.value}", point.load
    blank = PluginRecord(
        name=point.name, dist=plugin["dist"], version=plugin["version"], module=point.value, status="loaded"
    )
    loaded = register(point.load(), blank)
    yield "calling its hooks that list parts", lambda: loaded
    if loaded.implements("unirl_commands"):
        yield "adding its commands", lambda: loaded.call("unirl_commands", cli=click.Group())
    for module in dict.fromkeys(spec.config.partition(":")[0] for spec in loaded.record.specs):
        yield f"importing {module}", lambda module=module: import_module(module)


WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EVENTS = {
    "os.mkdir": "makes the folder {0}",
    "os.rename": "renames {0}",
    "os.remove": "removes {0}",
    "os.rmdir": "removes {0}",
    "os.link": "links {0}",
    "os.symlink": "links {0}",
    "os.truncate": "truncates {0}",
    "os.putenv": "sets the environment variable {0}",
    "os.unsetenv": "removes the environment variable {0}",
    "os.system": "runs a command",
    "os.exec": "runs a command",
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
    "subprocess.Popen": "starts the process {0}",
    "socket.connect": "opens a network connection",
    "socket.bind": "opens a network port",
    "socket.getaddrinfo": "looks up a host name",
}
"""Events that Python's audit reports, and what to say of them."""


class _Watch:
    """Writes down what happens while it is on. An audit hook cannot be taken away, so it can be turned off."""

    def __init__(self, effects: list[str]) -> None:
        self.on = True
        self._effects = effects
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITES and path != os.devnull:
                self._effects.append(f"writes the file {_text(path)}")
        elif event in EVENTS:
            self._effects.append(EVENTS[event].format(*(_text(argument) for argument in arguments)))


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _state() -> dict[str, Any]:
    """What an import must leave as it is: what -> its value now."""
    result: dict[str, Any] = {
        "changes the working directory": Path.cwd(),
        "changes sys.path": list(sys.path),
        "changes the filters of warnings": list(warnings.filters),
        "replaces sys.excepthook": sys.excepthook,
        "replaces sys.stdout or sys.stderr": (sys.stdout, sys.stderr),
        "handles signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "starts threads": threading.active_count(),
        "sets up logging": (logging.root.level, logging.root.manager.disable, _log_handlers()),
    }
    for name, module in list(sys.modules.items()):
        if name == "unirl.core" or name.startswith("unirl.core."):
            for owner in (module, *(value for value in vars(module).values() if isinstance(value, type))):
                label = f"replaces something in {name}"
                result.setdefault(label, {}).update(
                    {(str(owner), k): v for k, v in vars(owner).items() if k[:2] != "__"}
                )
    return result


def _log_handlers() -> list[logging.Handler]:
    loggers = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    # A NullHandler is what libraries are told to add, and does nothing.
    return [handler for one in loggers for handler in one.handlers if not isinstance(handler, logging.NullHandler)]


def _changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for what, old in before.items():
        if isinstance(old, dict):
            new = after[what]
            names = [".".join(key) for key, value in old.items() if new.get(key) is not value]
            if names:
                yield f"{what}: {names[0]}"
        elif old != after[what]:
            yield what


if __name__ == "__main__":
    main()
