"""Host side: starts an engine's program in its own environment, calls it, and guarantees that it ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.core.errors import ProcessLost, RunFailed

from .frames import UNCHANGED, BadFrame, read_frame, to_frame
from .source_files import source_files

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EngineDied", "EngineProcess", "EngineRaised", "EngineTimedOut", "Program"]

LOG_LINES = 8
"""Log lines shown in the error of a dead engine."""
DEATH_S = 1.0
"""Timeout for the guard of a dead server to report how it died."""
GRACE_S = 3.0
"""Grace period of a server told to stop, before it is killed."""
SERVING = "unirl.engine_host.serving"
"""Module that every server starts with."""
INHERITED = ("HF_HOME", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ", "USER", "XDG_CACHE_HOME")
INHERITED_PREFIXES = ("CUDA_", "FLASHINFER_", "GLOO_", "NCCL_", "NVIDIA_", "OMP_", "PYTORCH_", "SGLANG_", "SSL_")
INHERITED_PREFIXES += ("TORCHINDUCTOR_", "TRITON_", "VLLM_")
"""Environment variables a server inherits; no others, in particular not `PYTHONPATH`."""


class EngineDied(ProcessLost):
    """The engine's process ended unexpectedly."""


class EngineTimedOut(ProcessLost):
    """A call exceeded its timeout; the process was ended."""


