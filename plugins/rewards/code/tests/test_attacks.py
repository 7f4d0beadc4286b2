"""Attacks on the grader, as a policy that is trained against it would find them: none earns a pass, none holds it up."""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from unirl.rewards.code.config import UnitTestsConfig
from unirl.rewards.code.inside import seccomp
from unirl.rewards.code.sandbox import GRACE_S, Report, Sandbox

from .test_sandbox import CAN_UNSHARE, calls, program

pytestmark = pytest.mark.skipif(not CAN_UNSHARE, reason="not run: this machine does not allow user namespaces")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    result = Sandbox(UnitTestsConfig(cpu_s=1, wall_s=4, memory_mb=256, disk_mb=4, output_kb=64, processes=8))
    yield result
    result.close()


TESTS = (
    "assert f(2) == 4.5",
    "assert abs(f(2) - 4.5) < 1e-6",
    "assert math.isclose(f(2), 4.5)",
    "assert isinstance(f(2), float) and f(2) == 4.5",
    "assert all(map(lambda x: f(x) == x + 2.5, [2, 3, 4]))",
    "assert [f(x) for x in (2, 3)] == [4.5, 5.5] and sorted([f(3), f(2)]) == [4.5, 5.5]",
    "assert {f(2): 1} == {4.5: 1} and f(2) in (4.5,)",
    "try:\n    ok = f(2) == 4.5\nexcept ValueError:\n    ok = False\nassert ok",
    "def near(a):\n    assert a == 4.5\n    return True\nassert near(f(2)) is True",
)
"""An honest solution passes all. A fixed value passes none: the code is to find the value that it cannot read."""

PEER = "import gc, socket\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')\n"
"""Code that finds the socket to the judge: what it sends may be anything."""
FRAME = (
    PEER
    + "import json, struct\ndef send(data):\n    data = data if isinstance(data, bytes) else json.dumps(data).encode()\n"
)
FRAME += "    peer.link.sendall(struct.pack('>I', len(data)) + data)\n"
LIAR = "class Name(str):\n    def startswith(self, *args): return False\n    __hash__ = str.__hash__\n"

