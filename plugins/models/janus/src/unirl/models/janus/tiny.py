"""A random miniature checkpoint in the ordinary layout, and images to read, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from unirl.core.types.data import MediaRef
from unirl.model_host.model_files import no_progress_bars
from unirl.model_host.tokens.miniature import byte_tokenizer, save_random

__all__ = ["GRID", "media", "write"]

GRID = 4
"""Image tokens per side; the VQ model gives 8 x 8 pixels of each."""
_MARKS = {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
_SPECIAL = ("<|begin|>", "<|endoftext|>", "<|im_end|>", *_MARKS.values())
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


def write(folder: Path, *, seed: int) -> None:
    """Write a `JanusForConditionalGeneration` of about 0.4 M random parameters; same seed, same bytes."""
    words: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(_SPECIAL).backend_tokenizer,
        bos_token=_SPECIAL[0],
        pad_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
        extra_special_tokens=_MARKS,
    )
    words.chat_template = _TEMPLATE
    width = 64
    text = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        tie_word_embeddings=False,
    )
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "mlp_ratio": 2.0,
        "projection_dim": width,
        "num_image_tokens": GRID**2,
        "depth": 2,
    }
    codebook = {
        "embed_dim": 8,
        "num_embeddings": 48,
        "latent_channels": 16,
        "num_patches": GRID,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "projection_dim": width,
        "image_token_embed_dim": width,
    }
    config = transformers.JanusConfig(
        text_config=text.to_dict(),
        vision_config=vision,
        vq_config=codebook,
        image_token_id=words.convert_tokens_to_ids(_MARKS["image_token"]),
        tie_word_embeddings=False,
    )
    save_random(folder, transformers.JanusForConditionalGeneration, config, words, seed=seed)
    with no_progress_bars(transformers.utils.logging):
        transformers.JanusImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)


def media(folder: Path, *, number: int) -> tuple[MediaRef, ...]:
    """Write the image of sample `number`, random pixels in a size that depends on it; none of every third."""
    if number % 3 == 2:
        return ()
    height, width = ((40, 64), (72, 48))[number % 3]
    pixels = np.random.Generator(np.random.Philox(key=number)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = folder / f"image-{number}.png"
    Image.fromarray(pixels).save(file)
    return (MediaRef(modality="image", role="condition", uri=str(file)),)
