"""CPU platform for vLLM-Omni's diffusion pipelines: an entry point in its group `vllm_omni.platform_plugins`.

vLLM itself computes on CPUs; vLLM-Omni has platforms for accelerators alone. Here its platform is vLLM's own for CPUs
with what vLLM-Omni asks besides. Several ranks go over gloo: `UNIRL_VLLM_OMNI_CPU_DEVICES` says how many devices there
are.
"""

# vLLM is in the environments of engines alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

__all__ = ["register"]


def register() -> str | None:
    """What vLLM-Omni calls: the platform's class on a machine without a GPU. Light, for vLLM-Omni imports itself
    here."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not torch.cuda.is_available():
        return "unirl_vllm_omni_cpu.platform.CpuOmniPlatform"
    return None
