"""Code that does not want to be tested: nothing that it does passes, reaches outside, or stops the next sample."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unirl.core.errors import RecipeError, RewardFailed
from unirl.rewards.code.config import UnitTestsConfig
from unirl.rewards.code.reward import build
from unirl.rewards.code.sandbox import Report, Sandbox

CAN_UNSHARE = subprocess.run(["unshare", "-rnmp", "--fork", "true"], check=False, capture_output=True).returncode == 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_UNSHARE, reason="not run: this machine does not allow user namespaces"),
]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    # A second of CPU is a thousand times what the honest ones need; wall time bounds those that sleep.
    result = Sandbox(UnitTestsConfig(cpu_s=1, wall_s=8, memory_mb=256, disk_mb=4, output_kb=64, processes=8))
    yield result
    result.close()


def calls(sandbox: Sandbox, code: str, *tests: str, entry: str = "", setup: str = "") -> Report:
    """The report of assert tests."""
    programs = [{"program": test, "has_check": False} for test in tests]
    return sandbox.run(code=code, setup=setup, entry=entry, tests=programs)


def program(sandbox: Sandbox, code: str, text: str = "2\n", output: str = "4\n") -> str:
    """The outcome of one program."""
    (outcome,) = sandbox.run(code=code, setup="", entry="", tests=[{"input": text, "output": output}]).outcomes
    return outcome


HOSTILE_PROGRAMS = {
    "fork bomb": ("import os\nwhile True:\n    os.fork()", {"error", "timeout"}),
    "thread bomb": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
        {"error"},
    ),
    "infinite loop": ("while True:\n    pass", {"timeout"}),
    "sleep": ("import time\ntime.sleep(3600)", {"timeout"}),
    "memory hog": ("x = bytearray(1 << 30)", {"error"}),
    "huge output": ("while True:\n    print('4' * 1000)", {"error"}),
    "huge file": ("open('x', 'wb').write(bytes(8 << 20))\nprint(4)", {"error"}),
    "many files": ("files = [open(str(n), 'w') for n in range(1000)]\nprint(4)", {"error"}),
    "exit code 0": ("import sys\nsys.exit(0)", {"wrong"}),
    "sudden exit": ("import os\nos._exit(0)", {"wrong"}),
    "exit code after the answer": ("print(4)\nraise SystemExit(1)", {"error"}),
    "killed by itself": ("import os\nos.kill(os.getpid(), 9)", {"timeout", "error"}),
    "kills all": ("import os\nos.kill(-1, 9)", {"wrong", "error", "timeout"}),
    "kills process 1": ("import os\nos.kill(1, 9)\n", {"error"}),
    "syntax error": ("print(", {"error"}),
    "exception": ("raise ValueError", {"error"}),
    "fake result on stdout": ('print(\'{"nonce": "", "outcome": "passed", "reason": ""}\')', {"wrong"}),
    "bytes that are not text": ("import sys\nsys.stdout.buffer.write(bytes(range(256)))", {"wrong"}),
    "does not read its input": ("pass", {"wrong"}),
    "subprocess": ("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'echo 4'], check=True)", {"error"}),
    "a child that stays": (
        "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(3600)\nprint(4)",
        {"error"},
    ),
}


@pytest.mark.parametrize("name", HOSTILE_PROGRAMS)
def test_a_hostile_program_does_not_pass_and_the_next_one_does(sandbox: Sandbox, name: str) -> None:
    code, expected = HOSTILE_PROGRAMS[name]
    assert program(sandbox, code) in expected
    assert program(sandbox, "print(2 * int(input()))") == "passed"


FAKES = {
    "equal to everything": "class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()",
    "differs by nothing": "class Any:\n    def __sub__(self, other): return 0\n    __rsub__ = __sub__\ndef f(x): return Any()",
    "an int equal to everything": "class Any(int):\n    def __eq__(self, other): return True\ndef f(x): return Any()",
    "built-ins replaced": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.AssertionError = None\nabs = lambda x: 0\n"
    "len = lambda x: 4\ndef f(x): return 0",
    "math replaced": "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0",
    "exit in the call": "def f(x):\n    raise SystemExit(0)",
    "sudden exit in the call": "import os\ndef f(x):\n    os._exit(0)",
    "exit on import": "raise SystemExit(0)",
    "tests skipped by a signal": "import os, signal\ndef f(x):\n    os.kill(os.getppid(), 9)\n    os.kill(1, 15)",
    "results written to every file": 'import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b\'\\0\\0\\0\\x2a{"nonce": "", "outcome": "passed", "reason": ""}\')\n'
    "        except OSError: pass\n    return 0",
    "a reply that is none": "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if type(o).__name__ == 'Peer': o.link.send(b'\\0\\0\\0\\x0c{\"value\": 4}')\n    return 0",
    "deep nesting": "def f(x):\n    y = []\n    for _ in range(100000): y = [y]\n    return y",
}
STRICT = ("assert f(2) == 4.5", "assert abs(f(2) - 4.5) < 1e-6", "import math\nassert math.isclose(f(2), 4.5)")


@pytest.mark.parametrize("name", FAKES)
def test_a_fake_passes_no_assert(sandbox: Sandbox, name: str) -> None:
    assert "passed" not in calls(sandbox, FAKES[name], *STRICT).outcomes
    assert calls(sandbox, "def f(x): return x + 2.5", *STRICT).outcomes == ("passed",) * 3


def test_the_expected_values_are_nowhere_in_the_process_of_the_code(sandbox: Sandbox) -> None:
    """The code looks for the secret of the test in all objects, in frames and files, and in the memory of others."""
    code = """
