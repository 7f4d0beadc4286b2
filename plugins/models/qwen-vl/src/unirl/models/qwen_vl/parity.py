"""transformers' own generation on a checkpoint: what the model is compared with. Nothing of the model is used here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
)
from unirl.conformance.reference import TextReferenceRun
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig

__all__ = ["processor", "prompt", "run"]


@torch.no_grad()
def run(folder: Path, *, inputs: Inputs, sampling: TextSamplingConfig) -> TextReferenceRun:
    """The processor's tokens and pixels, and `generate` with its logits, in fp32 on the CPU, one prompt after the
    other: without padding, so without anything that padding could spoil. Fits
    `unirl.conformance.reference.RunTextReference`.
    """
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    model.eval()
    ends = model.generation_config.eos_token_id
    stops = [*(ends if isinstance(ends, list) else [ends]), *sampling.stop_token_ids]
    makes = processor(folder)
    asked: list[Tensor] = []
    texts: list[Tensor] = []
    log_probs: list[Tensor] = []
    for text, media in zip(inputs.texts, inputs.media, strict=True):
        arguments = prompt(makes, text, [Image.open(ref.uri) for ref in media], sampling)
        tokens = arguments["input_ids"][0]
        result = model.generate(
            **arguments,
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=stops[0],
            # Not of a forward over the whole text, in which a completion's image tokens would count as images.
            output_logits=True,
            return_dict_in_generate=True,
        )
        scores = torch.cat(result.logits).double().log_softmax(dim=1)
        asked.append(tokens)
        texts.append(result.sequences[0, len(tokens) :])
        log_probs.append(scores.gather(1, texts[-1][:, None]).squeeze(1).float())
    return TextReferenceRun(prompt_tokens=tuple(asked), tokens=tuple(texts), log_probs=tuple(log_probs))


def processor(folder: Path) -> Any:
    """transformers' own processor of the checkpoint, without its part for videos, which needs torchvision."""
    kind: Any = {"qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}[
        AutoConfig.from_pretrained(folder, local_files_only=True).model_type
    ]

    class ImagesAlone(kind):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            del argument_name, argument

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    return ImagesAlone(image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template)


def prompt(makes: Any, text: str, images: Sequence[Image.Image], sampling: TextSamplingConfig) -> Any:
    """Arguments of the model for a prompt about images, as [1, ...] tensors."""
    if not sampling.chat:
        shown = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
        return makes(text=[shown + text], images=list(images), return_tensors="pt")
    system = [{"role": "system", "content": sampling.system_prompt}] if sampling.system_prompt else []
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return makes.apply_chat_template(
        [*system, {"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
