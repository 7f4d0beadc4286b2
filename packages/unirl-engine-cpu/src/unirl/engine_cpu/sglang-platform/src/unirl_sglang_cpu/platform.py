"""The platform: SGLang's CPU device operations, without any GPU capability."""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from .unpinned import let_memory_be_unpinned

__all__ = ["CpuPlatform"]


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Suffix of the method used by layers with several implementations: `forward_native`, in PyTorch."""
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def empty_cache(self) -> None:
        """No-op: torch does not cache host memory. SGLang's own runs the garbage collector at each weight sync, which
        takes seconds and frees nothing that reference counting has not freed."""

    def init_backend(self) -> None:
        """Called by SGLang once in each of its workers."""
        let_memory_be_unpinned()
