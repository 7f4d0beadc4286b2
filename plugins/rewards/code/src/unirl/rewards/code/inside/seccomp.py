"""System calls that processes of a sandbox give up, for good.

Limits of resources count one process each, and memory that is not in its address space not at all. They become limits
of a whole sample by what is forbidden here: more processes, memory elsewhere, new namespaces, and reaching others.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

from . import jail

__all__ = ["forbid_hidden_memory", "forbid_processes"]

PR_SET_SECCOMP, MODE_FILTER = 22, 2
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
LOAD, EQUAL, AT_LEAST, MASK, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
CLONE_THREAD = 0x10000
X32 = 0x40000000

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of `_NUMBERS` and the kernel's number of the architecture."""

_NUMBERS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fanotify_init": (300, 262),
    "fcntl": (72, 25),
    "fork": (57, None),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioprio_set": (251, 30),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "setns": (308, 268),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "setsid": (112, 157),
    "shmget": (29, 194),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vfork": (58, None),
}
"""On x86_64 and on aarch64, from the kernel's tables of system calls."""

_MEMORY = ("shmget", "msgget", "semget", "mq_open", "memfd_create", "memfd_secret", "io_uring_setup", "userfaultfd")
_KERNEL = ("unshare", "setns", "bpf", "perf_event_open", "add_key", "request_key", "keyctl", "fanotify_init")
_MEMORY_OF_OTHERS = ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "process_madvise")
_OTHERS = (
    "fork",
    "vfork",
    "setsid",
    "setpgid",
    "tkill",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "pidfd_send_signal",
    "process_mrelease",
    "setpriority",
    "ioprio_set",
    "migrate_pages",
    "move_pages",
    "sched_setaffinity",
    "sched_setattr",
    "sched_setparam",
    "sched_setscheduler",
)
_SIGNAL_OWNERS = {"fcntl": (8, 10, 15), "ioctl": (0x8901, 0x8902)}
"""F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN and SIOCSPGRP: a file that is ready sends any signal to any process."""


def forbid_hidden_memory() -> None:
    """Refuse memory that no limit counts, memory of others, and namespaces: in a new one, file systems have any size.

    Needs `jail.drop_privileges`. Raises OSError where the kernel has no filters, or this machine no table of calls.
    """
    _install([rule for name in (*_MEMORY, *_KERNEL, *_MEMORY_OF_OTHERS) for rule in _refused(name)])


def forbid_processes() -> None:
    """Refuse to start processes (threads may be), to leave the group, and to signal or limit any process but this."""
    rules = [rule for name in _OTHERS for rule in _refused(name)]
    # Arguments of clone3 are in memory, out of a filter's reach; where it is missing, threads are started by clone.
    rules += _refused("clone3", ENOSYS)
    rules += _when("clone", 0, [(MASK, 0, 0, CLONE_THREAD), (EQUAL, 0, 1, 0), _refusal(EPERM)])
    own = os.getpid()
    for name, allowed in (("kill", [own]), ("tgkill", [own]), ("prlimit64", [0, own])):
        pass_over = [(EQUAL, len(allowed) - place, 0, pid) for place, pid in enumerate(allowed)]
        rules += _when(name, 0, [*pass_over, _refusal(EPERM)])
    for name, commands in _SIGNAL_OWNERS.items():
        rules += _when(name, 1, [rule for command in commands for rule in ((EQUAL, 0, 1, command), _refusal(EPERM))])
    _install(rules)


Rule = tuple[int, int, int, int]
"""An instruction of classic BPF: code, jumps if true and if false, constant."""


def _refusal(error: int) -> Rule:
    return RETURN, 0, 0, REFUSE | error


def _refused(name: str, error: int = EPERM) -> list[Rule]:
    number = _number(name)
    return [] if number is None else [(EQUAL, 0, 1, number), _refusal(error)]


def _when(name: str, argument: int, rules: list[Rule]) -> list[Rule]:
    """For one call: `rules` on the low half of an argument; what they let through is allowed."""
    body = [(LOAD, 0, 0, ARGUMENTS + 8 * argument), *rules, (RETURN, 0, 0, ALLOW)]
    number = _number(name)
    return [] if number is None else [(EQUAL, 0, len(body), number), *body]


def _number(name: str) -> int | None:
    return _NUMBERS[name][_machine()[0]]


def _machine() -> tuple[int, int]:
    name = platform.machine()
    if name not in MACHINES:
        raise OSError(ENOSYS, f"seccomp: got the machine {name!r}, expected one of {', '.join(MACHINES)}")
    return MACHINES[name]


def _install(rules: list[Rule]) -> None:
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, _machine()[1]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    program += [(AT_LEAST, 0, 1, X32), _refusal(EPERM), *rules, (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    jail.call("prctl", PR_SET_SECCOMP, MODE_FILTER, header, 0, 0)
