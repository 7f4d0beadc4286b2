"""A random miniature checkpoint in the ordinary layout, and images to read, for tests and the conformance matrix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from unirl.core.types.data import MediaRef
from unirl.model_host.model_files import no_progress_bars
from unirl.model_host.tokens.miniature import byte_tokenizer, save_random

__all__ = ["GRID", "MARKS", "SPECIAL", "config_of", "media", "tokenizer_of", "write", "write_processor"]

GRID = 4
"""Image tokens per side; the VQ model gives 8 x 8 pixels of each."""
MARKS = {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
SPECIAL = ("<|begin|>", "<|endoftext|>", "<|im_end|>", *MARKS.values())
"""What begins a sequence, pads, ends a text, and marks images."""
_TEMPLATE = """\
{%- for message in messages %}
{{- '<|User|>: ' }}
{%- for part in message.content %}
{{- '<image_placeholder>\\n' if part.type == 'image' else part.text }}
{%- endfor %}
{{- '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|Assistant|>:' }}
{%- endif %}
"""
"""Like Janus-Pro's own: roles in turn, and a placeholder on a line of its own where an image is."""


def tokenizer_of(inner: Any) -> Any:
    """A tokenizer of `tokenizers` that knows `SPECIAL`, with the names that Janus has for them."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=SPECIAL[0],
        pad_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        extra_special_tokens=MARKS,
    )


def config_of(
    words: Any, *, text: Mapping[str, Any], vision: Mapping[str, Any], codebook: Mapping[str, Any]
) -> transformers.JanusConfig:
    """The config of a model of these sizes; texts, images and codes meet in the width of `text`."""
    width = text["hidden_size"]
    language = transformers.LlamaConfig(
        vocab_size=len(words),
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        tie_word_embeddings=False,
        **text,
    )
    tokens = (vision["image_size"] // vision["patch_size"]) ** 2
    return transformers.JanusConfig(
        text_config=language.to_dict(),
        vision_config={**vision, "projection_dim": width, "num_image_tokens": tokens},
        vq_config={**codebook, "projection_dim": width, "image_token_embed_dim": width},
        image_token_id=words.convert_tokens_to_ids(MARKS["image_token"]),
        tie_word_embeddings=False,
    )


def write(folder: Path, *, seed: int) -> None:
    """Write a `JanusForConditionalGeneration` of about 0.4 M random parameters; same seed, same bytes."""
    words = tokenizer_of(byte_tokenizer(SPECIAL).backend_tokenizer)
    words.chat_template = _TEMPLATE
    config = config_of(
        words,
        text={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
        },
        vision={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "mlp_ratio": 2.0,
            "depth": 2,
        },
        codebook={
            "embed_dim": 8,
            "num_embeddings": 48,
            "latent_channels": 16,
            "num_patches": GRID,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1],
            "num_res_blocks": 1,
        },
    )
    save_random(folder, transformers.JanusForConditionalGeneration, config, words, seed=seed)
    write_processor(folder, size_px=32)


def write_processor(folder: Path, *, size_px: int) -> None:
    """Write the settings by which images are scaled to `size_px`."""
    with no_progress_bars(transformers.utils.logging):
        transformers.JanusImageProcessorPil(size={"height": size_px, "width": size_px}).save_pretrained(folder)


def media(folder: Path, *, number: int) -> tuple[MediaRef, ...]:
    """Write the image of sample `number`, random pixels in a size that depends on it; none of every third."""
    if number % 3 == 2:
        return ()
    height, width = ((40, 64), (72, 48))[number % 3]
    pixels = np.random.Generator(np.random.Philox(key=number)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = folder / f"image-{number}.png"
    Image.fromarray(pixels).save(file)
    return (MediaRef(modality="image", role="condition", uri=str(file)),)
