"""Layers of BAGEL that are one in vLLM-Omni's transformer, as the bridge arranges it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["EXPERTS", "FUSED", "held_as"]

EXPERTS = ("", "_moe_gen")
_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")
FUSED: Mapping[str, tuple[str, ...]] = {
    **{f"qkv{expert}": tuple(f"{name}_proj{expert}" for name in "qkv") for expert in EXPERTS},
    **{f"o{expert}": (f"o_proj{expert}",) for expert in EXPERTS},
    "gate_up_proj": ("gate_proj", "up_proj"),
    # Norms of both experts are one layer.
    **{f"{name}.gen_weight": (f"{name}_moe_gen.weight",) for name in _NORMS},
}
"""See `unirl.engines.vllm_omni.bridge.Bridge.fused`."""
_SHARDS: Mapping[int, tuple[str | int | None, ...]] = {1: (None,), 2: (0, 1), 3: ("q", "k", "v")}
"""Number of parts of a layer -> vLLM's names for them."""


def held_as(name: str) -> tuple[str, str | int | None]:
    """The parameter that holds a stored tensor, and as which of its parts."""
    full = f".{name}."
    for end, parts in FUSED.items():
        for part, shard in zip(parts, _SHARDS[len(parts)], strict=True):
            if f".{part}." in full:
                return full.replace(f".{part}.", f".{end}.").strip("."), shard
    return name, None
