"""What SGLang calls in each of its processes: the pipeline for rollouts takes the place of the stock one."""

from __future__ import annotations

import os

__all__ = ["BRIDGE_VARIABLE", "register"]

BRIDGE_VARIABLE = "UNIRL_SGLANG_BRIDGE"
"""Environment variable that names the bridge, as `"module:attribute"`; without it, SGLang stays as it is."""


def register() -> None:
    """Register the pipeline of the bridge. The source of it lies where UniRL's server was started from."""
    if name := os.environ.get(BRIDGE_VARIABLE):
        from unirl.engines.sglang.pipeline import register_rollouts  # type: ignore[import-not-found]

        register_rollouts(name)
