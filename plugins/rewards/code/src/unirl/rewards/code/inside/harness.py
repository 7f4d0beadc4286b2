"""Runs the tests of one sample: four kinds of process, of which only the last executes the code.

The supervisor has the tests and the pipe to the outside. Before it reads the tests it forks the starter, which forks
one runner per test. A runner therefore has neither the tests, nor the expected outputs, nor the pipe of the results in
its memory or among its files, and it may not read the memory of the others.

For each test, the supervisor also forks a judge. It reads what the runner sends, which may be anything, executes the
test and compares. Judge and runner are killed when the time of the test is over, whatever either of them is doing.
"""

from __future__ import annotations

import ast
import builtins
import collections
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
from pathlib import Path
from typing import Any, NoReturn

from . import jail, seccomp
from .compare import same_output, same_value
from .remote import BrokenTalk, Expired, Peer, read_exactly, recv_frame, send_frame

__all__ = ["main"]

RESULTS = 3
KILL_S = 5.0
"""Wall time in which a process that was killed has ended."""
OURS = 3
"""Supervisor, starter and judge, which the kernel counts with the threads of the runner."""
VERDICTS = {b"p": "passed", b"w": "wrong", b"e": "error", b"b": "error"}
"""By the byte that a judge writes. Broken, `b`, is an error after which the runner may have ended."""


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
    seccomp.forbid_hidden_memory()
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
        outcome = _outcome(test, job, options, ours)
        send_frame(RESULTS, {"nonce": job["nonce"], "outcome": outcome})
        if outcome != "passed" and options["stops"]:
            break
    os._exit(0)


def _start_runners(link: socket.socket, options: dict[str, Any], folder: str) -> NoReturn:
    """The starter: forks a runner for each request, and keeps an ended one until the supervisor is done with it."""
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
    os.dup2(0, 2)
    talk, stdin, stdout = fds
    source = recv_frame(talk)
    if mark == b"p":
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
    os.closerange(3, talk)
    os.closerange(talk + 1, options["files"])
    jail.limit(cpu=options["cpu_s"], nproc=options["processes"] + OURS, **{"as": options["memory_bytes"]})
    seccomp.forbid_processes()
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


def _outcome(test: dict[str, Any], job: dict[str, Any], options: dict[str, Any], starter: socket.socket) -> str:
    """Outcome of one test: `passed`, `wrong`, `error` or `timeout`, at most `KILL_S` after its time is over.

    Raises Expired or EOFError when the starter does not reply, which only happens where the code could reach it.
    """
    until = time.monotonic() + options["wall_s"]
    is_program = "output" in test
    ours, theirs = socket.socketpair()
    stdin, stdin_end = os.pipe()
    stdout_end, stdout = os.pipe()
    verdict, verdict_end = os.pipe()
    socket.send_fds(starter, [b"p" if is_program else b"m"], [theirs.fileno(), stdin, stdout])
    theirs.close()
    os.close(stdin)
    os.close(stdout)
    runner = recv_frame(starter.fileno(), until=until)
    if not (judge := os.fork()):
        starter.close()
        for fd in (0, RESULTS, verdict):
            os.close(fd)
        _judge(test, job, options, ours, stdin_end, stdout_end, verdict_end)
    ours.close()
    for fd in (stdin_end, stdout_end, verdict_end):
        os.close(fd)
    outcome, status = "timeout", None
    try:
        letter = read_exactly(verdict, 1, until=until)
        outcome = VERDICTS[letter]
        if letter == b"b" or (is_program and letter != b"e"):
            # A program also ends, with status 0. A runner that broke off ends at once, or is still running.
            last = until if letter != b"b" else min(until, time.monotonic() + 1)
            status = recv_frame(starter.fileno(), until=last)
    except EOFError:
        # The judge: memory, as a rule.
        outcome = "error"
    except Expired:
        outcome = "error" if outcome == "error" else "timeout"
    os.close(verdict)
    for pid in (judge, runner):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.waitpid(judge, 0)
    if status is None:
        recv_frame(starter.fileno(), until=time.monotonic() + KILL_S)
    starter.send(b".")
    # None but the kernel kills a runner that has ended by itself.
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    return "error" if is_program and status else outcome


