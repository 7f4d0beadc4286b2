"""The platform: SGLang's own operations of a CPU device, with every capability of a GPU left out."""

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
        """Of the method that layers with several implementations use: `forward_native`, in PyTorch."""
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def empty_cache(self) -> None:
        """Nothing: torch keeps no memory of a CPU. SGLang's own collects garbage here, at each sync of weights, which
        walks all that its imports have made: seconds, for nothing that counting references had left."""

    def init_backend(self) -> None:
        """SGLang calls it once in each of its workers."""
        let_memory_be_unpinned()
