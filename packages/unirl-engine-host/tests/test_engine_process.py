"""A program in another environment: calls, tensors, errors, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from unirl.engine_host.frames import BadFrame, read_frame, to_frame
from unirl.engine_host.process import EngineDied, EngineProcess, EngineRaised, EngineTimedOut, Program

pytestmark = pytest.mark.slow

SERVER = """
import os, signal, subprocess, sys, time

def calls():
    return {"same": same, "double": double, "fail": fail, "leave": leave, "wait": wait, "child": child, "vars": variables}

def same(asked, tensors):
    return dict(asked), tensors

def double(asked, tensors):
    return None, {name: value * 2 for name, value in tensors.items()}

def fail(asked, tensors):
    raise KeyError("no such layer")

def leave(asked, tensors):
    print("the last words", flush=True)
    os._exit(7)

def wait(asked, tensors):
    time.sleep(asked["seconds"])
    return None, {}

def child(asked, tensors):
    # In a separate session, so that no signal to the server's group reaches it.
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid, {}

def variables(asked, tensors):
    return dict(os.environ), {}
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    (tmp_path / "doubling_server.py").write_text(SERVER, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return Program(
        name="doubling",
        python=Path(sys.executable),
        serve="doubling_server:calls",
        modules=("doubling_server",),
        start_timeout_s=60,
    )


@pytest.fixture
def process(program: Program) -> Iterator[EngineProcess]:
    process = EngineProcess(program)
    process.start()
    yield process
    process.close()


def test_values_and_tensors_come_back_bit_for_bit(process: EngineProcess) -> None:
    tensors = {
        "a": torch.tensor([float("nan"), -0.0, 1e-45]),
        "b": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).bfloat16().T,
        "c": torch.tensor([2**62 + 1]),
    }
    value, result = process.call("same", {"text": "ä", "list": [1, None, 0.1]}, tensors=tensors, timeout_s=30)
    assert value == {"text": "ä", "list": [1, None, 0.1]}
    for name, sent in tensors.items():
        assert result[name].dtype == sent.dtype
        assert result[name].contiguous().view(torch.uint8).equal(sent.contiguous().view(torch.uint8))
    _, twice = process.call("double", tensors={"c": torch.tensor([21])}, timeout_s=30)
    assert twice["c"].item() == 42


def test_what_a_server_leaves_where_temporary_files_go_is_removed_with_it(process: EngineProcess) -> None:
    variables, _ = process.call("vars", timeout_s=30)
    folder = Path(variables["TMPDIR"])
    (folder / "left").touch()
    process.close()
    assert not folder.exists()


def test_what_is_raised_there_is_raised_here_and_it_lives_on(process: EngineProcess) -> None:
    with pytest.raises(EngineRaised, match="engine 'doubling' failed in 'fail': KeyError: 'no such layer'") as caught:
        process.call("fail", timeout_s=30)
    assert (caught.value.raised, caught.value.unchanged) == ("KeyError", False)
    assert process.call("same", timeout_s=30)[0] == {}


def test_a_death_is_told_at_once_with_its_code_and_the_end_of_the_log(process: EngineProcess) -> None:
    began = time.monotonic()
    with pytest.raises(EngineDied, match=r"(?s)died in 'leave' \(exit code 7\).*the last words"):
        process.call("leave", timeout_s=30)
    # The guard polls every 0.1 s; the rest is the load of the machine.
    assert time.monotonic() - began < 5
    with pytest.raises(EngineDied, match="died in 'leave'"):
        process.call("same", timeout_s=30)
    process.restart()
    assert process.call("same", timeout_s=30)[0] == {}


def test_killed_in_a_call_it_is_named_with_the_signal(process: EngineProcess) -> None:
    threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
    with pytest.raises(EngineDied, match=r"died in 'wait' \(killed by SIGKILL\)"):
        process.call("wait", {"seconds": 60}, timeout_s=60)
    assert not process.is_running


def test_a_call_that_takes_too_long_ends_the_process(process: EngineProcess) -> None:
    pid = process.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineTimedOut, match=r"'wait' took longer than 0.2 s; its process was ended"):
        process.call("wait", {"seconds": 0}, timeout_s=0.2)
    assert gone(pid)


