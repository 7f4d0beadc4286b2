"""Settings of the flux2-klein model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unirl.core.limits import Reason
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_config import Parts, PipelineConfig
from unirl.model_host.diffusion.sizes import Sizes

__all__ = ["EXAMPLE", "PATCH", "Flux2KleinConfig"]

EXAMPLE = "black-forest-labs/FLUX.2-klein-base-4B"
"""A base checkpoint, which is not distilled."""
PATCH = 2
"""Side of the patches of the VAE's latents that are one latent here."""


@dataclass
class Flux2KleinConfig(PipelineConfig):
    """The settings shared by all models in the diffusers layout."""

    def sizes(self, part: Parts) -> Sizes:
        # A latent is the VAE's, in patches.
        unit = PATCH * 2 ** (len(part("vae")["block_out_channels"]) - 1)
        return Sizes(factor=unit, unit=unit)

    def unfit(self, sampling: LatentSamplingConfig, part: Parts) -> Iterator[Reason]:
        """The same, and guidance of a distilled checkpoint."""
        yield from super().unfit(sampling, part)
        if part("").get("is_distilled") and sampling.guidance_scale != 1.0:
            text = (
                f"got {sampling.guidance_scale:g} for a distilled checkpoint, which has its guidance built in; "
                f"expected 1. Use a base checkpoint, such as {EXAMPLE!r}."
            )
            yield Reason(key=".guidance_scale", text=text)
