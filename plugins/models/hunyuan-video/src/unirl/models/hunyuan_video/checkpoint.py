# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Checkpoints of HunyuanVideo 1.0 in the diffusers layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import HunyuanVideoPipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from unirl.core.errors import RecipeError
from unirl.model_host.diffusion.pipeline_config import PipelineConfig
from unirl.model_host.diffusion.pipeline_files import PipelineFiles, check_prefix
from unirl.model_host.model_files import check_vocabulary, read_json

__all__ = ["FILES"]

_EXAMPLE = "hunyuanvideo-community/HunyuanVideo"
_VOCABULARIES = ("tokenizer.json", "vocab.json")


@dataclass(frozen=True, kw_only=True)
class _Files(PipelineFiles):
    def load(self, folder: Path, config: PipelineConfig, parts: Mapping[str, Any]) -> Any:
        """Raises RecipeError also for a tokenizer that does not fit what the pipeline drops of its template."""
        pipeline = super().load(folder, config, parts)
        prefix = str(DEFAULT_PROMPT_TEMPLATE["template"]).split("{}")[0]
        dropped = int(str(DEFAULT_PROMPT_TEMPLATE["crop_start"]))
        instead = "Use the tokenizer of LLaVA on Llama 3."
        check_prefix(folder, pipeline, prefix, dropped=dropped, instead=instead)
        return pipeline


def _check(folder: Path, index: Mapping[str, Any]) -> None:
    del index
    check_vocabulary(folder, _VOCABULARIES, part="tokenizer_2")
    settings = read_json(folder / "transformer" / "config.json")
    reasons = {
        "no guidance_embeds, so it is not told a guidance scale": not settings.get("guidance_embeds", True),
        "an image_condition_type, for image to video": bool(settings.get("image_condition_type")),
    }
    for reason, holds in reasons.items():
        if holds:
            raise RecipeError(
                f"model.path: the transformer in {str(folder)!r} has {reason}; expected that of HunyuanVideo 1.0 for "
                f"text to video, such as {_EXAMPLE!r}."
            )


FILES = _Files(
    pipeline=HunyuanVideoPipeline,
    model="hunyuan-video",
    title="HunyuanVideo 1.0",
    example=_EXAMPLE,
    vocabularies=_VOCABULARIES,
    check=_check,
    parts=("transformer", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "scheduler"),
    encoders=("text_encoder", "text_encoder_2"),
    hint=f"{_EXAMPLE!r} is in that layout",
    siblings={
        "HunyuanVideo15Pipeline": "hunyuan-video15",
        "HunyuanVideo15ImageToVideoPipeline": "hunyuan-video15-i2v",
        "HunyuanSkyreelsImageToVideoPipeline": "diffusers",
    },
)
