# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""A random miniature checkpoint in the ordinary layout, and source images, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from PIL import Image
from transformers import Qwen3Config, Qwen3ForCausalLM
from unirl.core.types.data import MediaRef
from unirl.model_host.tokens.miniature import byte_tokenizer

__all__ = ["media", "write"]

_CHANNELS = 4
_TEXT_WIDTH = 16
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}none{% endif %}{% endif %}"
)


def write(folder: Path, *, seed: int, is_distilled: bool = False) -> None:
    """Write a `Flux2KleinPipeline` of about 0.5 M random parameters; same seed, same bytes.

    8x VAE with 4 channels, each place of a patch with its own mean and deviation.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = byte_tokenizer(_SPECIAL, chat_template=_TEMPLATE)
        Flux2KleinPipeline(
            transformer=_noisy(_transformer()),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=_vae(),
            text_encoder=_text_encoder(len(tokenizer)),
            tokenizer=tokenizer,
            is_distilled=is_distilled,
        ).save_pretrained(folder)


def media(folder: Path, *, number: int) -> tuple[MediaRef, ...]:
    """Write the source images of sample `number`, random pixels: one or two, in sizes that depend on it."""
    result: list[MediaRef] = []
    for place, (height, width) in enumerate((((64, 80),), ((96, 64),), ((64, 64), (72, 100)))[number % 3]):
        generator = np.random.Generator(np.random.Philox(key=10 * number + place))
        file = folder / f"source-{number}-{place}.png"
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file)
        result.append(MediaRef(modality="image", role="source", uri=str(file)))
    return tuple(result)


def _transformer() -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        in_channels=4 * _CHANNELS,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=3 * _TEXT_WIDTH,
        mlp_ratio=2.0,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=False,
    )


def _noisy(transformer: Flux2Transformer2DModel) -> Flux2Transformer2DModel:
    """Every weight moved, so that no zero or one of the initialisation hides a term."""
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return transformer


def _vae() -> AutoencoderKLFlux2:
    vae = AutoencoderKLFlux2(
        sample_size=64,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=_CHANNELS,
        norm_num_groups=4,
    )
    norm: Any = vae.bn
    norm.running_mean.copy_(0.5 * torch.randn(4 * _CHANNELS))
    norm.running_var.copy_(0.5 + torch.rand(4 * _CHANNELS))
    return vae


def _text_encoder(vocab_size: int) -> Qwen3ForCausalLM:
    """Text encoder with as many layers as the embeddings are taken from."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=_TEXT_WIDTH,
            intermediate_size=24,
            num_hidden_layers=28,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=512,
            # Wider than usual, so that a token's state depends on those before it and not on itself alone.
            initializer_range=0.2,
        )
    )