def test_close_ends_what_the_server_started_as_well(process: EngineProcess) -> None:
    child, _ = process.call("child", timeout_s=30)
    pid = process.pid
    assert not gone(child)
    process.close()
    process.close()
    assert gone(pid)
    assert gone(child)


def test_close_does_not_wait_for_a_call_of_another_thread(process: EngineProcess) -> None:
    told: list[str] = []

    def call() -> None:
        try:
            process.call("wait", {"seconds": 120}, timeout_s=120)
        except EngineDied as error:
            told.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.3)
    pid = process.pid
    began = time.monotonic()
    process.close()
    thread.join()
    # The grace that a call gets is 3 s; the rest is the load of the machine.
    assert time.monotonic() - began < 20
    assert gone(pid)
    assert "died in 'wait'" in told[0]


def test_an_interrupted_call_leaves_no_answer_to_the_next_one(
    process: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(receive: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("unirl.engine_host.process.read_frame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.call("same", {"first": 1}, timeout_s=30)
    with pytest.raises(EngineDied, match="'same' was interrupted"):
        process.call("same", {"second": 2}, timeout_s=30)
    process.restart()
    assert process.call("same", {"second": 2}, timeout_s=30)[0] == {"second": 2}


def test_the_variables_of_the_host_stay_with_it(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """`PYTHONPATH` would bring another environment's packages, and the engine has no need for secrets. Programs
    of the engine's environment come first on its PATH."""
    monkeypatch.setenv("PATH", "/tools/bin:/usr/bin")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/local/kernels")
    process = EngineProcess(Program(**{**vars(program), "variables": {"ONLY_HERE": "1"}}))
    process.start()
    result, _ = process.call("vars", timeout_s=30)
    process.close()
    assert result["ONLY_HERE"] == "1"
    assert result["PATH"] == f"{program.python.parent}:/tools/bin:/usr/bin"
    assert not {"PYTHONPATH", "HF_TOKEN"} & result.keys()
    # Eight engines would compile into one home folder.
    assert result["TRITON_CACHE_DIR"] == "/local/kernels"


def test_a_server_that_cannot_start_says_why(program: Program) -> None:
    process = EngineProcess(Program(**{**vars(program), "serve": "doubling_server:missing"}))
    with pytest.raises(EngineDied, match=r"(?s)died in 'start' \(exit code 1\).*has no attribute 'missing'"):
        process.start()
    process.close()


def test_nothing_stays_when_the_host_is_killed(program: Program, tmp_path: Path) -> None:
    script = f"""
import sys, time
sys.path.insert(0, {str(tmp_path)!r})
from pathlib import Path
from unirl.engine_host.process import EngineProcess, Program
process = EngineProcess(Program(name="doubling", python=Path(sys.executable), serve="doubling_server:calls",
                                modules=("doubling_server",)))
process.start()
print(process.pid, process.call("child", timeout_s=30)[0], process._folder, flush=True)
time.sleep(600)
"""
    host = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    server, child, folder = host.stdout.readline().split()
    assert Path(folder).is_dir()
    host.kill()
    host.wait()
    host.stdout.close()
    # The guard sees the end of its lifeline at once; what follows are three kills.
    assert within_s(10, lambda: gone(int(server)) and gone(int(child)) and not Path(folder).exists())


def test_other_bytes_are_no_frame() -> None:
    good = to_frame({"call": "x"})

    def reading(data: bytes) -> Callable[[int], bytes]:
        parts = [data]

        def receive(size: int) -> bytes:
            taken, parts[0] = parts[0][:size], parts[0][size:]
            return taken

        return receive

    assert read_frame(reading(good)) == ({"call": "x"}, {})
    with pytest.raises(BadFrame, match="expected a frame"):
        read_frame(reading(b"HTTP/1.1 200 OK\r\n"))
    with pytest.raises(BadFrame, match="not JSON"):
        read_frame(reading(good.replace(b'{"', b"##")))
    with pytest.raises(ValueError, match="JSON"):
        to_frame({"x": float("nan")})


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def within_s(seconds: float, is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(0.05)
    return is_so()