def _judge(
    test: dict[str, Any],
    job: dict[str, Any],
    options: dict[str, Any],
    link: socket.socket,
    stdin: int,
    stdout: int,
    verdict: int,
) -> NoReturn:
    """Compares what the runner does with the test, and writes a verdict."""
    letter = b"e"
    try:
        jail.limit(**{"as": options["memory_bytes"]})
        seccomp.forbid_processes()
        if "output" in test:
            with contextlib.suppress(BrokenPipeError):
                send_frame(link.fileno(), job["code"])
            output = _conversation(test["input"], stdin, stdout, options)
            letter = b"p" if same_output(output, test["output"], tolerance=options["tolerance"]) else b"w"
        else:
            peer = Peer(link, is_open=False, most=options["output_bytes"])
            send_frame(link.fileno(), job["code"])
            _checked(test, job, peer, options)
            if peer.failure is not None:
                raise peer.failure
            letter = b"p"
    except AssertionError:
        letter = b"w"
    except BrokenTalk:
        letter = b"b"
    except BaseException:  # noqa: BLE001 - it is the outcome of the test
        letter = b"e"
    finally:
        os.write(verdict, letter)
        os._exit(0)


def _conversation(text: str, stdin: int, stdout: int, options: dict[str, Any]) -> str:
    """Feed a program, and collect its output until it closes it."""
    os.set_blocking(stdin, False)
    rest, output, poll = memoryview(text.encode("utf-8", "surrogatepass")), bytearray(), select.poll()
    poll.register(stdin, select.POLLOUT)
    poll.register(stdout, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if stdin in ready:
            with contextlib.suppress(BrokenPipeError):
                rest = rest[os.write(stdin, rest) :] if rest and not ready[stdin] & select.POLLERR else rest[:0]
            if not rest or ready[stdin] & select.POLLERR:
                poll.unregister(stdin)
                # End of input: `stdin` stays a file of this process, so that nothing else gets its number.
                os.dup2(2, stdin)
        if stdout in ready:
            piece = os.read(stdout, 1 << 16)
            if not piece:
                return output.decode("utf-8", "replace")
            output += piece
            if len(output) > options["output_bytes"]:
                raise ValueError(f"more than {options['output_bytes']} bytes of output")


def _checked(test: dict[str, Any], job: dict[str, Any], peer: Peer, options: dict[str, Any]) -> None:
    """Raises AssertionError for a wrong result, and whatever the code or the tests raise."""
    if "arguments" in test:
        result = peer.request("entry", job["entry"], test["arguments"])
        # Published sets wrap some results in a list of one.
        assert any(same_value(result, one, tolerance=options["tolerance"]) for one in test["results"])
        return
    tree = ast.parse(f"{job['setup']}\n{test['program']}", "tests.py")
    names: dict[str, Any] = _of_code(peer, job["entry"]) | _modules(tree, job["entry"]) | {"__name__": "tests"}
    exec(compile(tree, "tests.py", "exec"), names)
    if test["has_check"]:
        names["check"](names[job["entry"]])


def _of_code(peer: Peer, entry: str) -> dict[str, Any]:
    """The code's names, without those that Python itself looks up, such as `__builtins__`, and built-in functions."""
    return {
        name: value
        for name, value in dict(peer.request("load")).items()
        if type(name) is str and not name.startswith("__") and (name == entry or not hasattr(builtins, name))
    }


def _modules(tree: ast.Module, entry: str) -> dict[str, Any]:
    """Modules of the standard library that a test uses, and may leave for the code to import: `math` of `math.inf`."""
    uses = collections.Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    bases = collections.Counter(
        node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )
    own = {name for name, count in bases.items() if count == uses[name] and name in sys.stdlib_module_names}
    return {name: importlib.import_module(name) for name in sorted(own - {entry})}
