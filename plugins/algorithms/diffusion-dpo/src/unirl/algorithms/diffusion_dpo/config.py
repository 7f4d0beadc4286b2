"""Settings of Diffusion-DPO."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.numerics.forward_config import ForwardConfig
from unirl.numerics.loss.compared_samples import PairsConfig

__all__ = ["DiffusionDpoConfig"]


@dataclass
class DiffusionDpoConfig(ForwardConfig, PairsConfig):
    beta: float = limit(2000.0, above=0)
    """Strength of the pull to the reference policy: the larger, the closer the model stays. Errors are averaged over a
    latent's elements. The paper has 2000 for SD 1.5 and 5000 for SDXL."""
