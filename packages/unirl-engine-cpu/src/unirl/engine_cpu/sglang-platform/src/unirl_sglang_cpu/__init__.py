"""CPU platform for SGLang in plain PyTorch, without `sgl_kernel`, which has no wheel for it.

SGLang finds it through its entry points `sglang.srt.platforms`; `SGLANG_PLATFORM=unirl-cpu` selects it.
"""

from __future__ import annotations

from importlib.metadata import version

__all__ = ["TESTED", "activate"]

TESTED = "0.5.23"
"""Tested version of SGLang; its platform interface changes between versions."""


def activate() -> str | None:
    """Name of the platform's class; None on a machine with a GPU. Raises RuntimeError for another version of SGLang."""
    import torch

    if torch.cuda.is_available():
        return None
    result = version("sglang")
    if result.partition("+")[0] != TESTED:
        raise RuntimeError(
            f"got SGLang {result}, expected {TESTED}, with which this CPU platform was tested. Install that version."
        )
    return "unirl_sglang_cpu.platform:CpuPlatform"
