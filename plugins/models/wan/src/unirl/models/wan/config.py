"""Settings of the Wan models, and the settings that a local checkpoint rules out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.plan import Plan, Stage
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_config import Parts, PipelineConfig
from unirl.model_host.diffusion.sizes import Sizes

from .checkpoints import WAN21, WAN21_I2V, WAN22, WAN22_I2V, WanCheckpoints
from .prompts import FEATURES_LENGTH, wrong_length

__all__ = ["Wan21Config", "Wan21I2VConfig", "Wan22Config", "Wan22I2VConfig", "WanConfig"]


@dataclass
class WanConfig(PipelineConfig):
    decode_batch: int = limit(1, least=0)
    """Videos per VAE call; 0 decodes all at once."""
    checkpoints: ClassVar[WanCheckpoints]

    def sizes(self, part: Parts) -> Sizes:
        vae, settings = part("vae"), part("transformer")
        # Absent in older checkpoints: the defaults are those of diffusers' class.
        factor, rate = vae.get("scale_factor_spatial", 8), vae.get("scale_factor_temporal", 4)
        # Rotary positions bound the sides and the frames; tokens of several latent frames, the fewest frames.
        (depth, *_, side), places = settings["patch_size"], settings["rope_max_seq_len"]
        return Sizes(
            factor=factor,
            unit=factor * side,
            largest=places * factor * side,
            rate=rate,
            frame_step=depth * rate,
            least_frames=(depth - 1) * rate + 1,
            most_frames=(depth * places - 1) * rate + 1,
        )

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """A local checkpoint of another model; of one of this model, the same."""
        other = [] if stage is None else list(self.checkpoints.problems(self.path))
        yield from other or super().problems(plan, stage)


@dataclass
class Wan21Config(WanConfig):
    checkpoints: ClassVar[WanCheckpoints] = WAN21


@dataclass
class Wan21I2VConfig(WanConfig):
    checkpoints: ClassVar[WanCheckpoints] = WAN21_I2V

    def unfit(self, sampling: LatentSamplingConfig, part: Parts) -> Iterator[Reason]:
        """The same, and a length of prompts that a checkpoint with features of the first frame does not take."""
        yield from super().unfit(sampling, part)
        if sampling.max_sequence_length != FEATURES_LENGTH and part("transformer").get("image_dim"):
            yield Reason(key=".max_sequence_length", text=wrong_length(sampling.max_sequence_length))


@dataclass
class Wan22Config(WanConfig):
    experts: str = one_of("both", "high", "low", default="both")
    """Which experts train: `both`, that for high noise, or that for low noise. The other one is frozen."""
    checkpoints: ClassVar[WanCheckpoints] = WAN22

    def unfit(self, sampling: LatentSamplingConfig, part: Parts) -> Iterator[Reason]:
        """The same, and scales of guidance that change at another sigma than the experts."""
        yield from super().unfit(sampling, part)
        changes, boundary = sampling.guidance_options.get("boundary", 0.875), part("").get("boundary_ratio")
        if sampling.guidance_mode == "two-scale" and boundary is not None and changes != boundary:
            yield Reason(
                key=".guidance_options.boundary",
                text=f"got {changes:g}, but the experts of {self.path!r} change at sigma {boundary:g}. Set it to that.",
            )


@dataclass
class Wan22I2VConfig(Wan22Config):
    checkpoints: ClassVar[WanCheckpoints] = WAN22_I2V
