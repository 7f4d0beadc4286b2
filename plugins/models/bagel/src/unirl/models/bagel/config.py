"""Settings of the bagel model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.core.limits import Reason, one_of
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.model_host.diffusion.sizes import Sizes
from unirl.model_host.model_files import read_json
from unirl.model_host.unified.config import UnifiedConfig

from .checkpoint import check_layout

if TYPE_CHECKING:
    from unirl.core.specs.plan import Stage

__all__ = ["BagelConfig", "ImageOptions", "TextOptions", "image_sizes"]


@dataclass
class BagelConfig(UnifiedConfig):
    """`path` is a folder in the published layout, or a hub id such as `ByteDance-Seed/BAGEL-7B-MoT`."""

    def check_layout(self, folder: Path) -> None:
        check_layout(folder)

    def size_problems(self, folder: Path, sampling: LatentSamplingConfig) -> Iterator[Reason]:
        return image_sizes(read_json(folder / "config.json")).problems(sampling)

    def start(self, stage: Stage) -> tuple[tuple[str, Any], ...]:
        sampling = stage.sampling
        if isinstance(sampling, TextSamplingConfig):
            sources = sampling.options.get("sources", "all")
            return ("chat", sampling.chat), ("system_prompt", sampling.system_prompt), ("options.sources", sources)
        prompt = sampling.options.get("system_prompt", "")
        return ("chat", True), ("options.system_prompt", prompt), ("options.sources", "all")


@dataclass
class TextOptions:
    """`sampling.options` of its texts."""

    sources: str = one_of("all", "features", default="all")
    """Source images as VAE latents and ViT features, as images are generated from them, or as ViT features alone, as
    the published pipeline answers questions about them."""


@dataclass
class ImageOptions:
    """`sampling.options` of its images."""

    system_prompt: str = ""
    """Text before all others, that of the text stage that an image continues from; empty for none."""


def image_sizes(settings: Mapping[str, Any]) -> Sizes:
    """Sizes of images, by config.json."""
    factor = settings["vae_config"]["downsample"] * settings.get("latent_patch_size", 2)
    return Sizes(factor=factor, unit=factor, largest=factor * settings.get("max_latent_size", 64))
