"""The platform: vLLM's CPU platform, with the additional methods that vLLM-Omni needs."""

# vLLM is in the environments of engines alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from vllm.config.kernel import IrOpPriorityConfig
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

__all__ = ["CpuOmniPlatform"]

DEVICES_VARIABLE = "UNIRL_VLLM_OMNI_CPU_DEVICES"


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """The CPU for vLLM; an out-of-tree platform for vLLM-Omni, which has no name for it."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend and selected_backend.upper() not in ("TORCH_SDPA", "SDPA"):
            raise ValueError(
                f"attention backend: got {selected_backend!r}, expected TORCH_SDPA, the only one on a CPU."
            )
        return "unirl_vllm_omni_cpu.attention.CpuSdpaBackend"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return "unirl_vllm_omni_cpu.worker.CpuDiffusionWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_diffusion_dense_flash_attention(cls) -> bool:
        return False

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: Any) -> IrOpPriorityConfig:
        return IrOpPriorityConfig.with_default(["native"])

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return int(os.environ.get(DEVICES_VARIABLE, "1"))

    @classmethod
    def get_device_version(cls) -> None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        """No-op: nothing runs asynchronously."""

    @classmethod
    def empty_cache(cls) -> None:
        """torch does not cache host memory."""

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    # Allocator statistics, read after every forward; torch has none for host memory.

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        return None

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def get_current_memory_usage(cls, device: torch.device | None = None) -> int:
        return 0
