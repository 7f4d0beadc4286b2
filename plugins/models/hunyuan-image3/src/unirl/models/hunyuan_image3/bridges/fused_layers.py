"""Layers of HunyuanImage-3.0 that have other names in vLLM-Omni's transformer, as the bridge arranges it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FUSED"]

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj.rows": ("qkv_proj",),
    "gate_up_proj.rows": ("gate_and_up_proj",),
    "experts.routed_experts.w13_weight": ("experts.gate_up_proj",),
    "experts.routed_experts.w2_weight": ("experts.down_proj",),
}
"""See `unirl.engines.vllm_omni.bridge.Bridge.fused`. All are renamed; parts of the first two keep their order."""
