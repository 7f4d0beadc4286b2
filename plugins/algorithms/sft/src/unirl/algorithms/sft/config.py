"""Settings of flow-matching regression."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import one_of
from unirl.numerics.forward_config import ForwardConfig

__all__ = ["SftConfig"]


@dataclass
class SftConfig(ForwardConfig):
    point_levels: str = one_of("uniform", "logit-normal", "schedule", default="logit-normal")
    """Distribution of the noise levels: `logit-normal`, which prefers the middle, as in the training of Stable
    Diffusion 3; `uniform` over [0, 1]; `schedule`, the levels that the sampler visits."""
