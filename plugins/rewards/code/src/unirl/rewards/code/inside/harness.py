"""Runs the tests of one sample: three kinds of process, of which only the last executes the code.

The grader has the tests and the pipe to the outside. Before it reads the tests it forks the starter, which forks one
runner per test. A runner therefore has neither the tests, nor the expected outputs, nor the pipe of the results in its
memory or among its files, and it may not read the grader's memory.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from . import jail
from .compare import same_output, same_value
from .remote import BrokenTalk, Expired, Module, Peer, read_exactly, recv_frame, send_frame

__all__ = ["main"]

RESULTS = 3
Outcome = str
"""`passed`, `wrong`, `error` or `timeout`."""


def main(options: dict[str, Any]) -> None:
    """Enter the sandbox, say that it is ready, read the job from fd 0, write outcomes to what is fd 1 at the start."""
    # What the tests print goes nowhere.
    os.dup2(1, RESULTS)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)
    sys.set_int_max_str_digits(100_000)
    folder = options["folder"]
    if options["enters"]:
        jail.enter(folder, packages=options["packages"], disk_bytes=options["disk_bytes"])
        folder = "/sandbox"
    elif not Path(folder).is_dir():
        folder = tempfile.mkdtemp()
    os.chdir(folder)
    jail.limit(core=0, fsize=options["disk_bytes"], nofile=options["files"])
    jail.drop_privileges()
    jail.hide_memory()
    ours, theirs = socket.socketpair()
    if not os.fork():
        ours.close()
        for fd in (0, RESULTS):
            os.close(fd)
        os.open(os.devnull, os.O_RDWR)
        _start_runners(theirs, options, folder)
    theirs.close()
    send_frame(RESULTS, {"ready": True, "route": jail.has_route()})
    job = recv_frame(0)
    for test in job["tests"]:
        outcome, reason = _graded(test, job, options, ours)
        send_frame(RESULTS, {"nonce": job["nonce"], "outcome": outcome, "reason": reason[:500]})
        if outcome != "passed" and options["stops"]:
            break
    os._exit(0)


def _start_runners(link: socket.socket, options: dict[str, Any], folder: str) -> NoReturn:
    """The starter: forks a runner for each request, and keeps an ended one until the grader has killed its group."""
    sys.path += options["packages"]
    os.environ.clear()
    os.environ.update(HOME=folder, TMPDIR=folder, LANG="C.UTF-8", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    while True:
        mark, fds, _, _ = socket.recv_fds(link, 1, 3)
        if not mark:
            os._exit(0)
        if not (pid := os.fork()):
            link.close()
            _run(mark, fds, options)
        for fd in fds:
            os.close(fd)
        send_frame(link.fileno(), pid)
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        send_frame(link.fileno(), -result.si_status if result.si_code != os.CLD_EXITED else result.si_status)
        read_exactly(link.fileno(), 1)
        os.waitpid(pid, 0)


def _run(mark: bytes, fds: list[int], options: dict[str, Any]) -> NoReturn:
    """The runner: the code as a program (mark `p`) or as a module whose objects are called. Reads the code itself."""
    os.setsid()
    os.dup2(0, 2)
    talk, stdin, stdout = fds
    source = recv_frame(talk)
    if mark == b"p":
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
    os.closerange(3, talk)
    os.closerange(talk + 1, options["files"])
    cpu_s, memory, processes = options["cpu_s"], options["memory_bytes"], options["processes"]
    jail.limit(cpu=cpu_s, **{"as": memory}, nproc=processes, fsize=options["disk_bytes"])
    status = 1
    try:
        module = type(sys)("__main__" if mark == b"p" else "solution")
        sys.modules[module.__name__] = module
        if mark == b"p":
            os.close(talk)
            sys.stdin = io.TextIOWrapper(io.FileIO(0), encoding="utf-8")
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), encoding="utf-8", write_through=False)
            exec(compile(source, "solution.py", "exec"), module.__dict__)
        else:
            peer = Peer(socket.socket(fileno=talk), is_open=True)
            peer.serve(_handlers(source, module.__dict__))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except MemoryError:
        status = 3
    except BrokenTalk:
        status = 0
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(status & 0xFF)


def _handlers(source: str, names: dict[str, Any]) -> dict[str, Any]:
    def load() -> dict[str, Any]:
        try:
            exec(compile(source, "solution.py", "exec"), names)
        except SystemExit as error:
            raise RuntimeError("the code exits") from error
        return {name: value for name, value in names.items() if not name.startswith("__")}

    def call(name: str, arguments: list[Any]) -> Any:
        load()
        if name not in names and "Solution" in names:
            return getattr(names["Solution"](), name)(*arguments)
        return names[name](*arguments)

    return {"load": load, "entry": call}


def _graded(
    test: dict[str, Any], job: dict[str, Any], options: dict[str, Any], starter: socket.socket
) -> tuple[Outcome, str]:
    until = time.monotonic() + options["wall_s"]
    is_program = "output" in test
    ours, theirs = socket.socketpair()
    stdin, stdin_end = os.pipe()
    stdout_end, stdout = os.pipe()
    socket.send_fds(starter, [b"p" if is_program else b"m"], [theirs.fileno(), stdin, stdout])
    theirs.close()
    os.close(stdin)
    os.close(stdout)
    pid = recv_frame(starter.fileno())
    outcome, reason, status = "timeout", "wall-clock time", None
    try:
        send_frame(ours.fileno(), job["code"], until=until)
        if is_program:
            output, status = _conversation(test["input"], stdin_end, stdout_end, starter, options, until)
            is_right = same_output(output, test["output"], tolerance=options["tolerance"])
            outcome, reason = ("passed" if is_right else "wrong") if status == 0 else "error", f"exit status {status}"
        else:
            _checked(test, job, Peer(ours, is_open=False, until=until, most=options["output_bytes"]), options)
            outcome, reason = "passed", ""
    except Expired:
        pass
    except BrokenTalk as error:
        # It has ended, or it sends invalid messages and is still running.
        ended, _, _ = select.select([starter], [], [], 1.0)
        status = recv_frame(starter.fileno()) if ended else None
        outcome, reason = "error", f"{error} (exit status {status})"
    except AssertionError as error:
        outcome, reason = "wrong", str(error)
    except BaseException as error:  # noqa: BLE001 - it is the outcome of the test
        outcome, reason = "error", traceback.format_exception_only(error)[-1].strip()
    finally:
        for end in (stdin_end, stdout_end):
            os.close(end)
        ours.close()
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        # None but the kernel kills a runner that has ended by itself.
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            outcome, reason = "timeout", "CPU time"
        if status is None:
            recv_frame(starter.fileno())
        starter.send(b".")
    return outcome, reason


def _conversation(
    text: str, stdin: int, stdout: int, starter: socket.socket, options: dict[str, Any], until: float
) -> tuple[str, int]:
    """Feed a program, collect its output until it ends; its exit status, negative for a signal."""
    os.set_blocking(stdin, False)
    os.set_blocking(stdout, False)
    rest, output, poll = memoryview(text.encode("utf-8", "surrogatepass")), bytearray(), select.poll()
    poll.register(stdin, select.POLLOUT)
    poll.register(stdout, select.POLLIN)
    poll.register(starter.fileno(), select.POLLIN)
    status = None
    while status is None:
        ready = dict(poll.poll(max(0.0, until - time.monotonic()) * 1000))
        if not ready:
            raise Expired
        if stdin in ready:
            with contextlib.suppress(BrokenPipeError):
                rest = rest[os.write(stdin, rest) :] if rest and not ready[stdin] & select.POLLERR else rest[:0]
            if not rest or ready[stdin] & select.POLLERR:
                poll.unregister(stdin)
                # End of input: `stdin` stays a file of this process, so that nothing else gets its number.
                os.dup2(2, stdin)
        if starter.fileno() in ready:
            status = recv_frame(starter.fileno())
        while stdout in ready or status is not None:
            try:
                piece = os.read(stdout, 1 << 16)
            except BlockingIOError:
                break
            if not piece:
                if status is None:
                    poll.unregister(stdout)
                break
            output += piece
            if len(output) > options["output_bytes"]:
                raise ValueError(f"more than {options['output_bytes']} bytes of output")
    return output.decode("utf-8", "replace"), status


def _checked(test: dict[str, Any], job: dict[str, Any], peer: Peer, options: dict[str, Any]) -> None:
    """Raises AssertionError for a wrong result, and whatever the code or the tests raise."""
    if "arguments" in test:
        result = peer.request("entry", job["entry"], test["arguments"])
        # Published sets wrap some results in a list of one.
        expected = test["results"]
        if not any(same_value(result, one, tolerance=options["tolerance"]) for one in expected):
            raise AssertionError(f"got {str(result)[:200]}, expected {str(expected[0])[:200]}")
        return
    names: dict[str, Any] = {"__name__": "tests"}
    for name, value in peer.request("load").items():
        # A built-in function that the code redefines stays Python's own where the tests use it.
        if isinstance(value, Module):
            if value.partition(".")[0] in sys.stdlib_module_names:
                names[name] = importlib.import_module(value)
        elif name == job["entry"] or not hasattr(builtins, name):
            names[name] = value
    exec(compile(f"{job['setup']}\n{test['program']}", "tests.py", "exec"), names)
    if test["has_check"]:
        names["check"](names[job["entry"]])
