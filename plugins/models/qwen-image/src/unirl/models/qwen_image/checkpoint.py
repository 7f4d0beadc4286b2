# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Checkpoints of Qwen-Image, Qwen-Image-Edit and Qwen-Image-Edit-Plus in the diffusers layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from unirl.core.errors import RecipeError
from unirl.model_host.diffusion.pipeline_config import PipelineConfig
from unirl.model_host.diffusion.pipeline_files import PipelineFiles, check_prefix
from unirl.model_host.model_files import check_vocabulary, read_json

from .sources import images_and_text

__all__ = ["EDIT_FILES", "EDIT_PLUS_FILES", "FILES", "load_processor"]

_FURTHER_INPUTS = ("guidance_embeds", "use_additional_t_cond")
_FAMILY = {
    "QwenImagePipeline": "qwen-image",
    "QwenImageEditPipeline": "qwen-image-edit",
    "QwenImageEditPlusPipeline": "qwen-image-edit-plus",
}
_VOCABULARIES = ("tokenizer.json", "vocab.json")


def load_processor(folder: Path) -> Any:
    """That of the checkpoint, which scales images with Pillow."""
    place = folder / "processor"
    check_vocabulary(folder, _VOCABULARIES, part="processor")
    return images_and_text(str(place))


@dataclass(frozen=True, kw_only=True)
class _Files(PipelineFiles):
    """Those of a pipeline with a template around the prompt, of which it drops the beginning after encoding."""

    def load(self, folder: Path, config: PipelineConfig, parts: Mapping[str, Any]) -> Any:
        """Raises RecipeError also for a tokenizer that does not fit what the pipeline drops of its template."""
        pipeline = super().load(folder, config, parts)
        tokenizer: Any = pipeline.processor.tokenizer if "processor" in self.parts else pipeline.tokenizer
        prefix = pipeline.prompt_template_encode.split("{}")[0].split("<|vision_start|>")[0]
        dropped, instead = pipeline.prompt_template_encode_start_idx, "Use the tokenizer of Qwen2.5-VL."
        check_prefix(folder, pipeline, prefix, dropped=dropped, instead=instead, tokenizer=tokenizer, either_side=True)
        return pipeline


def _check(folder: Path, index: Mapping[str, Any]) -> None:
    del index
    settings = read_json(folder / "transformer" / "config.json")
    expected = [key for key in _FURTHER_INPUTS if settings.get(key)]
    if expected:
        raise RecipeError(
            f"model.path: {str(folder)!r} has a transformer with {expected[0]} = true, an input that its pipeline "
            "does not have here. Use a checkpoint without it, such as 'Qwen/Qwen-Image' or 'Qwen/Qwen-Image-Edit'."
        )


FILES = _Files(
    pipeline=QwenImagePipeline,
    model="qwen-image",
    title="Qwen-Image",
    example="Qwen/Qwen-Image",
    vocabularies=_VOCABULARIES,
    check=_check,
    siblings=_FAMILY,
)
EDIT_FILES = replace(
    FILES,
    pipeline=QwenImageEditPipeline,
    model="qwen-image-edit",
    title="Qwen-Image-Edit",
    example="Qwen/Qwen-Image-Edit",
    parts=(*FILES.parts, "processor"),
    components=lambda folder: {"processor": load_processor(folder)},
)
EDIT_PLUS_FILES = replace(
    EDIT_FILES,
    pipeline=QwenImageEditPlusPipeline,
    model="qwen-image-edit-plus",
    title="Qwen-Image-Edit-Plus",
    example="Qwen/Qwen-Image-Edit-2509",
)
