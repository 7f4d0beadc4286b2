"""Settings of the Wan models, and the settings that a local checkpoint rules out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.plan import Plan, Stage
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_config import PipelineConfig
from unirl.model_host.model_files import read_json

from .checkpoints import WAN21, WAN21_I2V, WAN22, WAN22_I2V, WanCheckpoints
from .prompts import FEATURES_LENGTH, wrong_length

__all__ = ["Wan21Config", "Wan21I2VConfig", "Wan22Config", "Wan22I2VConfig", "WanConfig"]


@dataclass
class WanConfig(PipelineConfig):
    decode_batch: int = limit(1, least=0)
    """Videos per VAE call; 0 decodes all at once."""
    checkpoints: ClassVar[WanCheckpoints]

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """A local checkpoint of another model."""
        yield from super().problems(plan, stage)
        if stage is not None:
            yield from self.checkpoints.problems(self.path)


@dataclass
class Wan21Config(WanConfig):
    checkpoints: ClassVar[WanCheckpoints] = WAN21


@dataclass
class Wan21I2VConfig(WanConfig):
    checkpoints: ClassVar[WanCheckpoints] = WAN21_I2V

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """The same, and a length of prompts that a checkpoint with features of the first frame does not take."""
        yield from super().problems(plan, stage)
        sampling, file = stage.sampling if stage else None, Path(self.path).expanduser() / "transformer" / "config.json"
        if not isinstance(sampling, LatentSamplingConfig) or sampling.max_sequence_length == FEATURES_LENGTH:
            return
        if file.is_file() and read_json(file).get("image_dim"):
            yield Reason(key="sampling.max_sequence_length", text=wrong_length(sampling.max_sequence_length))


@dataclass
class Wan22Config(WanConfig):
    experts: str = one_of("both", "high", "low", default="both")
    """Which experts train: `both`, that for high noise, or that for low noise. The other one is frozen."""
    checkpoints: ClassVar[WanCheckpoints] = WAN22

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """The same, and scales of guidance that change at another sigma than the experts."""
        yield from super().problems(plan, stage)
        sampling, file = stage.sampling if stage else None, Path(self.path).expanduser() / "model_index.json"
        if not isinstance(sampling, LatentSamplingConfig) or sampling.guidance_mode != "two-scale":
            return
        changes = sampling.guidance_options.get("boundary", 0.875)
        boundary = read_json(file).get("boundary_ratio") if file.is_file() else None
        if boundary is not None and changes != boundary:
            yield Reason(
                key="sampling.guidance_options.boundary",
                text=f"got {changes:g}, but the experts of {self.path!r} change at sigma {boundary:g}. Set it to that.",
            )


@dataclass
class Wan22I2VConfig(Wan22Config):
    checkpoints: ClassVar[WanCheckpoints] = WAN22_I2V