class EngineRaised(RunFailed):
    """The engine rejected a call or raised in it, and is still running."""

    def __init__(self, message: str, *, raised: str, text: str, unchanged: bool) -> None:
        super().__init__(message)
        self.raised = raised
        """Class name of the exception raised there, for messages."""
        self.unchanged = unchanged
        """Whether the call was rejected before it changed anything, see `frames.Unchanged`."""
        self.text = text
        """Its message."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program to run."""

    name: str
    """The engine's name, for messages."""
    python: Path
    """Python interpreter of its environment."""
    serve: str
    """See `EngineEnvironment.serve`."""
    modules: tuple[str, ...] = ()
    """See `EngineEnvironment.modules`."""
    variables: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Environment variables besides the inherited ones."""
    log: Path | None = None
    """File to append its output to; None keeps it only while the process runs."""
    start_timeout_s: float = 600.0
    """Timeout from process start to its first answer."""


class EngineProcess:
    """A program in its own process group. Calls go over a private pair of Unix sockets.

    One call at a time, from any thread. The group ends on `close`, on an error that leaves its state unknown, and with
    the host, however that ends.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lifeline = -1
        self._folder: Path | None = None
        self._count = 0
        self._pid = 0
        self._why = f"engine {program.name!r}: its process was not started."

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the server; 0 when there is none."""
        return self._pid

    def start(self) -> None:
        """Start the process and wait for its first answer. Raises EngineDied or EngineTimedOut if there is none."""
        with self._lock:
            assert self._process is None, f"engine {self.program.name!r} was started twice"
            program = self.program
            self._folder = Path(tempfile.mkdtemp(prefix=f"unirl-{program.name}-"))
            _assemble(self._folder / "source", (SERVING, *program.modules))
            log = self._log()
            log.parent.mkdir(parents=True, exist_ok=True)
            ours, theirs = socket.socketpair()
            read_end, self._lifeline = os.pipe()
            script = self._folder / "source" / "unirl" / "engine_host" / "serving.py"
            passed = [str(theirs.fileno()), str(read_end), program.serve, str(self._folder)]
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [str(program.python), "-I", str(script), *passed],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_variables(program),
                    pass_fds=(theirs.fileno(), read_end),
                    start_new_session=True,
                )
            theirs.close()
            os.close(read_end)
            self._connection = ours
            ready, _ = self._wait("start", program.start_timeout_s)
            self._pid = int(ready["pid"])

    def restart(self) -> None:
        """Stop the process if it runs, and start it again."""
        with self._lock:
            self.close()
            self.start()

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        tensors: Mapping[str, Tensor] | None = None,
        timeout_s: float,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call a function of the server and wait for its answer: a JSON-able value, and tensors.

        Raises EngineRaised for an exception in the server; EngineDied, with the exit code and the end of the log,
        within a second of the process's death; EngineTimedOut, after which the process has been ended.
        """
        with self._lock:
            if self._process is None or self._connection is None:
                raise EngineDied(self._why)
            self._count += 1
            frame = to_frame({"id": self._count, "call": name, "arguments": arguments or {}}, tensors)
            try:
                # A server that does not read must not block the host for ever either.
                self._connection.settimeout(timeout_s)
                self._connection.sendall(frame)
            except TimeoutError:
                raise self._timed_out(name, timeout_s) from None
            except OSError:
                raise self._died(name) from None
            except BaseException:
                self._interrupted(name)
                raise
            answer, result = self._wait(name, timeout_s)
            if "raised" in answer:
                raised, text = str(answer["raised"]), str(answer["text"])
                message = f"engine {self.program.name!r} failed in {name!r}: {raised}: {text}"
                raise EngineRaised(message, raised=raised, text=text, unchanged=bool(answer[UNCHANGED]))
            return answer["value"], result

    def note(self, text: str) -> None:
        """Append a line to its log."""
        with self._log().open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")

    def close(self) -> None:
        """End the process and all its children, and wait for them. Idempotent and thread-safe; a pending call in
        another thread fails."""
        if not self._lock.acquire(timeout=GRACE_S):
            self._cut_lifeline()
            self._lock.acquire()
        try:
            self._end(grace_s=GRACE_S)
            self._why = f"engine {self.program.name!r}: it is closed."
        finally:
            self._lock.release()

    def _wait(self, name: str, timeout_s: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        assert self._connection is not None
        connection, deadline = self._connection, time.monotonic() + timeout_s

        def receive(size: int) -> bytes:
            parts, left = bytearray(), size
            while left:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                part = connection.recv(min(left, 1 << 20))
                if not part:
                    raise EOFError
                parts += part
                left -= len(part)
            return bytes(parts)

        try:
            return read_frame(receive)
        except TimeoutError:
            raise self._timed_out(name, timeout_s) from None
        except (EOFError, OSError):
            raise self._died(name) from None
        except BadFrame as error:
            self._end(grace_s=0)
            self._why = f"engine {self.program.name!r} sent an invalid answer to {name!r}: {error}"
            raise EngineDied(self._why) from error
        except BaseException:
            self._interrupted(name)
            raise

    def _interrupted(self, name: str) -> None:
        """Interrupted in the middle of a message, after which the stream is out of sync."""
        self._end(grace_s=0)
        self._why = f"engine {self.program.name!r}: it was ended because {name!r} was interrupted."

    def _timed_out(self, name: str, timeout_s: float) -> EngineTimedOut:
        tail = self._tail()
        self._end(grace_s=0)
        self._why = (
            f"engine {self.program.name!r}: {name!r} took longer than {timeout_s:g} s; its process was ended. Last "
            f"lines of its log{tail}"
        )
        return EngineTimedOut(self._why)

    def _died(self, name: str) -> EngineDied:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=DEATH_S)
        code, tail = self._process.poll(), self._tail()
        self._end(grace_s=0)
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        self._why = f"engine {self.program.name!r} died in {name!r} ({how}). Last lines of its log{tail}"
        return EngineDied(self._why)

    def _log(self) -> Path:
        assert self._folder is not None
        return self.program.log or self._folder / "log.txt"

    def _tail(self) -> str:
        """Path and last lines of the log."""
        log = self._log()
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
        return f"{f' {log}' if self.program.log else ''}:\n" + "\n".join(f"  {line}" for line in lines)

    def _end(self, *, grace_s: float) -> None:
        """End all its processes, whatever their state.

        Closing the connection asks the server to exit; closing the lifeline makes its guard kill everything. The guard
        exits last.
        """
        process, self._process, self._pid = self._process, None, 0
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if process is not None and grace_s:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace_s)
        self._cut_lifeline()
        if process is not None:
            process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _cut_lifeline(self) -> None:
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)


def _variables(program: Program) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    result = {**kept, **program.variables}
    # Kernels are compiled at run time with tools of the engine's environment, such as ninja.
    result["PATH"] = os.pathsep.join([str(program.python.parent), result.get("PATH") or os.defpath])
    return result


def _assemble(folder: Path, modules: tuple[str, ...]) -> None:
    """Copy the source of these modules, and of the UniRL modules that they import, to the server's import folder, where
    packages are plain folders."""
    for module, file in source_files(modules).items():
        target = folder.joinpath(*module.split(".")).with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