import gc, os, sys
def f():
    found = []
    needle = "tangerine"[::-1]
    for item in gc.get_objects():
        if type(item) in (dict, list, tuple) and needle in str(item)[:100000]:
            found.append("objects")
    for pid in ("1", "2", "self", str(os.getppid())):
        for name in ("mem", "cmdline", "environ", "maps", "fd/0"):
            try:
                open(f"/proc/{pid}/{name}", "rb").read(1)
                found.append(f"{pid}/{name}")
            except OSError:
                pass
    frame = sys._getframe().f_back
    while frame:
        if needle in str(frame.f_locals)[:100000]:
            found.append("frames")
        frame = frame.f_back
    return found
"""
    secret = "tangerine"[::-1]
    assert calls(sandbox, code, f"assert f() == [], '{secret}'").outcomes == ("passed",)


def test_the_code_cannot_trace_the_process_that_has_the_tests(sandbox: Sandbox) -> None:
    code = """
import ctypes
def f(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(8)
    part = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    # PTRACE_ATTACH, process_vm_readv and pidfd_getfd would all pass the same check.
    return [libc.ptrace(16, pid, None, None), libc.process_vm_readv(pid, part, 1, part, 1, 0)]
"""
    assert calls(sandbox, code, "assert f(1) == [-1, -1]", "assert f(2) == [-1, -1]").outcomes == ("passed",) * 2


def test_files_of_the_machine_are_neither_read_nor_written(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o666)
    code = f"""
import os
def f():
    out = []
    for name in ("{tmp_path}/secret", "/etc/passwd", "{Path(__file__)}", "/proc", "/sys", "/var", "/bin/sh"):
        out.append(os.path.exists(name))
    for name in ("{tmp_path}/new", os.__file__, "/usr/lib/new", "/dev/sda"):
        try:
            open(name, "a").close()
            out.append(name)
        except OSError:
            pass
    open("mine", "w").write("x")
    return out, os.getcwd(), os.environ["HOME"], sorted(os.environ)
"""
    expected = (
        [False] * 7,
        "/sandbox",
        "/sandbox",
        sorted(["HOME", "TMPDIR", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]),
    )
    (outcome,) = calls(sandbox, code, f"result = f()\nassert result == {expected!r}, result").outcomes
    assert outcome == "passed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


def test_files_of_one_sample_are_gone_for_the_next(sandbox: Sandbox) -> None:
    code = "import os\ndef f():\n    result = os.listdir()\n    open('x', 'w')\n    return result"
    for _ in range(2):
        assert calls(sandbox, code, "assert f() == []").outcomes == ("passed",)


def test_no_network_is_reached(sandbox: Sandbox) -> None:
    """A server of this machine listens on all interfaces; inside, even its loopback is another one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
def f():
    out = []
    for address in ("127.0.0.1", "192.0.2.1", "8.8.8.8"):
        try:
            socket.create_connection((address, {port}), timeout=1)
            out.append(address)
        except OSError:
            pass
    return out, [name for _, name in socket.if_nameindex() if name.startswith(("eth", "en"))]
"""
        assert calls(sandbox, code, "assert f() == ([], [])").outcomes == ("passed",)


def test_privileges_cannot_be_gained(sandbox: Sandbox) -> None:
    code = """
import ctypes, os
def f():
    libc = ctypes.CDLL(None, use_errno=True)
    return [libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None), libc.chroot(b"/sandbox"), libc.sethostname(b"x", 1)]
