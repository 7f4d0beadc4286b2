"""Settings of the hunyuan-image3 model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.core.limits import Reason, limit, one_of
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.model_host.model_files import read_json
from unirl.model_host.unified.config import UnifiedConfig

from .checkpoint import sizes_of
from .resolutions import NUM_RATIOS, Resolutions

if TYPE_CHECKING:
    from unirl.core.specs.plan import Stage

__all__ = ["HunyuanImageConfig", "ImageOptions", "TextOptions", "resolutions"]


@dataclass
class HunyuanImageConfig(UnifiedConfig):
    """`path` is a folder in the published layout, or a hub id such as `tencent/HunyuanImage-3.0`."""

    decode_batch: int = limit(1, least=0)
    """Images per VAE call, each of which is decoded as four frames; 0 decodes all at once."""

    def check_layout(self, folder: Path) -> None:
        sizes_of(folder)

    def size_problems(self, folder: Path, sampling: LatentSamplingConfig) -> Iterator[Reason]:
        vocabulary = {one["content"] for one in read_json(folder / "tokenizer.json")["added_tokens"]}
        return resolutions(read_json(folder / "config.json"), vocabulary).problems(sampling)

    def start(self, stage: Stage) -> tuple[tuple[str, Any], ...]:
        sampling = stage.sampling
        begin: str = sampling.options.get("begin", "")
        if isinstance(sampling, TextSamplingConfig):
            return ("chat", sampling.chat), ("system_prompt", sampling.system_prompt), ("options.begin", begin)
        prompt: str = sampling.options.get("system_prompt", "")
        return ("chat", True), ("options.system_prompt", prompt), ("options.begin", begin)


@dataclass
class TextOptions:
    """`sampling.options` of its texts."""

    begin: str = one_of("", "think", "recaption", default="")
    """Tag that the model's first text begins with, `<think>` or `<recaption>`; `<recaption>` is then forced after
    `</think>`. Empty for none."""


@dataclass
class ImageOptions:
    """`sampling.options` of its images."""

    system_prompt: str = ""
    """Text before all others, that of the text stage that an image continues from; empty for none."""
    begin: str = one_of("", "think", "recaption", default="")
    """That of the text stage that an image continues from."""
    cfg_tokens: int = limit(32, least=1)
    """Tokens `<cfg>` in place of an empty text, such as that of the negative branch of guidance."""


def resolutions(settings: Mapping[str, Any], vocabulary: Any) -> Resolutions:
    """Sizes of images by config.json, and by the tokens of a checkpoint."""
    return Resolutions(
        base=settings["image_base_size"],
        unit=settings["vae"]["ffactor_spatial"] * settings.get("patch_size", 1),
        has_more=f"<img_ratio_{NUM_RATIOS}>" in vocabulary,
    )
