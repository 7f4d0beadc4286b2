"""CPU platform for vLLM-Omni's diffusion pipelines: an entry point in its group `vllm_omni.platform_plugins`.

vLLM runs on CPUs, but vLLM-Omni only has platforms for accelerators. This one adds the methods that vLLM-Omni needs to
vLLM's CPU platform. Several ranks communicate over gloo: `UNIRL_VLLM_OMNI_CPU_DEVICES` sets the number of devices.
"""

# vLLM is in the environments of engines alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

__all__ = ["register"]


def register() -> str | None:
    """Called by vLLM-Omni: the platform's class on a machine without a GPU. Light, because vLLM-Omni is still being
    imported."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not torch.cuda.is_available():
        return "unirl_vllm_omni_cpu.platform.CpuOmniPlatform"
    return None
