"""Components of random miniature checkpoints of the Wan models.

Calls diffusers and transformers, which the plugin of the model declares.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from unirl.core.types.data import MediaRef

__all__ = ["first_frame", "wan_components", "wan_image_encoder", "wan_transformer"]

_TEXT_WIDTH = 32
_CHANNELS = 4
_IMAGE_WIDTH = 24


def wan_components(*, flow_shift: float) -> dict[str, Any]:
    """Random components of a `WanPipeline` by name, but for transformers, from torch's global generator.

    VAE of 8x in space and 4x in time with 4 channels, each with a mean and deviation of its own. The solver is the one
    that Wan is published with.
    """
    diffusers, transformers = import_module("diffusers"), import_module("transformers")
    vae = diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=_CHANNELS,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.75, -0.7, 0.1, 0.95],
        latents_std=[2.8, 1.45, 2.3, 0.6],
    )
    settings = transformers.UMT5Config(
        vocab_size=64,
        d_model=_TEXT_WIDTH,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    # UMT5's unigram model, one token a character.
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    letters = [(letter, -2.0) for letter in "▁abcdefghijklmnopqrstuvwxyz0123456789.,\"'"]
    return {
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
        ),
        "vae": vae,
        "text_encoder": transformers.UMT5EncoderModel(settings),
        "tokenizer": transformers.T5Tokenizer(vocab=[*special, *letters], extra_ids=0, model_max_length=512),
    }


def wan_transformer(*, from_frame: bool = False, image_features: bool = False) -> Any:
    """A `WanTransformer3DModel` of about 0.1 M random parameters, from torch's global generator. Every weight is moved,
    so that no zero or one of the initialisation hides a term.

    from_frame: for image to video.  image_features: with inputs for those of `wan_image_encoder`.
    """
    result = import_module("diffusers").WanTransformer3DModel(
        patch_size=(1, 2, 2),
        # The noise, a mask of four channels, and the frame.
        in_channels=2 * _CHANNELS + 4 if from_frame else _CHANNELS,
        out_channels=_CHANNELS,
        num_layers=2,
        attention_head_dim=24,
        num_attention_heads=2,
        text_dim=_TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=96,
        image_dim=_IMAGE_WIDTH if image_features else None,
        added_kv_proj_dim=48 if image_features else None,
        rope_max_seq_len=64,
    )
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return result


def wan_image_encoder() -> dict[str, Any]:
    """A random CLIP vision model of 32 x 32 pixels, from torch's global generator, and its processor, by the names of a
    `WanImageToVideoPipeline`. It makes 257 features, as the published ones do: SGLang takes no other number."""
    transformers = import_module("transformers")
    settings = transformers.CLIPVisionConfig(
        hidden_size=_IMAGE_WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=2,
        # Wider than usual, so that features depend on the image.
        initializer_range=0.2,
    )
    encoder = transformers.CLIPVisionModel(settings)
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return {"image_encoder": encoder, "image_processor": processor}


def first_frame(folder: Path, *, number: int, height: int = 32, width: int = 32) -> tuple[MediaRef, ...]:
    """Write the first frame of sample `number` of a video of that size, random blocks of 8 x 8 pixels in a size that
    depends on the number, most in a ratio that is off by a few per cent."""
    size = ((height, width), (2 * height + 2, 2 * width), (3 * height // 2, 3 * width // 2 + 2))[number % 3]
    blocks = np.random.Generator(np.random.Philox(key=number)).integers(
        0, 256, (*(-(-side // 8) for side in size), 3), dtype=np.uint8
    )
    pixels = blocks.repeat(8, axis=0).repeat(8, axis=1)[: size[0], : size[1]]
    file = folder / f"frame-{number}-{height}x{width}.png"
    import_module("PIL.Image").fromarray(pixels).save(file)
    return (MediaRef(modality="image", role="source", uri=str(file)),)
