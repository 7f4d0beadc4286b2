"""The CPU of this machine, as far as it decides the last bits of a number: model and instruction sets in use."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["INSTRUCTION_VARIABLES", "Cpu", "describe_cpu"]

INSTRUCTION_VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
"""Environment variables by which torch, MKL and oneDNN choose their code."""
WIDE = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
"""Flags of /proc/cpuinfo that libraries choose their matrix products by."""
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Cpu:
    model: str
    """Name that the system gives it; a virtual machine may hide the product."""
    instructions: tuple[str, ...]
    """Wide instruction sets that it has, by the flags of Linux; empty where the system does not say."""
    torch: str = ""
    """Instruction set of torch's own kernels, such as `AVX512`; empty while torch is not loaded."""
    variables: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Values of the `INSTRUCTION_VARIABLES` that are set."""

    def __str__(self) -> str:
        has = f" ({', '.join(self.instructions)})" if self.instructions else ""
        used = f", torch uses {self.torch}" if self.torch else ""
        return f"{self.model}{has}{used}" + "".join(f", {key}={value}" for key, value in self.variables.items())


def describe_cpu(*, with_torch: bool) -> Cpu:
    """The CPU of this process. with_torch: also the instruction set of torch's kernels, which imports torch."""
    capability = ""
    if with_torch:
        import torch

        capability = torch.backends.cpu.get_cpu_capability()
    info = _cpu_info()
    flags = (info.get("flags") or info.get("Features") or "").split()
    family = "/".join(info[key] for key in ("cpu family", "model", "stepping") if key in info)
    name = info.get("model name") or platform.processor() or platform.machine()
    return Cpu(
        model=f"{name} {family}" if family else name,
        instructions=tuple(flag for flag in WIDE if flag in flags),
        torch=capability,
        variables={key: os.environ[key] for key in INSTRUCTION_VARIABLES if key in os.environ},
    )


def _cpu_info() -> dict[str, str]:
    """Fields of the first CPU in Linux's /proc/cpuinfo; empty on other systems."""
    if not CPU_INFO.is_file():
        return {}
    first = CPU_INFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
