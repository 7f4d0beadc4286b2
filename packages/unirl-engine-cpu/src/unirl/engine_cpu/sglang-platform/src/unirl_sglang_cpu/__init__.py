"""A platform with which SGLang computes on a CPU in plain PyTorch, without `sgl_kernel`, for which there is no wheel.

SGLang finds it through its entry points `sglang.srt.platforms`; `SGLANG_PLATFORM=unirl-cpu` chooses it by name.
"""

from __future__ import annotations

from importlib.metadata import version

__all__ = ["TESTED", "activate"]

TESTED = "0.5.23"
"""Version of SGLang that this was tried with; what it takes from a platform changes from one to the next."""


def activate() -> str | None:
    """Name of the platform's class; None where there is a GPU. Raises RuntimeError for another version of SGLang."""
    import torch

    if torch.cuda.is_available():
        return None
    found = version("sglang")
    if found.partition("+")[0] != TESTED:
        raise RuntimeError(
            f"SGLang {found} is installed; this platform for CPUs was tried with {TESTED}. Install that."
        )
    return "unirl_sglang_cpu.platform:CpuPlatform"
