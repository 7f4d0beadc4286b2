"""vLLM-Omni's attention on torch's `scaled_dot_product_attention`, which it otherwise uses only on accelerators."""

# vLLM is in the environments of engines alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl

__all__ = ["CpuSdpaBackend", "CpuSdpaImpl"]


class CpuSdpaImpl(SDPAImpl):
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None
    ) -> torch.Tensor:
        """[B, L, heads, dim] each. Masks [B, Lk] are broadcast over queries, as on CUDA."""
        return self.forward_xpu(query, key, value, attn_metadata)


class CpuSdpaBackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[CpuSdpaImpl]:
        return CpuSdpaImpl
