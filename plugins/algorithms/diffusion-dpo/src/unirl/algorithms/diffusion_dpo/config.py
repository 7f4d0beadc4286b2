"""Settings of Diffusion-DPO."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.numerics.forward_config import ForwardConfig

__all__ = ["DiffusionDpoConfig"]


@dataclass
class DiffusionDpoConfig(ForwardConfig):
    beta: float = limit(2000.0, above=0)
    """Strength of the pull to the reference policy: the larger, the closer the model stays. Errors are averaged over a
    latent's elements. The paper has 2000 for SD 1.5 and 5000 for SDXL."""
    pairs_per_group: int = limit(1, least=1)
    """Pairs made of each group: the best sample with the worst one, the second best with the second worst, and so on,
    as far as their rewards differ."""
