"""Imports of plugins in a fresh interpreter: what they load and change.

This file is also the program that imports them. It imports the core and forks once for each plugin, so that every
plugin meets the same clean interpreter and pays milliseconds for it.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirl.core.plugins.loading import PluginRecord

__all__ = ["FreshImport", "import_fresh"]

KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")
"""All that the fresh interpreter inherits, so that variables that plugins have set in this process do not hide that
they set them."""
TIMEOUT_S = 120.0
"""For all plugins together; importing a light one takes milliseconds."""
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
"""Python's audit events that count as side effects, and how each is described."""


@dataclass(frozen=True, kw_only=True)
class FreshImport:
    """Packages that importing a plugin loaded, and its side effects."""

    loaded: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Step, such as "importing acme.plugin" -> top-level packages that it loaded."""
    effects: list[str] = field(default_factory=list[str])
    """Side effects, each a phrase: "sets the environment variable X"."""
    error: str = ""
    """Why the import failed; empty if it did not."""


def import_fresh(plugins: Sequence[PluginRecord]) -> dict[tuple[str, str], FreshImport]:
    """(dist, plugin) -> the effects of listing its parts, importing its commands and importing its config modules."""
    job = [sys.path, [[plugin.name, plugin.dist, plugin.version, plugin.module] for plugin in plugins]]
    with tempfile.TemporaryDirectory() as scratch:
        kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        done = subprocess.run(
            # -B: byte code that Python writes would look like a file that the plugin writes.
            [sys.executable, "-B", __file__],
            input=json.dumps(job),
            env={**kept, **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), scratch)},
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, f"the fresh interpreter ended with {done.returncode}: {done.stderr}"
    results = [FreshImport(**result) for result in json.loads(done.stdout)]
    return {(plugin.dist, plugin.name): result for plugin, result in zip(plugins, results, strict=True)}


def main() -> None:
    """The program: reads a job from stdin and prints a list of results."""
    sys.path[:], plugins = json.load(sys.stdin)
    import_module("click")
    import_module("unirl.core.plugins.catalog")
    print(json.dumps([asdict(_in_fork(*plugin)) for plugin in plugins]))


def _in_fork(*plugin: str) -> FreshImport:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(write, "w") as reply:
            json.dump(asdict(_import(*plugin)), reply)
        # Not sys.exit: functions that the plugin registered with atexit are not to run.
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as reply:
        text = reply.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return FreshImport(**json.loads(text)) if text else FreshImport(error=f"the interpreter ended with {code}")


def _import(*plugin: str) -> FreshImport:
    from unirl.core.plugins.loading import describe_failure

    loaded: dict[str, list[str]] = {}
    effects: list[str] = []
    error = ""
    is_watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if not is_watching:
            return
        words = [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in arguments]
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES and words[0] != os.devnull:
            effects.append(f"writes the file {words[0]}")
        elif event in EVENTS:
            effects.append(EVENTS[event].format(*words))

    with tempfile.TemporaryFile() as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
        before, known = _state(), set(sys.modules)
        sys.addaudithook(watch)
        try:
            for step in _steps(*plugin):
                loaded[step] = sorted({name.partition(".")[0] for name in set(sys.modules) - known})
                known = set(sys.modules)
        except BaseException as raised:  # noqa: BLE001 - reported; a plugin that exits must not end the program
            error = describe_failure(raised)
        # An audit hook cannot be removed.
        is_watching = False
        after = _state()
        effects += [effect for effect, value in before.items() if after.get(effect) != value]
        sys.stdout.flush()
        sys.stderr.flush()
        printed.seek(0)
        if lines := printed.read().decode(errors="replace").strip().splitlines():
            effects.append(f"prints {lines[0][:80]!r}")
    return FreshImport(loaded=loaded, effects=list(dict.fromkeys(effects)), error=error)


def _steps(name: str, dist: str, version: str, module: str) -> Iterator[str]:
    """Do what `unirl --help`, `unirl plugins` and composing a recipe do with a plugin. Yields the name of each step
    that is done."""
    from unirl.core.plugins.entry_points import COMMANDS_GROUP, entry_points
    from unirl.core.plugins.hookspec import API_GROUP
    from unirl.core.plugins.loading import PluginRecord, register

    target = EntryPoint(name, module, API_GROUP).load()
    yield f"importing {module}"
    plugin = register(target, PluginRecord(name=name, dist=dist, version=version, module=module, status="loaded"))
    yield "calling its hooks that list parts"
    for command in entry_points(COMMANDS_GROUP):
        if command.dist == dist:
            command.load()
            yield f"importing its command {command.name!r}"
    for config in dict.fromkeys(spec.config.partition(":")[0] for spec in plugin.record.specs):
        import_module(config)
        yield f"importing {config}"


def _state() -> Mapping[str, object]:
    """State of the process that an import must not change, by how a change is described."""
    loggers = [logging.root, *(item for item in logging.root.manager.loggerDict.values() if hasattr(item, "handlers"))]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    result: dict[str, object] = {
        "changes the working directory": Path.cwd(),
        "changes sys.path": list(sys.path),
        "changes the filters of warnings": list(warnings.filters),
        "replaces sys.excepthook": sys.excepthook,
        "replaces sys.stdout or sys.stderr": (sys.stdout, sys.stderr),
        "handles signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "starts threads": threading.active_count(),
        "sets up logging": (
            logging.root.level,
            logging.root.manager.disable,
            # A NullHandler is what libraries are told to add, and does nothing.
            [handler for handler in handlers if not isinstance(handler, logging.NullHandler)],
        ),
    }
    for name, module in list(sys.modules.items()):
        if name == "unirl.core" or name.startswith("unirl.core."):
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            for owner, scope in ((name, module), *((f"{name}, {cls.__qualname__}", cls) for cls in classes)):
                public = {key: value for key, value in vars(scope).items() if not key.startswith("__")}
                result |= {f"replaces something in {owner}: {key}": id(value) for key, value in public.items()}
    return result


if __name__ == "__main__":
    main()
