"""Settings of the dataset engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.core.specs.part_config import PartConfig
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["DatasetConfig"]


@dataclass
class DatasetConfig(PartConfig):
    path: str = ""
    """Prompt file with the stored samples of this stage. Its rows are drawn at random and replace the run's prompts, so
    that a second stage can generate from those. Empty takes the media of `data.train`."""
    encode_batch: int = limit(8, least=1)
    """Images or videos that the VAE encodes at once."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Sampling settings that nothing samples with, and an evaluation that would score the files."""
        sampling = None if stage is None else stage.sampling
        if isinstance(sampling, LatentSamplingConfig) and sampling.sde.mode != "none":
            yield Reason(
                key="sampling.sde.mode",
                text=f"got {sampling.sde.mode!r}, expected 'none': stored samples have no stochastic steps.",
            )
        if isinstance(sampling, TextSamplingConfig) and sampling.temperature != 1:
            yield Reason(
                key="sampling.temperature",
                text=f"got {sampling.temperature:g}, expected 1: nothing is sampled; losses would be at this "
                "temperature.",
            )
        if isinstance(sampling, TextSamplingConfig) and sampling.stop:
            yield Reason(
                key="sampling.stop",
                text=f"got {sampling.stop}, expected none: stored completions end with a stop token. Leave it out.",
            )
        if isinstance(sampling, LatentSamplingConfig) and sampling.is_guided:
            yield Reason(
                key="sampling.guidance_scale",
                text="got guidance, expected none: nothing is sampled. Set guidance_scale=1.",
            )
        if plan is not None and plan.data.eval and all(each.engine.spec.samples for each in plan.stages):
            yield Reason(
                key="data.eval",
                text=f"got {plan.data.eval!r}, expected none: the dataset engine generates nothing, so an evaluation "
                "would score the files. Evaluate the checkpoint with an engine that generates.",
            )

    def read_files(self) -> Mapping[str, Path]:
        return {".path": Path(self.path).expanduser()} if self.path else {}
