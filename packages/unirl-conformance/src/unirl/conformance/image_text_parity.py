"""transformers' own generation on a checkpoint: what the model is compared with. Nothing of the model is used here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto import processing_auto
from unirl.conformance.reference import TextReferenceRun
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig

__all__ = ["processor", "prompt", "run"]

# Their signatures are untyped.
_CONFIGS, _IMAGE_PROCESSORS = cast(Any, AutoConfig), cast(Any, AutoImageProcessor)
_MODELS, _TOKENIZERS = cast(Any, AutoModelForImageTextToText), cast(Any, AutoTokenizer)


@torch.no_grad()
def run(folder: Path, *, inputs: Inputs, sampling: TextSamplingConfig) -> TextReferenceRun:
    """The processor's tokens and pixels, and `generate` with its logits, in fp32 on the CPU, one prompt after the
    other: without padding, so without anything that padding could spoil. Fits
    `unirl.conformance.reference.RunTextReference`.
    """
    model: Any = _MODELS.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    model.eval()
    ends = model.generation_config.eos_token_id
    several = cast("list[int]", ends if isinstance(ends, list) else [ends])
    stops = [*several, *sampling.stop_token_ids]
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
    model_type: str = _CONFIGS.from_pretrained(folder, local_files_only=True, trust_remote_code=False).model_type
    names: Any = processing_auto.PROCESSOR_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
    kind: Any = getattr(transformers, names[model_type])

    class ImagesAlone(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            del argument_name, argument

    parts: dict[str, Any] = {
        "tokenizer": _TOKENIZERS.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
        "image_processor": _IMAGE_PROCESSORS.from_pretrained(
            folder, local_files_only=True, backend="pil", trust_remote_code=False
        ),
    }
    settings, _ = kind.get_processor_dict(folder, local_files_only=True)
    return ImagesAlone.from_args_and_dict([parts.get(name) for name in kind.get_attributes()], settings)


def prompt(makes: Any, text: str, images: Sequence[Image.Image], sampling: TextSamplingConfig) -> Any:
    """Arguments of the model for a prompt about images, as [1, ...] tensors."""
    if not sampling.chat:
        known = makes.tokenizer.get_added_vocab()
        ends = ["<|vision_start|>", "<|vision_end|>"] if "<|vision_start|>" in known else ["", ""]
        shown = makes.image_token.join(ends) * len(images)
        return makes(text=[shown + text], images=[list(images)], return_tensors="pt")
    system = [{"role": "system", "content": sampling.system_prompt}] if sampling.system_prompt else []
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return makes.apply_chat_template(
        [*system, {"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