"""
    assert calls(sandbox, code, "assert f() == [-1, -1, -1]").outcomes == ("passed",)


def test_an_endless_test_leaves_the_others_their_time(sandbox: Sandbox) -> None:
    code = "def f(x):\n    while x == 1: pass\n    return x"
    report = calls(sandbox, code, "assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2")
    assert report.outcomes == ("passed", "timeout", "passed")


def test_tests_use_classes_exceptions_and_functions_of_either_side(sandbox: Sandbox) -> None:
    code = """
import collections, math
class Node:
    def __init__(self, value): self.value, self.next = value, None
    def __eq__(self, other): return self.value == other.value
    def __len__(self): return self.value
    def __add__(self, other): return Node(self.value + other.value)
def total(node): return node.value + (total(node.next) if node.next else 0)
def apply(function, items): return [function(item) for item in items]
def fail(): raise KeyError("no")
def count(text): return collections.Counter(text)
def numbers(): yield from range(3)
def sort(items, seen): items.sort(); seen.add(items[0])
def pair(): return collections.namedtuple("Pair", "a b")(1, 2)
"""
    tests = (
        "a, b = Node(1), Node(2)\na.next = b\nassert total(a) == 3 and a.next.value == 2",
        "assert Node(1) == Node(1) and Node(1) != Node(2) and len(Node(3)) == 3 and (Node(1) + Node(2)).value == 3",
        "assert isinstance(Node(1), Node) and not isinstance(1, Node)",
        "assert apply(lambda x: x * 2, (1, 2)) == [2, 4]",
        "try:\n    fail()\nexcept KeyError as error:\n    assert 'no' in str(error)\nelse:\n    assert False",
        "assert count('aab') == {'a': 2, 'b': 1}",
        "items, seen = [3, [1]][:1] + [1], set()\nsort(items, seen)\nassert items == [1, 3] and seen == {1}",
        "assert list(numbers()) == [0, 1, 2] and pair() == (1, 2)",
        "assert math.isclose(1, 1) and {1, (2, 3)} == {(2, 3), 1} and apply(str, [None, b'x', 1j]) == ['None', \"b'x'\", '1j']",
    )
    assert calls(sandbox, code, *tests).outcomes == ("passed",) * len(tests)


def test_the_order_of_sets_is_the_same_at_every_run(sandbox: Sandbox) -> None:
    code = "def f(): return ''.join({'a', 'b', 'c', 'd', 'e', 'f'})"
    # Processes of one hash seed have one order; of random seeds, one in 720 at best.
    first = "assert f() == ''.join({'a', 'b', 'c', 'd', 'e', 'f'})"
    assert calls(sandbox, code, first).outcomes == ("passed",)


def test_large_inputs_and_outputs_pass_through(sandbox: Sandbox) -> None:
    text = "1 " * 30_000
    assert program(sandbox, "print(input())", text + "\n", text) == "passed"
    assert program(sandbox, "print(len(input()))", "x" * (1 << 20), str(1 << 20)) == "passed"


def test_a_module_that_is_tested_has_no_input_and_may_print_at_length(sandbox: Sandbox) -> None:
    assert calls(sandbox, "print('x' * (1 << 20))\ndef f(): return 1", "assert f() == 1").outcomes == ("passed",)
    assert calls(sandbox, "x = input()", "assert x").outcomes == ("error",)


def test_calls_compare_json_values(sandbox: Sandbox) -> None:
    code = "class Solution:\n    def f(self, x): return (x, {1: x + 0.0})"
    tests: list[dict[str, Any]] = [
        {"arguments": [1], "results": [[1, {"1": 1}]]},
        {"arguments": [1], "results": [[1, {"1": 2}], [1, {"1": 1}]]},
        {"arguments": [1], "results": [[True, {"1": 1}]]},
        {"arguments": [1, 2], "results": [[1, {"1": 1}]]},
    ]
    report = sandbox.run(code=code, setup="", entry="f", tests=tests)
    assert report.outcomes == ("passed", "passed", "wrong", "error")


def test_all_stops_at_the_first_failure() -> None:
    sandbox = Sandbox(UnitTestsConfig(score="all"))
    assert calls(sandbox, "x = 1", "assert x == 1", "assert x == 2", "assert x == 1").outcomes == ("passed", "wrong")


def test_a_sample_that_takes_too_long_times_out_with_the_tests_that_are_left() -> None:
    sandbox = Sandbox(UnitTestsConfig(wall_s=60, sample_wall_s=2))
    report = calls(sandbox, "import time\ndef f(x): time.sleep(3600 * x)", "f(0)", "f(1)", "f(0)")
    assert report.outcomes[1:] == ("timeout", "timeout") and not report.is_broken


def test_packages_are_importable_on_request_alone() -> None:
    for packages in (False, True):
        sandbox = Sandbox(UnitTestsConfig(packages=packages, memory_mb=4096, processes=64))
        code = "import numpy\ndef f(): return numpy.arange(3).sum(), numpy.float32(0.5)"
        outcome = "passed" if packages else "error"
        assert calls(sandbox, code, "assert f() == (3, 0.5)").outcomes == (outcome,)


def test_a_command_starts_the_sandbox_and_its_network_is_checked() -> None:
    words = [sys.executable]
    with pytest.raises(RewardFailed, match="could reach a network") if _has_route() else pytest.raises(AssertionError):
        calls(Sandbox(UnitTestsConfig(isolation="command", command=words)), "x = 1", "assert x == 1")
        assert not _has_route()
    apart = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", *words]
    sandbox = Sandbox(UnitTestsConfig(isolation="command", command=apart))
    assert calls(sandbox, "x = 1", "assert x == 1", "assert x == 2").outcomes == ("passed", "wrong")


def test_limits_alone_need_two_settings() -> None:
    with pytest.raises(RecipeError, match="network=unisolated"):
        build(UnitTestsConfig(isolation="none"), device="cpu")
    sandbox = Sandbox(UnitTestsConfig(isolation="none", network="unisolated", cpu_s=1))
    code = "def f(x):\n    while x: pass\n    return 1"
    assert calls(sandbox, code, "assert f(0) == 1", "f(1)").outcomes == ("passed", "timeout")


def test_a_command_that_does_not_start_is_an_error_with_its_last_words() -> None:
    for command, text in ((["/missing"], "could not be started"), (["false"], "isolation=command")):
        with pytest.raises(RewardFailed, match=text):
            build(UnitTestsConfig(isolation="command", command=command), device="cpu")


def test_closing_ends_the_processes_of_calls_in_progress() -> None:
    sandbox = Sandbox(UnitTestsConfig(wall_s=300))
    errors: list[BaseException] = []

    def score() -> None:
        try:
            calls(sandbox, "import time\ntime.sleep(3600)", "pass")
        except RewardFailed as error:
            errors.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    while not sandbox._running:
        pass
    sandbox.close()
    sandbox.close()
    thread.join(timeout=60)
    assert not thread.is_alive() and "close()" in str(errors[0])
    with pytest.raises(RewardFailed, match="close"):
        calls(sandbox, "", "pass")


def test_no_process_outlives_the_sandboxes(sandbox: Sandbox) -> None:
    code = "import time, threading\nfor _ in range(3):\n    threading.Thread(target=time.sleep, args=(3599,)).start()\nprint(4)"
    assert program(sandbox, code) == "passed"
    ours = [path for path in Path("/proc").glob("[0-9]*") if _parent(path) == os.getpid()]
    assert not [path for path in ours if "-P" in _words(path) and "-B" in _words(path)], ours


def _parent(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _words(path: Path) -> list[str]:
    try:
        return (path / "cmdline").read_text().split("\0")
    except OSError:
        return []


def _has_route() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return False
    return True


def test_the_frames_are_json() -> None:
    """Only JSON crosses: there is no pickle for the code to write."""
    source = "".join(path.read_text() for path in Path(__file__).parents[1].glob("src/**/*.py"))
    assert "pickle" not in source and "marshal" not in source
