"""Where a run took place: the machine, the interpreter, the packages, the suite."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

__all__ = ["Environment", "describe_environment", "suite_hash"]

_PACKAGES = ("torch", "numpy", "diffusers", "transformers", "peft", "vllm", "vllm-omni", "sglang", "ray", "veomni")
"""Packages whose versions decide numbers; those that are installed are named."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    python: str
    platform: str
    """System, architecture and C library; a kernel's release says nothing about numbers."""
    num_cpus: int
    devices: tuple[str, ...]
    """Names of the GPUs."""
    packages: Mapping[str, str]


def describe_environment() -> Environment:
    """Of this process. GPUs are named when torch is there already: importing it takes longer than all static claims."""
    torch: Any = sys.modules.get("torch")
    devices: tuple[str, ...] = ()
    if torch is not None:
        devices = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    packages: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        num_cpus=os.cpu_count() or 0,
        devices=devices,
        packages=packages,
    )


def suite_hash() -> str:
    """16 hex digits over the sources of the claims and of what they work with."""
    whole = hashlib.sha256()
    package = files("unirl.conformance")
    for folder in ("suite", "benches", "workbench"):
        for file in sorted(package.joinpath(folder).iterdir(), key=lambda file: file.name):
            if file.name.endswith(".py"):
                whole.update(f"{folder}/{file.name}\n".encode())
                whole.update(file.read_bytes())
    return whole.hexdigest()[:16]
