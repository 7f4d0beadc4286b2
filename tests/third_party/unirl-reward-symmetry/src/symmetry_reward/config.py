"""Settings of this reward."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import one_of
from unirl.core.specs.part_config import RewardConfig

__all__ = ["AXES", "SymmetryConfig"]

AXES = ("left-right", "top-bottom", "both")


@dataclass
class SymmetryConfig(RewardConfig):
    axis: str = one_of(*AXES, default="left-right")
    """Direction of the mirroring: `left-right`, `top-bottom`, or `both`, which is the mean of the two."""
