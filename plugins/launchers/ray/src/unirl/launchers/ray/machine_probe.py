"""What the pre-flight check asks of each machine: a process there that looks around and reaches the others."""

from __future__ import annotations

import os
import platform
import re
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from unirl.core.errors import UniRLError
from unirl.core.specs.diagnosis import KEY_DISTS

__all__ = ["Machine", "Probe", "installed_dists"]

SHARED_MEMORY = Path("/dev/shm")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CONNECT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Software and devices of one machine."""

    name: str
    """Host and Ray node; several nodes may share a host."""
    address: str
    python: str
    dists: Mapping[str, str]
    cpus: float
    gpus: float
    devices: tuple[str, ...]
    """Names of the CUDA devices visible to torch."""
    driver: str
    """Version of NVIDIA's driver; empty without one."""
    shared_memory_bytes: int
    """Size of /dev/shm; 0 where there is none."""
    clock_offset_s: float
    """Least difference of its clock from this one's that explains its answer; positive if it is ahead."""
    port: int
    """A free port that could be bound."""


class Probe:
    """Runs on a machine."""

    def facts(self) -> dict[str, Any]:
        try:
            import torch

            devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        except ImportError:
            devices = []
        return {
            "python": platform.python_version(),
            "dists": installed_dists(),
            "devices": tuple(devices),
            "driver": driver_version(_text(NVIDIA_DRIVER)),
            "shared_memory_bytes": _size(SHARED_MEMORY),
        }

    def clock(self) -> float:
        return time.time()

    def listen(self, host: str) -> int:
        """Bind a free port of this machine."""
        self._listener = socket.create_server((host, 0))
        return self._listener.getsockname()[1]

    def reach(self, host: str, port: int) -> str:
        """Connect to another machine; returns the error, empty on success."""
        try:
            with closing(socket.create_connection((host, port), timeout=CONNECT_S)):
                return ""
        except OSError as error:
            return _line(error)

    def open_group(self, host: str, world: int, within_s: float) -> tuple[str, int]:
        """Open the rendezvous of a group of `world` machines, as a run does; returns its host and port."""
        from unirl.transfer.weights.group import listen

        self._store, address = listen(host, world, timeout_s=within_s)
        return address

    def join(
        self, own: str, rendezvous: tuple[str, int], *, rank: int, world: int, on_gpu: bool, within_s: float
    ) -> str:
        """Form a group with the other machines, by NCCL on the first GPU or by gloo, and receive 1 MiB from rank 0.

        own: address of this machine.  rendezvous: of rank 0.  Returns the error, empty on success.
        """
        import torch
        from unirl.transfer.weights.group import WeightGroup, interface_of, reach

        if interface := interface_of(own):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        device = torch.device("cuda:0" if on_gpu else "cpu")
        expected = torch.arange(2**17, device=device)
        try:
            store = self._store if rank == 0 else reach(rendezvous, world, timeout_s=within_s)
            group = WeightGroup(store, rank=rank, world=world, device=device, timeout_s=within_s)
            data = expected.clone() if rank == 0 else torch.zeros_like(expected)
            group.wait(group.start(data))
            group.leave()
        except (RuntimeError, UniRLError) as error:
            # c10d's errors are RuntimeErrors.
            return _line(error)
        return "" if torch.equal(data, expected) else "the data that arrived are not those that were sent"


def installed_dists() -> dict[str, str]:
    """Installed versions of the packages that affect a run's results."""
    names = {str(dist.metadata["Name"]) for dist in distributions() if dist.metadata}
    result: dict[str, str] = {}
    for name in sorted({*KEY_DISTS, *(name for name in names if name.startswith("unirl-"))}):
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result


def driver_version(text: str) -> str:
    """Version in the text of the driver's version file: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15`."""
    found = re.search(r"\bModule\b.*?(\d+\.\d+(?:\.\d+)?)", text)
    return found[1] if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _size(folder: Path) -> int:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return disk.f_frsize * disk.f_blocks


def _line(error: Exception) -> str:
    """The error in one line."""
    return " ".join(str(error).split()) or repr(error)
