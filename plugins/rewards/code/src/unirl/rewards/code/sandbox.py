"""Starts a sandbox for each sample and collects the outcomes of its tests."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import secrets
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

from unirl.core.errors import RewardFailed

from .config import UnitTestsConfig
from .inside.remote import BrokenTalk, Expired, recv_frame, send_frame

__all__ = ["Report", "Sandbox"]

_NAME = "reward.unit-tests"
START_S = 60.0
"""Wall time to start an interpreter or a container on a busy machine."""
GRACE_S = 15.0
"""Wall time beyond that of a test in which the sandbox ends it and says so, even on a busy machine."""
LARGEST_REPLY = 1 << 16
OUTCOMES = ("passed", "wrong", "error", "timeout")
MODULES = ("jail", "seccomp", "remote", "compare", "harness")
"""In the order in which they import each other."""
BOOT = """
import json, os, sys, types
def read(count):
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            sys.exit("the input ended")
        data += piece
    return data
given = json.loads(read(int.from_bytes(read(4), "big")))
package = sys.modules["inside"] = types.ModuleType("inside")
package.__path__ = []
for name, source in given["modules"]:
    module = sys.modules["inside." + name] = types.ModuleType("inside." + name)
    module.__package__ = "inside"
    setattr(package, name, module)
    exec(compile(source, name + ".py", "exec"), module.__dict__)
module.main(given["options"])
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    outcomes: tuple[str, ...]
    """`passed`, `wrong`, `error` or `timeout`, one for each test, in order; with `score=all` those up to the first that
    did not pass."""
    is_broken: bool = False
    """Whether the sandbox ended before its last test: its remaining tests count as errors."""


class Sandbox:
    """Thread-safe. Every sample gets its own process."""

    def __init__(self, config: UnitTestsConfig) -> None:
        self._config = config
        files = importlib.resources.files("unirl.rewards.code.inside")
        self._modules = [(name, files.joinpath(f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def run(self, *, code: str, setup: str, entry: str, tests: list[dict[str, Any]]) -> Report:
        """Raises RewardFailed when no sandbox can be started, or a network could be reached from it."""
        config, nonce = self._config, secrets.token_hex(16)
        job = {"nonce": nonce, "code": f"{setup}\n{code}", "setup": setup, "entry": entry, "tests": tests}
        outcomes: list[str] = []
        with (
            tempfile.TemporaryDirectory(prefix="unirl-tests-", ignore_cleanup_errors=True) as folder,
            self._started(folder) as process,
        ):
            stdin, stdout = _pipes(process)
            until = time.monotonic() + config.sample_wall_s
            try:
                send_frame(stdin, job, until=until)
                while len(outcomes) < len(tests):
                    last = min(until, time.monotonic() + config.wall_s + GRACE_S)
                    reply = recv_frame(stdout, until=last, most=LARGEST_REPLY)
                    if reply not in [{"nonce": nonce, "outcome": outcome} for outcome in OUTCOMES]:
                        raise BrokenTalk("another reply")
                    outcomes.append(reply["outcome"])
                    if config.score == "all" and outcomes[-1] != "passed":
                        break
            except Expired:
                return Report(outcomes=(*outcomes, *["timeout"] * (len(tests) - len(outcomes))))
            except (OSError, EOFError, ValueError, BrokenTalk):
                if self._is_closed:
                    raise _closed() from None
                return Report(outcomes=(*outcomes, *["error"] * (len(tests) - len(outcomes))), is_broken=True)
        return Report(outcomes=tuple(outcomes))

    def close(self) -> None:
        """Kill all sandboxes. May be called twice; runs in progress raise."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                _kill(process)

    @contextlib.contextmanager
    def _started(self, folder: str) -> Any:
        """A process that is ready for its job; killed at the end, with all that it started."""
        config = self._config
        start = config.command if config.isolation == "command" else [os.path.realpath(sys.executable)]
        with self._lock:
            if self._is_closed:
                raise _closed()
            try:
                # Not -I, which ignores PYTHONHASHSEED: the order of a set of strings would change from run to run.
                process = subprocess.Popen(
                    [*start, "-S", "-s", "-P", "-B", "-c", BOOT],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    cwd=folder,
                    env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": os.defpath},
                    start_new_session=True,
                )
            except OSError as error:
                raise RewardFailed(f"{_NAME}: {start[0]!r} could not be started: {error}.") from error
            self._running.add(process)
        try:
            self._ready(process, folder)
            yield process
        finally:
            _kill(process)
            process.wait()
            with self._lock:
                self._running.discard(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()

    def _ready(self, process: subprocess.Popen[bytes], folder: str) -> None:
        stdin, stdout = _pipes(process)
        until = time.monotonic() + START_S
        try:
            send_frame(stdin, {"modules": self._modules, "options": self._options(folder)}, until=until)
            ready = recv_frame(stdout, until=until, most=LARGEST_REPLY)
        except (OSError, EOFError, ValueError, BrokenTalk, Expired) as error:
            if self._is_closed:
                raise _closed() from error
            _kill(process)
            assert process.stderr is not None
            lines = process.stderr.read().decode("utf-8", "replace").strip().splitlines()
            raise RewardFailed(
                f"{_NAME}.isolation: a sandbox with isolation={self._config.isolation} could not be started: "
                f"{lines[-1] if lines else f'no reply within {START_S:g} s'}. Where user namespaces are not "
                "allowed, as in most containers, use isolation=command; the README of unirl-reward-code has commands."
            ) from error
        if ready["route"] and self._config.network == "isolated":
            raise RewardFailed(
                f"{_NAME}.network: the code could reach a network with isolation={self._config.isolation}, expected "
                "none. Change `command` (docker run --network none, bwrap --unshare-net), or accept it with "
                "network=unisolated."
            )

    def _options(self, folder: str) -> dict[str, Any]:
        config = self._config
        return {
            "enters": config.isolation == "namespaces",
            "folder": folder,
            "packages": site.getsitepackages() if config.packages else [],
            "cpu_s": config.cpu_s,
            "wall_s": config.wall_s,
            "memory_bytes": config.memory_mb << 20,
            "disk_bytes": config.disk_mb << 20,
            "output_bytes": config.output_kb << 10,
            "processes": config.processes,
            "files": config.files,
            "tolerance": config.tolerance,
            "stops": config.score == "all",
        }


def _pipes(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin.fileno(), process.stdout.fileno()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _closed() -> RewardFailed:
    return RewardFailed(f"{_NAME}: got a call of score() after close(); build the reward again.")
