"""Plugin that SGLang calls in each of its processes: replaces the stock pipeline with the rollout pipeline."""

from __future__ import annotations

import os

__all__ = ["BRIDGE_VARIABLE", "register"]

BRIDGE_VARIABLE = "UNIRL_SGLANG_BRIDGE"
"""Environment variable with the bridge, as `"module:attribute"`; without it SGLang is unchanged."""


def register() -> None:
    """Register the bridge's pipeline. Its source is in the folder of UniRL's server."""
    if name := os.environ.get(BRIDGE_VARIABLE):
        from unirl.engines.sglang.pipeline import register_rollouts  # type: ignore[import-not-found]

        register_rollouts(name)
