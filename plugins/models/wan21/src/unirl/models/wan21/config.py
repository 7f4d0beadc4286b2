"""Settings of the wan21 models, and which checkpoints they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from unirl.core.limits import Reason, limit
from unirl.core.specs.plan import Plan, Stage
from unirl.model_host.diffusion.pipeline_config import PipelineConfig
from unirl.numerics.diffusion.wan_checkpoint import WanTask, features_problems

__all__ = ["FROM_FRAME", "FROM_TEXT", "Wan21Config", "Wan21I2VConfig"]

FROM_TEXT = WanTask(
    from_frame=False, experts=("transformer",), other="wan21-i2v", example="Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
)
FROM_FRAME = WanTask(
    from_frame=True, experts=("transformer",), other="wan21", example="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"
)


@dataclass
class Wan21Config(PipelineConfig):
    decode_batch: int = limit(1, least=0)
    """Videos per VAE call; 0 decodes all at once."""
    task: ClassVar[WanTask] = FROM_TEXT

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """A local checkpoint for another task."""
        yield from super().problems(plan, stage)
        if stage is not None:
            yield from self.task.problems(self.path)


@dataclass
class Wan21I2VConfig(Wan21Config):
    task: ClassVar[WanTask] = FROM_FRAME

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """The same, and a length of prompts that a local checkpoint cannot take."""
        yield from super().problems(plan, stage)
        if stage is not None:
            yield from features_problems(self.path, stage.sampling)
