# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Checkpoints of Qwen-Image in the diffusers layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import QwenImagePipeline
from unirl.core.errors import RecipeError
from unirl.numerics.diffusion.pipeline_config import PipelineConfig
from unirl.numerics.diffusion.pipeline_files import PipelineFiles
from unirl.numerics.model_files import read_json

__all__ = ["FILES", "load_pipeline"]

_FURTHER_INPUTS = ("guidance_embeds", "use_additional_t_cond")


def _check(folder: Path, index: Mapping[str, Any]) -> None:
    del index
    settings = read_json(folder / "transformer" / "config.json")
    expected = [key for key in _FURTHER_INPUTS if settings.get(key)]
    if expected:
        raise RecipeError(
            f"model.path: {str(folder)!r} has a transformer with {expected[0]} = true, an input that text to image "
            "does not have. Use a checkpoint without it, such as 'Qwen/Qwen-Image'."
        )


FILES = PipelineFiles(
    pipeline=QwenImagePipeline,
    model="qwen-image",
    title="Qwen-Image",
    example="Qwen/Qwen-Image",
    vocabularies=("tokenizer.json", "vocab.json"),
    check=_check,
)


def load_pipeline(folder: Path, config: PipelineConfig, parts: Mapping[str, Any]) -> QwenImagePipeline:
    """See `PipelineFiles.load`; raises RecipeError also for a tokenizer that the template does not fit."""
    pipeline = FILES.load(folder, config, parts)
    _check_prefix(pipeline, folder)
    return pipeline


def _check_prefix(pipeline: QwenImagePipeline, folder: Path) -> None:
    """Raises RecipeError unless what stands before the prompt is as many tokens as the pipeline drops after encoding.

    With another vocabulary a part of the template would be left in, or the beginning of every prompt cut off.
    """
    tokenizer: Any = pipeline.tokenizer
    prefix = pipeline.prompt_template_encode.split("{}")[0]
    result, dropped = len(tokenizer(prefix)["input_ids"]), pipeline.prompt_template_encode_start_idx
    if result != dropped:
        raise RecipeError(
            f"model.path: the tokenizer in {str(folder)!r} makes {result} tokens of the text before the prompt, and "
            f"QwenImagePipeline drops {dropped}. Use the tokenizer of Qwen2.5-VL."
        )
