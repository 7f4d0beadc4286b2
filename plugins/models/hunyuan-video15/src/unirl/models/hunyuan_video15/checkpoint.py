# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Checkpoints of HunyuanVideo 1.5 in the diffusers layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from transformers import SiglipImageProcessorPil
from unirl.core.errors import RecipeError
from unirl.model_host.chat_templates import render_chat
from unirl.model_host.diffusion.pipeline_config import PipelineConfig
from unirl.model_host.diffusion.pipeline_files import PipelineFiles, check_prefix
from unirl.model_host.model_files import read_json

from .config import MODELS

__all__ = ["FILES", "IMAGE_FILES"]

_EXAMPLE = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_{}"
_PLAIN = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}
"""Settings of a guider that computes plain classifier-free guidance."""


@dataclass(frozen=True, kw_only=True)
class _Files(PipelineFiles):
    def load(self, folder: Path, config: PipelineConfig, parts: Mapping[str, Any]) -> Any:
        """Raises RecipeError also for a tokenizer that does not fit what the pipeline drops of its template.

        Images are scaled with Pillow for the image encoder, as transformers' default is where torchvision is not
        installed; in engines it is.
        """
        pipeline = super().load(folder, config, parts)
        marker = "\N{OBJECT REPLACEMENT CHARACTER}"
        messages = [{"role": "system", "content": pipeline.system_message}, {"role": "user", "content": marker}]
        rendered = render_chat(pipeline.tokenizer, messages, key="model.path", add_generation_prompt=True)
        dropped = pipeline.prompt_template_encode_start_idx
        instead = "Use the tokenizer and the chat template of Qwen2.5-VL."
        check_prefix(folder, pipeline, rendered.split(marker)[0], dropped=dropped, instead=instead)
        if "feature_extractor" in pipeline.components:
            scaling = SiglipImageProcessorPil.from_pretrained(
                folder / "feature_extractor", local_files_only=True, trust_remote_code=False
            )
            pipeline.register_modules(feature_extractor=scaling)
        return pipeline


def _check(folder: Path, index: Mapping[str, Any]) -> None:
    if read_json(folder / "transformer" / "config.json").get("use_meanflow"):
        raise RecipeError(
            f"model.path: {str(folder)!r} has a transformer with use_meanflow = true, whose velocity depends on the "
            f"next step as well; expected one that is not distilled in steps, such as {_EXAMPLE.format('t2v')!r}."
        )
    kind = index["guider"][1]
    settings = read_json(folder / "guider" / "guider_config.json")
    other = {name: settings[name] for name, value in _PLAIN.items() if settings.get(name, value) != value}
    if kind != "ClassifierFreeGuidance" or other:
        raise RecipeError(
            f"model.path: the guider of {str(folder)!r} is {kind} with {other or 'its settings'}; expected "
            "ClassifierFreeGuidance without rescaling, over all steps. Set that in its guider/ and model_index.json, "
            "and choose guidance with sampling.guidance_mode."
        )


FILES = _Files(
    pipeline=HunyuanVideo15Pipeline,
    model="hunyuan-video15",
    title="HunyuanVideo 1.5",
    example=_EXAMPLE.format("t2v"),
    vocabularies=("tokenizer.json", "vocab.json"),
    check=_check,
    parts=(
        *("transformer", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "scheduler", "guider"),
    ),
    encoders=("text_encoder", "text_encoder_2"),
    hint=f"{_EXAMPLE.format('t2v')!r} is in that layout",
    siblings=MODELS,
    uses_chat_template=True,
)
IMAGE_FILES = replace(
    FILES,
    pipeline=HunyuanVideo15ImageToVideoPipeline,
    model="hunyuan-video15-i2v",
    example=_EXAMPLE.format("i2v"),
    parts=(*FILES.parts, "image_encoder", "feature_extractor"),
    encoders=(*FILES.encoders, "image_encoder"),
)
