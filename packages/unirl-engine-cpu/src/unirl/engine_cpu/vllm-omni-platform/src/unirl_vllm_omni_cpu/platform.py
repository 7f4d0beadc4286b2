"""The platform: vLLM's for CPUs, and what vLLM-Omni asks besides."""

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
    """For vLLM the CPU; for vLLM-Omni, which has no name for it, a platform from outside."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend and selected_backend.upper() not in ("TORCH_SDPA", "SDPA"):
            raise ValueError(f"attention backend {selected_backend!r} was asked for; a CPU runs TORCH_SDPA alone.")
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
        """Nothing runs on the side."""

    @classmethod
    def empty_cache(cls) -> None:
        """torch keeps no cache of the host's memory."""

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

    # An allocator's statistics, asked for after every forward; torch has none of the host's memory.

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