ATTACKS = {
    "built-ins under a name that hides its underscores": LIAR + "del globals()['__builtins__']\n"
    "globals()[Name('__builtins__')] = dict(abs=lambda x: 0, all=lambda x: True, map=lambda f, x: 0, isinstance=lambda *a: True)\n"
    "def f(x): return 0",
    "built-ins in a reply of its own": FRAME
    + "for name in ('__builtins__', '__import__', '__build_class__', '__debug__', 'all', 'AssertionError'):\n"
    "    send({'value': {'dict': [['f', {'mine': 0}], [name, {'dict': []}]]}})\ndef f(x): return 0",
    "an import function of its own": LIAR
    + "globals()[Name('__import__')] = lambda *a: None\nglobals()[Name('__build_class__')] = lambda *a: None\ndef f(x): return 0",
    "a module of its own": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\nabs = all = sorted = lambda *a: True\ndef f(x): return 0",
    "the name of a module for another": "import types\nmath = types.ModuleType('os')\nmath.isclose = lambda *a: True\ndef f(x): return 0",
    "a string that is equal to everything": "class S(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\ndef f(x): return S('4')",
    "a float that is equal to everything": "class F(float):\n    __eq__ = lambda s, o: True\n    __sub__ = __rsub__ = lambda s, o: 0\n    __hash__ = float.__hash__\ndef f(x): return F(0)",
    "an object with every operator": "class A:\n    def __getattr__(self, name): return self\n    def __call__(self, *a): return True\n"
    "    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda s, o: True\n"
    "    __sub__ = __rsub__ = __abs__ = __float__ = __round__ = lambda s, *a: 0.0\n    __hash__ = lambda s: hash(4.5)\n"
    "    __class__ = float\ndef f(x): return A()",
    "a type that calls everything its instance": "class M(type):\n    __instancecheck__ = __subclasscheck__ = lambda c, o: True\n"
    "class float(metaclass=M): pass\ndef f(x): return float()",
    "StopIteration, which ends loops": "def f(x): raise StopIteration",
    "StopIteration in a reply": FRAME + "def f(x):\n    send({'error': 'StopIteration', 'text': ''})",
    "an exception that is no exception": FRAME + "def f(x):\n    send({'error': 'SystemExit', 'text': '0'})",
    "an exception named after a function": FRAME + "def f(x):\n    send({'error': 'print', 'text': ''})\n",
    "an exception class that is renamed": "class ValueError(BaseException): pass\nValueError.__module__ = 'builtins'\ndef f(x): raise ValueError",
    "values that the format does not have": FRAME
    + "def f(x):\n    send({'value': {'eval': '4.5'}})\n    send({'value': {'module': 'os'}})",
    "objects of the tests by number": FRAME + "def f(x):\n    send({'value': {'yours': -1}})",
    "a call of a function of its choice": FRAME
    + "def f(x):\n    send({'op': 'getattr', 'arguments': [{'mine': 0}, '__class__']})\n    send({'op': '__eq__', 'arguments': [1, 1]})",
    "half a message": PEER
    + "def f(x):\n    peer.link.send(b'\\0\\0\\0\\x40{')\n    peer.link.shutdown(socket.SHUT_WR)",
    "a message without an end": PEER + "def f(x):\n    peer.link.send(b'\\0\\0\\0\\x40{')\n    while True: pass",
    "a message of 4 GB": PEER + "def f(x):\n    peer.link.send(b'\\xff\\xff\\xff\\xff')\n    return 0",
    "nested too deeply": FRAME + "def f(x):\n    send(b'[' * 60000 + b']' * 60000)",
    "a dictionary of equal hashes": "def f(x): return {n * (2**61 - 1): 0 for n in range(3000)}",
    "sudden exit": "import os\ndef f(x): os._exit(0)",
    "a range for a list": "def f(x): return range(10**8)",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_the_judge_passes_no_test(sandbox: Sandbox, name: str) -> None:
    tests = TESTS if "without an end" not in name else TESTS[:1]
    assert "passed" not in calls(sandbox, ATTACKS[name], *tests).outcomes


def test_an_honest_solution_passes_all_of_these_tests(sandbox: Sandbox) -> None:
    assert calls(sandbox, "def f(x): return x + 2.5", *TESTS).outcomes == ("passed",) * len(TESTS)


def test_the_code_cannot_swallow_a_failed_assert(sandbox: Sandbox) -> None:
    code = """
import os
class Context:
    def __enter__(self): return 0
    def __exit__(self, *error): return True
def apply(function):
    try: function(0)
    except BaseException: pass
def leave(): os._exit(0)
def fail(): raise ValueError
"""
    tests = (
        "with Context() as value:\n    assert value == 4",
        "def check(value):\n    assert value == 4\napply(check)",
        "try:\n    leave()\nexcept:\n    pass",
        "with Context() as value:\n    leave()",
    )
    assert calls(sandbox, code, *tests).outcomes == ("wrong", "wrong", "error", "error")
    honest = ("with Context() as value:\n    fail()", "def check(value):\n    assert value == 0\napply(check)")
    assert calls(sandbox, code, *honest).outcomes == ("passed", "passed")


def test_calls_are_compared_by_plain_values(sandbox: Sandbox) -> None:
    test = {"arguments": [2], "results": [{"4": 1}]}
    outcomes = {
        "def f(x): return {4: 1}": "passed",
        "class K:\n    __str__ = lambda s: '4'\ndef f(x): return {K(): 1}": "wrong",
        "class D(dict):\n    __len__ = lambda s: 1\n    keys = items = lambda s: []\ndef f(x): return D({5: 1})": "wrong",
        "def f(x): return {4: 2, '4': 1}": "wrong",
        "def f(x): return {4: float('inf')}": "wrong",
    }
    for code, outcome in outcomes.items():
        assert sandbox.run(code=code, setup="", entry="f", tests=[test]).outcomes == (outcome,), code


HOLDS = {
    "counts": ("def f(): return 10**12", "for _ in range(f()): pass"),
    "a power": ("def f(): return 10**9", "f() ** f()"),
    "equal hashes": ("def f(): return [n * (2**61 - 1) for n in range(3000)]", "while True: set(f())"),
    "endless iterator": ("import itertools\ndef f(): return itertools.count()", "list(f())"),
    "endless calls": ("def f(g):\n    while True: g()", "f(lambda: 0)"),
    "catches everything": ("import time\ndef f():\n    time.sleep(99)", "while True:\n    try: f()\n    except: pass"),
    "does not read": ("import time\ntime.sleep(99)", "f('x' * 10**7)"),
    "closes its output": (None, "import os, time\nprint(4)\nos.close(1)\ntime.sleep(99)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOLDS)
def test_nothing_holds_a_worker_longer_than_its_time(name: str) -> None:
    code, test = HOLDS[name]
    sandbox = Sandbox(UnitTestsConfig(cpu_s=9, wall_s=1, memory_mb=128, output_kb=512))
    start = time.monotonic()
    outcomes = (program(sandbox, test),) if code is None else calls(sandbox, code, test).outcomes
    # A second, and what a busy machine takes to start and to kill.
    assert outcomes[0] in ("timeout", "error") and time.monotonic() - start < GRACE_S


SIGNALS = """
import ctypes, errno, fcntl, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(call, *args):
    try: return call(*args) == -1
    except OSError as error: return error.errno in (errno.EPERM, errno.ENOSYS)
def f():
    parent, end = os.getppid(), socket.socketpair()[0]
    pid = lambda: libc.syscall(424, os.pidfd_open(parent), 19, None, 0)
    return [
        refused(os.kill, parent, signal.SIGSTOP), refused(os.kill, 1, signal.SIGSTOP), refused(os.kill, -1, signal.SIGSTOP),
        refused(os.kill, 0, signal.SIGSTOP), refused(os.killpg, os.getpgrp(), signal.SIGSTOP), refused(pid),
        refused(fcntl.fcntl, end, fcntl.F_SETOWN, parent), refused(fcntl.ioctl, end, 0x8901, bytes(8)),
        refused(libc.prlimit, parent, 0, (ctypes.c_uint64 * 2)(0, 0), None),
        refused(os.setpriority, os.PRIO_USER, 0, 19), refused(os.setsid), refused(os.setpgid, 0, 0),
        refused(os.sched_setaffinity, parent, [0]),
        refused(os.fork), refused(os.posix_spawn, "/bin/true", ["true"], {}), refused(libc.vfork),
    ]
"""
MEMORY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(call, *args):
    try: return call(*args) == -1
    except OSError as error: return True
def f():
    return [
        refused(os.memfd_create, "x"), refused(libc.shmget, 0, 1 << 20, 0o1600), refused(libc.msgget, 0, 0o1600),
        refused(libc.semget, 0, 1, 0o1600), refused(libc.mq_open, b"/x", 0o102, 0o600, None),
        refused(libc.unshare, 0x10000000), refused(libc.syscall, 425, 8, None), refused(libc.ptrace, 0, 0, None, None),
    ]
"""


@pytest.mark.parametrize("settings", [{}, {"isolation": "none", "network": "unisolated"}])
def test_the_code_reaches_no_process_but_its_own_and_no_memory_without_a_limit(settings: dict[str, Any]) -> None:
    sandbox = Sandbox(UnitTestsConfig(cpu_s=1, wall_s=8, **settings))
    assert calls(sandbox, SIGNALS, "assert f() == [True] * 16").outcomes == ("passed",)
    assert calls(sandbox, MEMORY, "assert f() == [True] * 8").outcomes == ("passed",)
    # Of itself, all of this is its own.
    own = "import os, resource, signal, threading\ndef f():\n    signal.signal(signal.SIGUSR1, lambda *a: None)\n"
    own += "    os.kill(os.getpid(), signal.SIGUSR1)\n    signal.raise_signal(signal.SIGUSR1)\n    out = []\n"
    own += "    resource.setrlimit(resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU))\n"
    own += "    t = threading.Thread(target=out.append, args=(1,))\n    t.start()\n    t.join()\n    return out"
    assert calls(sandbox, own, "assert f() == [1]").outcomes == ("passed",)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not run: machine code of x86")
def test_system_calls_of_another_architecture_end_the_code(sandbox: Sandbox) -> None:
    """int 0x80 is the table of i386, where 2 is fork, and 0x40000039 is fork of x32."""
    code = """
import ctypes, mmap
def f():
    memory = mmap.mmap(-1, 4096, prot=7)
    memory.write(b"\\xb8\\x02\\0\\0\\0\\xcd\\x80\\xc3")
    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
def g(): return ctypes.CDLL(None).syscall(0x40000000 + 57)
"""
    assert calls(sandbox, code, "f()", "assert g() == -1").outcomes == ("error", "passed")


@pytest.mark.parametrize(
    ("header", "column"),
    [("x86_64-linux-gnu/asm/unistd_64.h", 0), ("asm-generic/unistd.h", 1)],
    ids=["x86_64", "aarch64"],
)
def test_numbers_of_system_calls_are_those_of_the_kernel(header: str, column: int) -> None:
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip("not run: needs the kernel's headers")
    lines = [line.split() for line in path.read_text().splitlines() if line.startswith("#define __NR")]
    numbers = {line[1].removeprefix("__NR").partition("_")[2]: int(line[2]) for line in lines if line[2].isdigit()}
    ours = {name: both[column] for name, both in seccomp._NUMBERS.items()}
    common = ours.keys() & numbers.keys()
    # memfd_secret is in the table of x86 and of aarch64, and by a condition in the generic one.
    assert len(common) > 40 and {name: ours[name] for name in common} == {name: numbers[name] for name in common}
    assert all(name in ("fork", "vfork") for name, number in ours.items() if number is None)


def test_the_only_folder_that_can_be_written_is_the_samples_own(sandbox: Sandbox) -> None:
    """A python311.zip beside the standard library would be the first place where the judge looks for a module."""
    code = """
import errno, os, sys
def f():
    out = []
    for folder in {"/", "/dev", *map(os.path.dirname, sys.path)}:
        try: open(os.path.join(folder, "planted"), "w"); out.append(folder)
        except OSError as error:
            if error.errno != errno.EROFS: out.append((folder, error.errno))
    open("/sandbox/x", "w").close()
    return out
"""
    assert calls(sandbox, code, "assert f() == [], f()").outcomes == ("passed",)


HOGS = {
    "a range in the grader": ("def f(): return range(10**8)", "list(f())"),
    "a large number of items": ("def f(): return 10**9", "list(range(f()))"),
    "length of a lie": (
        "class L:\n    __len__ = lambda s: 10**10\n    __iter__ = lambda s: iter([])\ndef f(): return L()",
        "list(f())",
    ),
    "text, repeated": ("def f(): return 10**10", "'x' * f()"),
    "endless items": ("import itertools\ndef f(): return itertools.repeat('x' * 50000)", "list(f())"),
    "many processes": (
        "import os, time\ndef f():\n    for _ in range(8):\n        try: pid = os.fork()\n        except OSError: continue\n"
        "        if not pid:\n            x = bytearray(200 << 20)\n            time.sleep(9)\n    time.sleep(1)\n    return 1",
        "f()",
    ),
    "many threads": (
        "import threading, time\nkept = []\ndef hog():\n    while True: kept.append(bytearray(1 << 20))\n"
        "def f():\n    for _ in range(4): threading.Thread(target=hog, daemon=True).start()\n    time.sleep(1)\n    return 1",
        "f()",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOGS)
def test_all_processes_of_a_sample_stay_within_its_memory(name: str) -> None:
    code, test = HOGS[name]
    memory_mb = 256
    sandbox = Sandbox(UnitTestsConfig(cpu_s=2, wall_s=3, memory_mb=memory_mb))
    reports: list[Report] = []
    # Engines or clusters of tests before may still be there.
    others = _memory_below(os.getpid()).keys()
    thread = threading.Thread(target=lambda: reports.append(calls(sandbox, code, test)))
    thread.start()
    most = 0
    while thread.is_alive():
        most = max(most, sum(_memory_below(os.getpid(), without=others).values()))
        time.sleep(0.02)
    thread.join()
    assert len(reports) == 1
    # One process has the code, one judges it; the other three are bare interpreters, of 15 MB each.
    assert most < (2 * memory_mb + 3 * 15) << 20


def _memory_below(pid: int, *, without: Collection[int] = ()) -> dict[int, int]:
    """Resident bytes of all descendants of a process but these and theirs; of pages that processes share, each has its
    part.

    A child that has not started its program yet still has the memory of its parent, and is left out.
    """
    own = Path("/proc", str(pid), "cmdline").read_bytes()
    parents: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if (path / "cmdline").read_bytes() != own:
                (shares,) = re.findall(r"^Pss: +(\d+) kB$", (path / "smaps_rollup").read_text(), re.MULTILINE)
                sizes[int(path.name)] = int(shares) << 10
        except (OSError, ValueError):
            continue  # It has ended.
    below, found = {pid}, {pid}
    while found:
        found = {child for child, parent in parents.items() if parent in found} - below - set(without)
        below |= found
    return {child: sizes.get(child, 0) for child in below - {pid}}
