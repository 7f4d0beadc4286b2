"""Namespaces, limits and privileges of Linux, set by a process for itself."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys
import sysconfig
from pathlib import Path
from typing import Any

__all__ = ["call", "drop_privileges", "enter", "has_route", "hide_memory", "limit"]

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV, MNT_DETACH = 4096, 16384, 1 << 18, 2, 4, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY_NOSUID_NODEV = 442, -100, 0x8000, 1 | 2 | 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, SIGKILL = 1, 4, 24, 38, 9
NOBODY = 65534
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
"""Where shared libraries of extension modules lie."""

_libc: Any = ctypes.CDLL(None, use_errno=True)


def enter(folder: str, *, packages: list[str], disk_bytes: int) -> None:
    """Move into new namespaces: no network, no processes but its own, no files but Python's, read-only, and `folder`.

    Returns in a child, which is process 1 of its namespace: when it ends, the kernel kills everything in it. The caller
    waits for the child and exits with it. folder: an empty one; a read-only file system in memory replaces it and
    becomes the root, whose /sandbox, of `disk_bytes`, is the current folder.
    Raises OSError, with the call that the kernel refused.
    """
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET | (NEWUSER if uid else 0))
    if uid:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _root(folder, packages=packages, disk_bytes=disk_bytes)
    if not uid:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # The kernel counts processes by user and by user namespace: with its own namespace, this sandbox counts alone.
        call("unshare", NEWUSER)
    call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def _root(folder: str, *, packages: list[str], disk_bytes: int) -> None:
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    _memory_files(Path(folder), size_bytes=1 << 20, mode="755")
    paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *LIBRARIES, *packages]
    # Parents first: Debian's Python is inside /usr/lib, which also has the shared libraries that packages need.
    for path in sorted(map(Path, paths)):
        inside = Path(f"{folder}{path}")
        if inside.exists():
            continue
        if path.is_symlink():
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.symlink_to(path.readlink())
        elif path.is_dir():
            inside.mkdir(parents=True)
            call("mount", bytes(path), bytes(inside), None, MS_BIND | MS_REC, None)
            _set_read_only(inside, flags=AT_RECURSIVE)
    null = Path(folder, "dev/null")
    null.parent.mkdir()
    null.touch()
    call("mount", b"/dev/null", bytes(null), None, MS_BIND, None)
    Path(folder, "sandbox").mkdir()
    _memory_files(Path(folder, "sandbox"), size_bytes=disk_bytes, mode="777")
    temporary = Path(folder, "tmp")
    # Packages that the code may import may lie below it.
    if not temporary.exists():
        temporary.symlink_to("sandbox")
    # Before its first folder, Python looks for modules in an archive beside it: nobody may put one there.
    _set_read_only(Path(folder), flags=0)
    os.chdir(folder)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/sandbox")


def _memory_files(folder: Path, *, size_bytes: int, mode: str) -> None:
    options = f"size={size_bytes},nr_inodes=10000,mode={mode}".encode()
    call("mount", b"tmpfs", bytes(folder), b"tmpfs", MS_NOSUID | MS_NODEV, options)


def _set_read_only(folder: Path, *, flags: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, bytes(folder), flags, attributes, ctypes.c_size_t(32))


def hide_memory() -> None:
    """Keep processes of the same user from reading or tracing this one."""
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_privileges() -> None:
    """Give up every capability, for good: no program that is started gains one."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    capability = 0
    # EINVAL after the last one of this kernel; EPERM where there is none to give up.
    while _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    call("capset", header, none)


def limit(**limits: int) -> None:
    """Set resource limits, soft and hard, by the names of `resource` in lower case: `limit(nofile=64)`."""
    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name.upper()}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def has_route() -> bool:
    """Whether packets could leave: an address can be routed to. Nothing is sent."""
    for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))
        except OSError:
            continue
        return True
    return False


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError, with its name, when it returns -1."""
    if getattr(_libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)} (on {sys.platform})")
