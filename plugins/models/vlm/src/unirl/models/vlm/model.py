"""Any `AutoModelForImageTextToText` of transformers as a decoder of tokens that sees images."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from unirl.core.errors import DataError, RecipeError
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.model_host.tokens.causal_lm_files import find
from unirl.model_host.tokens.image_lm import ImageLmModel
from unirl.model_host.tokens.scoring_class import scoring_class
from unirl.model_host.tokens.verify import verify

from .config import VlmConfig
from .plugin import SPEC

__all__ = ["VERIFIED", "Vlm", "build"]

VERIFIED = frozenset(
    f"{name}ForConditionalGeneration"
    for name in ("Gemma3", "InternVL", "Llava", "LlavaOnevision", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5")
)
"""Architectures that the tests compare with transformers: log-probs, gradients, greedy texts, adapters, and a build
without values."""


class Vlm(ImageLmModel):
    """A `unirl.core.roles.TextModel`."""

    example = "Qwen/Qwen3-VL-2B-Instruct"
    # Checkpoints name the parts as the first releases of their modules did; transformers' own renames know the rest.
    renames: ClassVar[Mapping[str, str]] = {
        r"(model\.)?vision_tower\.vision_model\.": "model.vision_tower.",
        r"language_model\.model\.": "model.language_model.",
        r"language_model\.lm_head\.": "lm_head.",
        r"(?=(visual|vision_tower|multi_modal_projector|image_newline)\b)": "model.",
        r"model\.(?=(layers|embed_tokens|norm)\.)": "model.language_model.",
    }


def build(config: VlmConfig, *, device: Any, lazy: bool = False) -> Vlm:
    """The vision-language model of a checkpoint, after a comparison with its own forward, see `verify`.

    Raises RecipeError when the checkpoint or a setting is wrong, and for an architecture that cannot be trained here.
    """
    folder = find(config, example=Vlm.example)
    cls = scoring_class(folder, auto="AutoModelForImageTextToText", trust_remote_code=config.trust_remote_code)
    if lazy and cls.__name__ not in VERIFIED:
        raise RecipeError(
            f"model.path: {cls.__name__!r} was not compared with transformers by the tests of this plugin, and a model "
            f"that is built without values cannot be compared here; known are {', '.join(sorted(VERIFIED))}. Train it "
            "on one process, where it is built whole."
        )
    model = Vlm(
        dataclasses.replace(config, path=str(folder)),
        device=torch.device(device),
        lazy=lazy,
        spec=SPEC,
        cls=cls,
        trust_remote_code=config.trust_remote_code,
    )
    if not lazy:
        with TemporaryDirectory() as images:
            _verify(model, Path(images))
    return model


def _verify(model: Vlm, folder: Path) -> None:
    """With a wide and a tall image, one in each of two prompts of other lengths."""
    media: list[tuple[MediaRef, ...]] = []
    for number, size in enumerate(((120, 90), (96, 168))):
        pixels = np.random.Generator(np.random.Philox(key=number)).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        media.append((MediaRef(modality="image", role="condition", uri=str(folder / f"{number}.png")),))
    texts = ("What is it?", "a")
    inputs, sampling = Inputs(ids=texts, prompts=texts, texts=texts, media=tuple(media)), TextSamplingConfig(chat=False)
    try:
        prompts = model.prompt_tokens(inputs, sampling=sampling)
        conditions: Any = model.conditions(inputs, sampling=sampling)
    except DataError as error:
        raise RecipeError(
            f"model.path: the processor of {str(model.folder)!r} does not take a prompt about one image: {error} "
            "Choose another checkpoint."
        ) from error
    verify(model, prompts=prompts, conditions=conditions)
