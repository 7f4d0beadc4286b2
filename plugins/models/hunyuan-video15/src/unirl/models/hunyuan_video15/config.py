"""Settings of the hunyuan-video15 models, and what a local checkpoint says against them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from unirl.core.limits import Reason, limit
from unirl.core.specs.plan import Plan, Stage
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_config import Parts, PipelineConfig
from unirl.model_host.diffusion.sizes import Sizes
from unirl.model_host.model_files import read_json

__all__ = ["MODELS", "HunyuanVideo15Config", "HunyuanVideo15ImageConfig"]

MODELS = {
    "HunyuanVideo15Pipeline": "hunyuan-video15",
    "HunyuanVideo15ImageToVideoPipeline": "hunyuan-video15-i2v",
}
"""Class name of a pipeline -> the model that loads its checkpoints."""


@dataclass
class HunyuanVideo15Config(PipelineConfig):
    decode_batch: int = limit(1, least=0)
    """Videos per checkpointed piece of decoding; 0 takes all at once. The VAE itself takes one at a time."""

    pipeline: ClassVar[str] = "HunyuanVideo15Pipeline"

    def sizes(self, part: Parts) -> Sizes:
        vae = part("vae")
        # Absent in older checkpoints: the defaults are those of diffusers' class.
        factor, rate = vae.get("spatial_compression_ratio", 16), vae.get("temporal_compression_ratio", 4)
        return Sizes(factor=factor, unit=factor * part("transformer")["patch_size"], rate=rate, frame_step=rate)

    def unfit(self, sampling: LatentSamplingConfig, part: Parts) -> Iterator[Reason]:
        """The same, and guidance on a checkpoint whose guidance is distilled."""
        yield from super().unfit(sampling, part)
        guider = Path(self.path).expanduser() / "guider" / "guider_config.json"
        settings = read_json(guider) if sampling.is_guided and guider.is_file() else {}
        if settings.get("guidance_scale") == 1.0 or settings.get("enabled") is False:
            yield Reason(
                key=".guidance_scale",
                text=f"got {sampling.guidance_scale:g}, but the guidance of {self.path!r} is distilled into its "
                "weights, by the scale 1 of its guider. Set it to 1, or use a checkpoint that is not distilled.",
            )

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """A local checkpoint for the other task; of one for this task, the same."""
        index = Path(self.path).expanduser() / "model_index.json"
        kind = str(read_json(index).get("_class_name")) if index.is_file() else self.pipeline
        if kind in MODELS and kind != self.pipeline:
            yield Reason(key=".path", text=f"{self.path!r} is a checkpoint of {kind!r}. Choose model={MODELS[kind]}.")
        else:
            yield from super().problems(plan, stage)


@dataclass
class HunyuanVideo15ImageConfig(HunyuanVideo15Config):
    pipeline: ClassVar[str] = "HunyuanVideo15ImageToVideoPipeline"
