"""Ray workers that have imported everything before they start: forks of one process that has.

A worker of the quickstart spends 7 s of CPU on imports, and the tests start dozens. `python()` starts the process that
forks, once for all tests of a process, and gives the "Python" that Ray runs in place of the interpreter
(`py_executable`): it hands its arguments, environment, folder and files to that process and lives as long as the fork
does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from unirl.runtime.ray_worker import SETTINGS

PRELOAD = (
    "unirl.runtime.worker",
    "unirl.models.sd3.checkpoint",
    "unirl.models.sd3.model",
    "unirl.engines.trainside.engine",
    "unirl.backends.fsdp2.backend",
    "unirl.train_host.adapters",
    "unirl.algorithms.flow_grpo.algorithm",
    "unirl.rewards.rules.shapes",
    "unirl.rewards.rules.brightness",
)
PRELOAD_OF_RAY = (
    "google.protobuf.json_format",
    "jsonschema",
    "pydantic.deprecated.class_validators",
    "pydantic.fields",
    "pydantic.v1",
    "starlette.datastructures",
)
"""What Ray imports in a worker, where it is installed, before the first call: 0.4 s of CPU. Ray itself reads the job of
the worker from the environment when it is imported, and pyarrow starts a thread."""

STUB = """#!{python} -IS
import os, pickle, socket, sys
conn = socket.socket(socket.AF_UNIX)
conn.connect({address!r})
data = pickle.dumps((sys.argv[1:], dict(os.environ), os.getcwd()))
socket.send_fds(conn, [len(data).to_bytes(8, "little")], [0, 1, 2])
conn.sendall(data)
sys.exit(conn.recv(1)[:1] != b"0")
"""


@functools.cache
def python() -> str:
    """The path of the stub. The process behind it ends with the one that asked first."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address, stub = folder / "fork.sock", folder / "warm-python"
    environment = {**os.environ, **SETTINGS, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    server = subprocess.Popen([sys.executable, __file__, str(address)], stdin=subprocess.PIPE, env=environment)
    atexit.register(server.communicate, timeout=30)
    end = time.monotonic() + 120
    while not address.exists():
        assert server.poll() is None and time.monotonic() < end, "the forking process did not come up"
        time.sleep(0.05)
    stub.write_text(STUB.format(python=sys.executable, address=str(address)))
    stub.chmod(0o755)
    (folder / "fork.pid").write_text(str(server.pid))
    return str(stub)


def main(address: str) -> None:
    for name in PRELOAD:
        __import__(name)
    for name in PRELOAD_OF_RAY:
        with contextlib.suppress(ImportError):
            __import__(name)
    # Forks leave these objects alone, so that their pages stay shared.
    gc.collect()
    gc.freeze()
    partial = f"{address}.partial"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(partial)
    listener.listen(64)
    Path(partial).rename(address)
    forks: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([listener, sys.stdin, *forks], [], [], 0.2)
        for conn, pid in list(forks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and conn in ready:
                # Ray ended the stub: that is how it ends a worker.
                os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, 0)
            if ended:
                with contextlib.suppress(OSError):
                    conn.send(b"0" if status == 0 else b"1")
                conn.close()
                del forks[conn]
        if sys.stdin in ready:
            for pid in forks.values():
                os.kill(pid, signal.SIGKILL)
            return
        if listener in ready:
            conn, _ = listener.accept()
            # All of it is read here: what can be read of a connection later is that its stub has ended.
            call, files = received(conn)
            pid = os.fork()
            if pid == 0:
                listener.close()
                become_worker(call, files)
            for file in files:
                os.close(file)
            forks[conn] = pid


def received(conn: socket.socket) -> tuple[tuple[list[str], dict[str, str], str], list[int]]:
    head, files, _, _ = socket.recv_fds(conn, 8, 3)
    size, data = int.from_bytes(head, "little"), b""
    while len(data) < size:
        data += conn.recv(size - len(data))
    return pickle.loads(data), files


def become_worker(call: tuple[list[str], dict[str, str], str], files: list[int]) -> None:
    arguments, environment, folder = call
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.setsid()
    sys.path[0] = str(Path(arguments[0]).parent)
    for entry in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if entry:
            sys.path.insert(1, entry)
    sys.argv = arguments
    status = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:  # noqa: BLE001 - a process ends here, and says why as any other does
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
