"""Prompts, sizes and recipe words that tests run the tiny pipelines with."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import torch
from PIL import Image
from tiny_pipelines.families import FAMILIES
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.media import LoadedImage

__all__ = ["FP32", "PROMPT", "SMALL", "STEPS", "inputs_of", "sampling_of", "sources", "words_of"]

STEPS = 4
PROMPT = "a red ring on the left"
SMALL = [
    "run.max_steps=2",
    "run.threads=1",
    "data.prompts_per_step=2",
    "data.samples_per_prompt=2",
    "sampling.num_inference_steps=4",
    "sampling.height=64",
    "sampling.width=96",
    "sampling.sde.last=0.75",
    "train.micro_batch_size=2",
    "backend.lora.rank=4",
    "eval=null",
]
FP32 = ["model.dtype=float32", "model.text_dtype=float32", "backend.mixed_precision=none"]

VIDEO = ["sampling.fps=16", "~reward.jpeg", "+reward@reward.motion=function"]
VIDEO += ["reward.motion.target=unirl.rewards.rules.function:mean_motion"]


def sampling_of(name: str) -> LatentSamplingConfig:
    """Height and width differ, so that neither can be taken for the other."""
    return LatentSamplingConfig(
        num_inference_steps=STEPS, height=64, width=96, frames=FAMILIES[name].frames, max_sequence_length=256
    )


def sources(name: str, seed: int = 0) -> list[Image.Image]:
    """Random images of a prompt, each of another size; those of every seed have the same sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((72, 104), (96, 80))[: FAMILIES[name].images]
    levels = [torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8) for size in sizes]
    return [Image.fromarray(level.numpy()) for level in levels]


def inputs_of(name: str, *texts: str) -> Inputs:
    """Prompts, each with its own images where the pipeline takes any."""
    images = [
        tuple(
            LoadedImage.of(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255, role="source")
            for image in sources(name, seed)
        )
        for seed in range(len(texts))
    ]
    return dataclasses.replace(Inputs.of_texts(texts), media=tuple(images))


def words_of(name: str) -> list[str]:
    family = FAMILIES[name]
    video = [*VIDEO, f"sampling.frames={family.frames}"] if family.frames > 1 else []
    return [*video, *(f"+model.call.{key}={hydra(value)}" for key, value in family.call.items())]


def hydra(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra(own)}" for key, own in value.items()) + "}"
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)
