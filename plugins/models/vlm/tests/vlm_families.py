"""Miniatures of families of vision-language models, in their ordinary layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import logging as transformers_logging
from unirl.model_host.model_files import no_progress_bars
from unirl.model_host.tokens import image_miniature
from unirl.model_host.tokens.miniature import byte_tokenizer, save_random

IMAGE_PX, PATCH_PX = 28, 7
"""16 patches of an image, in as many tokens or 4."""
TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "pad_token_id": None,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_PX,
    "patch_size": PATCH_PX,
}
SIZE = {"height": IMAGE_PX, "width": IMAGE_PX}


def gemma3(folder: Path, **text: Any) -> None:
    """Images see themselves both ways, one layer slides, the embeddings are tied."""
    tokens = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    words = tokenizer("<start_of_image>", tokens)
    config = transformers.Gemma3Config(
        text_config={
            **common(words), "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], **text,
        },
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_id=words.image_token_id,
        boi_token_id=words.boi_token_id,
        eoi_token_id=words.eoi_token_id,
    )  # fmt: skip
    images = transformers.Gemma3ImageProcessorPil(size=SIZE)
    save(folder, transformers.Gemma3ForConditionalGeneration, config, words, images, image_seq_length=4)


def internvl(folder: Path) -> None:
    """Images are cut into tiles of one size, as many as suit their shape."""
    tokens = {
        "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
        "video_token": "<video>",
    }  # fmt: skip
    words = tokenizer("<IMG_CONTEXT>", tokens)
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **common(words)},
        vision_config={**VISION, "image_size": [IMAGE_PX] * 2, "patch_size": [PATCH_PX] * 2},
        image_token_id=words.context_image_token_id,
        downsample_ratio=0.5,
    )
    images = transformers.GotOcr2ImageProcessorPil(size=SIZE, crop_to_patches=True, min_patches=1, max_patches=3)
    save(folder, transformers.InternVLForConditionalGeneration, config, words, images, image_seq_length=4)


def llava(folder: Path) -> None:
    words = tokenizer("<image>", {"image_token": "<image>"})
    vision = {"model_type": "clip_vision_model", **VISION}
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **common(words)},
        vision_config=vision,
        image_token_id=words.image_token_id,
        image_seq_length=16,
        vision_feature_layer=-2,
    )
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": IMAGE_PX}, crop_size=SIZE)
    settings = {"patch_size": PATCH_PX, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    save(folder, transformers.LlavaForConditionalGeneration, config, words, images, **settings)


def llava_onevision(folder: Path) -> None:
    """The tiles of an image and a line break per row, as many as suit its size; tiles that others lack are padding."""
    words = tokenizer("<image>", {"image_token": "<image>", "video_token": "<video>"})
    points = [[IMAGE_PX, 2 * IMAGE_PX], [2 * IMAGE_PX, IMAGE_PX], [2 * IMAGE_PX, 2 * IMAGE_PX]]
    config = transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **common(words)},
        vision_config={"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
        image_grid_pinpoints=points,
        vision_feature_layer=-1,
    )
    images = transformers.LlavaOnevisionImageProcessorPil(size=SIZE, image_grid_pinpoints=points)
    settings = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    save(folder, transformers.LlavaOnevisionForConditionalGeneration, config, words, images, **settings)


def qwen35(folder: Path) -> None:
    """A layer of linear attention, then one of softmax attention, below positions along three dims."""
    words = image_miniature.tokenizer()
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = transformers.Qwen3_5Config(
        text_config={
            **common(words), "rope_parameters": rope, "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "patch_size": 14, "out_hidden_size": 64, "num_heads": 2,
            "intermediate_size": 64, "num_position_embeddings": 16,
        },
        **{f"{key}_token_id": words.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()},
    )  # fmt: skip
    images = image_miniature.image_processor()
    save(folder, transformers.Qwen3_5ForConditionalGeneration, config, words, images)


FAMILIES: Mapping[str, Callable[..., None]] = {
    "Gemma3": gemma3,
    "InternVL": internvl,
    "Llava": llava,
    "LlavaOnevision": llava_onevision,
    "Qwen2_5_VL": lambda folder: image_miniature.write_qwen25(folder, seed=0),
    "Qwen3VL": lambda folder: image_miniature.write_qwen3(folder, seed=0),
    "Qwen3_5": qwen35,
}


def tokenizer(shown: str, tokens: Mapping[str, str]) -> Any:
    """shown: what the chat template puts for an image.  tokens: special ones by the processor's names for them."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *tokens.values())
    template = image_miniature.CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", shown)
    words = byte_tokenizer(special, chat_template=template)
    # As published tokenizers name them: they are attributes, and saved.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(tokens),
        chat_template=template,
    )


def common(words: Any) -> dict[str, Any]:
    return {**TEXT, "vocab_size": len(words), "eos_token_id": words.eos_token_id}


def save(folder: Path, cls: Any, config: Any, words: Any, images: Any, **settings: Any) -> None:
    """settings: of the processor."""
    save_random(folder, cls, config, words, seed=0)
    with no_progress_bars(transformers_logging):
        images.save_pretrained(folder)
    if settings:
        import json

        (folder / "processor_config.json").write_text(json.dumps(settings))
