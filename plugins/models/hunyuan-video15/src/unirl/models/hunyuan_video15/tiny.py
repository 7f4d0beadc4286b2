# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
"""Random miniature checkpoints in the ordinary layout, and first frames, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from PIL import Image
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)
from unirl.core.types.data import MediaRef

__all__ = ["media", "write", "write_image"]

_CHANNELS, _TEXT_WIDTH, _GLYPH_WIDTH, _IMAGE_WIDTH = 4, 32, 24, 16
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = (
    *("Ġare", "Ġa", "Ġhelpful", "Ġassistant", "ĠDescribe", "Ġthe", "Ġvideo", "Ġby", "Ġdetailing", "Ġfollowing"),
    *("Ġaspects", "ĠThe", "Ġmain", "Ġcontent", "Ġand", "Ġtheme", "Ġof", "Ġcolor", "Ġshape", "Ġsize", "Ġtexture"),
    *("Ġquantity", "Ġtext", "Ġspatial", "Ġrelationships", "Ġobjects", "ĠActions", "Ġevents", "Ġbehaviors", "Ġtemporal"),
    *("Ġphysical", "Ġmovement", "Ġchanges", "Ġbackground", "Ġenvironment", "Ġlight", "Ġstyle", "Ġatmosphere"),
    *(
        "Ġcamera",
        "Ġangles",
        "Ġmovements",
        "Ġtransitions",
        "Ġused",
        "Ġin",
        "Ġleft",
        "You",
        "system",
        "user",
        "assistant",
    ),
)
"""Those of the pipeline's template, as byte-level BPE writes them: one token each, as in Qwen2.5-VL's vocabulary. And
"left", without which two prompts of the conformance suite would have equally many tokens."""


def write(folder: Path, *, seed: int, guidance_scale: float = 6.0, num_text_layers: int = 4) -> None:
    """Write a `HunyuanVideo15Pipeline` of about 4.6 M random parameters, most of them in the projection of the
    glyphs, whose width of 2048 is fixed; same seed, same bytes.

    VAE of 16x in space and 4x in time with 4 channels.  guidance_scale: of its guider, 1 for a distilled checkpoint.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = _parts(task="t2v", guidance_scale=guidance_scale, num_text_layers=num_text_layers)
    HunyuanVideo15Pipeline(**parts).save_pretrained(folder)


def write_image(folder: Path, *, seed: int) -> None:
    """The same for `HunyuanVideo15ImageToVideoPipeline`, with an image encoder of 4 tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = _parts(task="i2v", guidance_scale=6.0, num_text_layers=4)
        encoder = SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=_IMAGE_WIDTH,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=32,
                patch_size=16,
                vision_use_head=False,
            )
        )
    HunyuanVideo15ImageToVideoPipeline(
        **parts, image_encoder=encoder, feature_extractor=SiglipImageProcessorPil(size={"height": 32, "width": 32})
    ).save_pretrained(folder)


def media(folder: Path, *, number: int, height: int = 32, width: int = 32) -> tuple[MediaRef, ...]:
    """Write the first frame of sample `number` of a video of that size, random pixels in a size that depends on the
    number, most in another ratio."""
    size = ((height, width), (height + 8, width + 16), (height + 20, width + 24))[number % 3]
    pixels = np.random.Generator(np.random.Philox(key=number)).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = folder / f"first-{number}-{height}x{width}.png"
    Image.fromarray(pixels).save(file)
    return (MediaRef(modality="image", role="source", uri=str(file)),)


def _parts(*, task: str, guidance_scale: float, num_text_layers: int) -> dict[str, Any]:
    tokenizer = _tokenizer()
    return {
        "transformer": _transformer(task),
        "vae": _noisy(
            AutoencoderKLHunyuanVideo15(
                latent_channels=_CHANNELS,
                block_out_channels=(8, 8, 8, 8, 8),
                layers_per_block=1,
                downsample_match_channel=False,
                upsample_match_channel=False,
            )
        ),
        # The shift of the checkpoint for 480p.
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "text_encoder": _text_encoder(len(tokenizer), num_layers=num_text_layers),
        "tokenizer": tokenizer,
        "text_encoder_2": T5EncoderModel(
            T5Config(
                vocab_size=384,
                d_model=_GLYPH_WIDTH,
                d_kv=8,
                d_ff=32,
                num_layers=1,
                num_heads=2,
                feed_forward_proj="gated-gelu",
            )
        ),
        "tokenizer_2": ByT5Tokenizer(extra_ids=0),
        "guider": ClassifierFreeGuidance(guidance_scale=guidance_scale),
    }


def _transformer(task: str) -> HunyuanVideo15Transformer3DModel:
    return _noisy(
        HunyuanVideo15Transformer3DModel(
            in_channels=2 * _CHANNELS + 1,
            out_channels=_CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=_TEXT_WIDTH,
            text_embed_2_dim=_GLYPH_WIDTH,
            image_embed_dim=_IMAGE_WIDTH,
            rope_axes_dim=(4, 6, 6),
            target_size=32,
            task_type=task,
        )
    )


def _noisy(module: Any) -> Any:
    """Every weight moved, so that no zero or one of the initialisation hides a term."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return module


def _text_encoder(vocab_size: int, *, num_layers: int) -> Qwen2_5_VLTextModel:
    return Qwen2_5_VLTextModel(
        Qwen2_5_VLTextConfig(
            vocab_size=vocab_size,
            hidden_size=_TEXT_WIDTH,
            intermediate_size=48,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
            # Wider than usual, so that a token's state depends on those before it and not on itself alone.
            initializer_range=0.2,
        )
    )


def _tokenizer() -> Qwen2Tokenizer:
    """Qwen2's byte-level BPE, with merges for the words of the template alone: the rest is one token a byte."""
    spaces = [("Ġ" * count, "Ġ" * count) for count in (1, 2, 4)]
    merges = [(word[:end], word[end]) for word in _WORDS for end in range(1, len(word))]
    merges = list(dict.fromkeys([*spaces, *merges]))
    vocab = [*_bytes(), *(left + right for left, right in merges)]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(vocab)},
        merges=merges,
        additional_special_tokens=list(_SPECIAL[1:]),
        chat_template=_TEMPLATE,
    )


def _bytes() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes: printable ones as they are, others from 256 on."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = 256 - len(kept)
    return [*map(chr, kept), *(chr(256 + number) for number in range(moved))]
