"""Random miniatures of Qwen-VL in the ordinary layout, and images for them, for tests and the conformance matrix.

Calls transformers and Pillow, which the plugin of the model declares.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from unirl.core.types.data import MediaRef

from ..model_files import no_progress_bars
from .miniature import byte_tokenizer, save_random

__all__ = ["CHAT_TEMPLATE", "image_processor", "media", "tokenizer", "write_qwen3", "write_qwen25"]

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Like Qwen-VL's own template for chats with images: roles in turn, and a placeholder where an image is."""


def write_qwen25(folder: Path, *, seed: int) -> None:
    """Write a `Qwen2_5_VLForConditionalGeneration` of about 0.1 M random parameters; same seed, same bytes."""
    words = tokenizer()
    transformers = import_module("transformers")
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_text(words), "rope_parameters": _rope(), "head_dim": 32},
        vision_config={
            **_vision(),
            "num_heads": 2,
            # SGLang pads it, here and in the published checkpoints.
            "intermediate_size": 48,
            # A window of two merged patches; the second block sees all.
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        **_tokens(words),
    )
    _save(folder, transformers.Qwen2_5_VLForConditionalGeneration, config, words, seed=seed)


def write_qwen3(folder: Path, *, seed: int) -> None:
    """Write a `Qwen3VLForConditionalGeneration` of the same size; same seed, same bytes."""
    words = tokenizer()
    transformers = import_module("transformers")
    config = transformers.Qwen3VLConfig(
        text_config={**_text(words), "rope_parameters": {**_rope(), "mrope_interleaved": True}, "head_dim": 32},
        vision_config={
            **_vision(),
            "num_heads": 2,
            "intermediate_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **_tokens(words),
    )
    _save(folder, transformers.Qwen3VLForConditionalGeneration, config, words, seed=seed)


def media(folder: Path, *, number: int) -> tuple[MediaRef, ...]:
    """Write the image of sample `number`: random pixels in a size that depends on it, for all of them to be scaled."""
    height, width = ((35, 63), (70, 35), (56, 56))[number % 3]
    pixels = np.random.Generator(np.random.Philox(key=number)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = folder / f"image-{number}.png"
    import_module("PIL.Image").fromarray(pixels).save(file)
    return (MediaRef(modality="image", role="condition", uri=str(file)),)


def image_processor(*, patch_size: int = 14, most_pixels: int = 6272) -> Any:
    """Images of one token to `most_pixels` pixels, in square patches, of which 2 x 2 are a token."""
    size = {"shortest_edge": (2 * patch_size) ** 2, "longest_edge": most_pixels}
    return import_module("transformers").Qwen2VLImageProcessorPil(patch_size=patch_size, size=size)


def tokenizer() -> Any:
    return byte_tokenizer(_SPECIAL, chat_template=CHAT_TEMPLATE)


def _text(words: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        # Heads of 32: vLLM's attention on a CPU takes none below.
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "eos_token_id": words.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _rope() -> dict[str, Any]:
    """Time, height and width turn 4, 6 and 6 of the 16 pairs of a head."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _vision() -> dict[str, Any]:
    """SGLang takes the patches of Qwen2.5-VL for embeddings unless they have 14 x 14 pixels."""
    return {"depth": 2, "hidden_size": 32, "patch_size": 14, "out_hidden_size": 64}


def _tokens(words: Any) -> dict[str, Any]:
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {key: words.convert_tokens_to_ids(f"<|{name}|>") for key, name in zip(keys, names, strict=True)}


def _save(folder: Path, cls: Any, config: Any, words: Any, *, seed: int) -> None:
    save_random(folder, cls, config, words, seed=seed)
    with no_progress_bars(import_module("transformers.utils").logging):
        image_processor().save_pretrained(folder)
