# diffusers and transformers export their classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Random miniature checkpoints in the ordinary layout, and first frames, for tests and the conformance matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)
from unirl.core.types.data import MediaRef

__all__ = ["first_frame", "write_wan21", "write_wan21_i2v", "write_wan22", "write_wan22_i2v"]

_TEXT_WIDTH = 32
_CHANNELS = 4
_IMAGE_WIDTH = 24
_EXPERTS = ("transformer", "transformer_2")


def write_wan21(
    folder: Path,
    *,
    seed: int,
    scheduler: UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler | None = None,
) -> None:
    """Write a `WanPipeline` of about 0.4 M random parameters; same seed, same bytes.

    scheduler: another one than Wan 2.1's, whose shift is that for 480p.
    """
    further: dict[str, Any] = {"scheduler": scheduler} if scheduler else {}
    _write(WanPipeline, folder, seed=seed, **further)


def write_wan21_i2v(folder: Path, *, seed: int, image_encoder: bool = True) -> None:
    """The same for `WanImageToVideoPipeline`, with the image encoder of the published checkpoints or without one."""
    _write(WanImageToVideoPipeline, folder, seed=seed, image_features=image_encoder)


def write_wan22(folder: Path, *, seed: int, boundary: float = 0.875) -> None:
    """The same for a `WanPipeline` of two experts, with about 0.5 M random parameters.

    boundary: the sigma at which they change; with the shift of 3, half of four steps are above Wan 2.2's.
    """
    _write(WanPipeline, folder, seed=seed, experts=_EXPERTS, boundary_ratio=boundary)


def write_wan22_i2v(folder: Path, *, seed: int) -> None:
    """The same for a `WanImageToVideoPipeline` of two experts."""
    _write(WanImageToVideoPipeline, folder, seed=seed, experts=_EXPERTS, boundary_ratio=0.875)


def first_frame(folder: Path, *, number: int, height: int = 32, width: int = 32) -> tuple[MediaRef, ...]:
    """Write the first frame of sample `number` of a video of that size, random blocks of 8 x 8 pixels in a size that
    depends on the number, most in a ratio that is off by a few per cent."""
    size = ((height, width), (2 * height + 2, 2 * width), (3 * height // 2, 3 * width // 2 + 2))[number % 3]
    blocks = np.random.Generator(np.random.Philox(key=number)).integers(
        0, 256, (*(-(-side // 8) for side in size), 3), dtype=np.uint8
    )
    pixels = blocks.repeat(8, axis=0).repeat(8, axis=1)[: size[0], : size[1]]
    file = folder / f"frame-{number}-{height}x{width}.png"
    Image.fromarray(pixels).save(file)
    return (MediaRef(modality="image", role="source", uri=str(file)),)


def _write(
    pipeline: Any,
    folder: Path,
    *,
    seed: int,
    experts: Sequence[str] = _EXPERTS[:1],
    image_features: bool = False,
    **further: Any,
) -> None:
    """further: other components, and settings of the pipeline."""
    from_frame = pipeline is WanImageToVideoPipeline
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts: dict[str, Any] = {
            name: _transformer(from_frame=from_frame, image_features=image_features) for name in experts
        }
        parts |= _components() | (_image_encoder() if image_features else {})
    pipeline(**{**parts, **further}).save_pretrained(folder)


def _components() -> dict[str, Any]:
    """Random components of a `WanPipeline` by name, except transformers.

    VAE of 8x in space and 4x in time with 4 channels, each with its own mean and deviation. The solver is the one
    that Wan is published with.
    """
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=_CHANNELS,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.75, -0.7, 0.1, 0.95],
        latents_std=[2.8, 1.45, 2.3, 0.6],
    )
    settings = UMT5Config(
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
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        "vae": vae,
        "text_encoder": UMT5EncoderModel(settings),
        "tokenizer": T5Tokenizer(vocab=[*special, *letters], extra_ids=0, model_max_length=512),
    }


def _transformer(*, from_frame: bool, image_features: bool) -> WanTransformer3DModel:
    """About 0.1 M random parameters. Every weight is moved, so that no zero or one of the initialisation hides a term.

    image_features: with inputs for those of `_image_encoder`.
    """
    result = WanTransformer3DModel(
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


def _image_encoder() -> dict[str, Any]:
    """A random CLIP vision model of 32 x 32 pixels, and its processor, by the names of a `WanImageToVideoPipeline`. It
    makes 257 features, as the published ones do: SGLang takes no other number."""
    settings = CLIPVisionConfig(
        hidden_size=_IMAGE_WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=2,
        # Wider than usual, so that features depend on the image.
        initializer_range=0.2,
    )
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return {"image_encoder": CLIPVisionModel(settings), "image_processor": processor}
