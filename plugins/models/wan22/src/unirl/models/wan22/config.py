"""Settings of the wan22 models, and which checkpoints they take."""

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
from unirl.numerics.diffusion.wan_checkpoint import WanTask

__all__ = ["FROM_FRAME", "FROM_TEXT", "Wan22Config", "Wan22I2VConfig"]

_EXPERTS = ("transformer", "transformer_2")
FROM_TEXT = WanTask(from_frame=False, experts=_EXPERTS, other="wan22-i2v", example="Wan-AI/Wan2.2-T2V-A14B-Diffusers")
FROM_FRAME = WanTask(from_frame=True, experts=_EXPERTS, other="wan22", example="Wan-AI/Wan2.2-I2V-A14B-Diffusers")


@dataclass
class Wan22Config(PipelineConfig):
    experts: str = one_of("both", "high", "low", default="both")
    """Which experts train: `both`, that for high noise, or that for low noise. The other one is frozen."""
    decode_batch: int = limit(1, least=0)
    """Videos per VAE call; 0 decodes all at once."""
    task: ClassVar[WanTask] = FROM_TEXT

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """A local checkpoint for another task, and scales of guidance that change at another sigma than its experts."""
        yield from super().problems(plan, stage)
        if stage is not None:
            yield from self.task.problems(self.path)
        index = Path(self.path) / "model_index.json"
        sampling = stage.sampling if stage else None
        if not isinstance(sampling, LatentSamplingConfig) or sampling.guidance_mode != "two-scale":
            return
        changes, boundary = sampling.guidance_options.get("boundary", 0.875), None
        if index.is_file():
            boundary = read_json(index).get("boundary_ratio")
        if boundary is not None and changes != boundary:
            yield Reason(
                key="sampling.guidance_options.boundary",
                text=f"got {changes:g}, but the experts of {self.path!r} change at sigma {boundary:g}. Set it to that.",
            )


@dataclass
class Wan22I2VConfig(Wan22Config):
    task: ClassVar[WanTask] = FROM_FRAME
