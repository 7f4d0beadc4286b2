"""Settings of the hunyuan-video model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from unirl.core.acceleration import NARROW, Acceleration
from unirl.core.limits import Reason, limit
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_config import Parts, PipelineConfig
from unirl.model_host.diffusion.sizes import Sizes

__all__ = ["HunyuanVideoConfig", "HunyuanVideoOptions"]


@dataclass
class HunyuanVideoConfig(PipelineConfig):
    decode_batch: int = limit(1, least=0)
    """Videos per VAE call; 0 decodes all at once."""

    # The guidance scale is rounded at a thousand times its size, before its sine is taken.
    accelerations: ClassVar[Mapping[str, Acceleration]] = dict.fromkeys(
        ("dtype", "autocast"), Acceleration(scope="both", error={dtype: 2 * error for dtype, error in NARROW.items()})
    )

    def sizes(self, part: Parts) -> Sizes:
        vae = part("vae")
        # Absent in older checkpoints: the defaults are those of diffusers' class.
        factor, rate = vae.get("spatial_compression_ratio", 8), vae.get("temporal_compression_ratio", 4)
        return Sizes(factor=factor, unit=factor * part("transformer")["patch_size"], rate=rate, frame_step=rate)

    def unfit(self, sampling: LatentSamplingConfig, part: Parts) -> Iterator[Reason]:
        """The same, and guidance, which is distilled into the weights."""
        yield from super().unfit(sampling, part)
        if sampling.is_guided:
            text = (
                f"got {sampling.guidance_scale:g}; HunyuanVideo 1.0 has its guidance distilled into its weights. Set "
                "it to 1, and choose sampling.options.embedded_guidance."
            )
            yield Reason(key=".guidance_scale", text=text)


@dataclass
class HunyuanVideoOptions:
    """`sampling.options` of its videos."""

    embedded_guidance: float = limit(6.0, least=0, most=1000)
    """Guidance scale that the transformer is told; the default is the pipeline's."""
