"""A random miniature checkpoint in the published layout, and source images, for tests and the conformance matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from unirl.core.types.data import MediaRef
from unirl.model_host.tokens.miniature import byte_tokenizer

from .checkpoint import CONFIG, LANGUAGE, VAE, VISION, WEIGHTS, Sizes
from .module import Bagel
from .vae import new_vae, published_name
from .vision import Vision, vision_config

__all__ = ["media", "write"]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_CHANNELS, _PATCH = 4, 2
_LATENT_SIDE = 8
"""Images of at most 128 x 128 pixels."""
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    # One more than the checkpoint has.
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}


def write(folder: Path, *, seed: int) -> None:
    """Write a BAGEL of about 0.9 M random parameters; same seed, same bytes.

    4 heads share 2 keys; vLLM takes heads of 32 and more on a CPU. 8x VAE with 4 channels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(_SPECIAL)
    # The published embedding is larger than its vocabulary, too.
    language = {
        "vocab_size": len(tokenizer) + 3,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "model_type": "qwen2",
    }
    settings = {
        "model_type": "bagel",
        "vae_config": {"z_channels": _CHANNELS, "downsample": 8},
        "latent_patch_size": _PATCH,
        "max_latent_size": _LATENT_SIDE,
        "connector_act": "gelu_pytorch_tanh",
    }
    for name, values in ((CONFIG, settings), (LANGUAGE, language), (VISION, _VISION)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = (Bagel(_sizes(language)), Vision(vision_config(_VISION)))
        tensors = {name: tensor for part in parts for name, tensor in _random(part).items()}
        save_file(tensors, folder / f"{WEIGHTS}.safetensors", metadata={"format": "pt"})
        vae = _random(new_vae((32,) * 4, layers=1, channels=_CHANNELS))
    stored = {published_name(name, levels=4): _stored(name, tensor) for name, tensor in vae.items()}
    save_file(stored, folder / VAE, metadata={"format": "pt"})


def media(folder: Path, *, number: int) -> tuple[MediaRef, ...]:
    """Write the source images of sample `number`, random pixels: one or two, in sizes that depend on it."""
    result: list[MediaRef] = []
    for place, (height, width) in enumerate((((64, 80),), ((96, 64),), ((64, 64), (40, 60)))[number % 3]):
        generator = np.random.Generator(np.random.Philox(key=10 * number + place))
        file = folder / f"source-{number}-{place}.png"
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file)
        result.append(MediaRef(modality="image", role="source", uri=str(file)))
    return tuple(result)


def _sizes(language: dict[str, Any]) -> Sizes:
    return Sizes(
        vocab=language["vocab_size"],
        width=language["hidden_size"],
        inner=language["intermediate_size"],
        layers=language["num_hidden_layers"],
        heads=language["num_attention_heads"],
        kv_heads=language["num_key_value_heads"],
        eps=language["rms_norm_eps"],
        rope_theta=language["rope_theta"],
        latent=_CHANNELS * _PATCH**2,
        latent_side=_LATENT_SIDE,
        vision=_VISION["hidden_size"],  # type: ignore[arg-type]
        vision_side=4,
        connector_act="gelu_pytorch_tanh",
    )


def _random(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor moved, so that no zero or one of the initialisation hides a term."""
    return {name: tensor + 0.1 * torch.randn(tensor.shape) for name, tensor in module.state_dict().items()}


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Layers of attention are stored as convolutions over one pixel."""
    is_attention = ".attentions." in name and tensor.ndim == 2
    return tensor[:, :, None, None].contiguous() if is_attention else tensor
