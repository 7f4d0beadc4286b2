# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
"""Pipelines that generate from images, and others with processors of images."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from .images import flux, qwen_image
from .parts import (
    TEXT,
    clip,
    euler,
    hunyuan_vae,
    processor,
    qwen_vl,
    tokenizer,
    unipc,
    vae,
    vision,
    wan_vae,
    with_usual,
)
from .videos import hunyuan_video


def flux_control() -> dict[str, Any]:
    return flux(in_channels=32)


def qwen_edit() -> dict[str, Any]:
    return {**qwen_image(), "processor": processor()}


def longcat() -> dict[str, Any]:
    return with_usual(
        diffusers.LongCatImageTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            pooled_projection_dim=TEXT,
            axes_dims_rope=[4, 4, 8],
        ),
        # The pipeline makes latents of 16 channels whatever the VAE.
        vae=vae(16),
        scheduler=euler(use_dynamic_shifting=True),
        text_encoder=qwen_vl(),
        tokenizer=tokenizer(2048),
        text_processor=processor(),
    )


def _kandinsky(**others: Any) -> dict[str, Any]:
    return with_usual(
        diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            in_text_dim=TEXT,
            in_text_dim2=8,
            time_dim=32,
            out_visual_dim=4,
            patch_size=(1, 2, 2),
            model_dim=16,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(4, 2, 2),
            visual_cond=False,
        ),
        text_encoder=qwen_vl(),
        tokenizer=processor(),
        text_encoder_2=clip(8),
        tokenizer_2=tokenizer(77),
        **others,
    )


def kandinsky_image() -> dict[str, Any]:
    return _kandinsky(vae=vae())


def kandinsky_video() -> dict[str, Any]:
    return _kandinsky(vae=hunyuan_vae())


def _seeing(kind: Any, *, in_channels: int = 9, **more: Any) -> Any:
    """Wan's transformer for videos from an image: noise, a mask of four and a latent of four channels."""
    return kind(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=12,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=64,
        image_dim=16,
        added_kv_proj_dim=24,
        **more,
    )


def _from_image(transformer: Any, image_encoder: Any, scheduler: Any) -> dict[str, Any]:
    return with_usual(
        transformer,
        vae=wan_vae(),
        scheduler=scheduler,
        image_encoder=image_encoder,
        image_processor=transformers.CLIPImageProcessorPil(size=32, crop_size=32),
    )


def wan_i2v() -> dict[str, Any]:
    return _from_image(_seeing(diffusers.WanTransformer3DModel), transformers.CLIPVisionModel(vision()), unipc())


def skyreels_i2v() -> dict[str, Any]:
    encoder = transformers.CLIPVisionModelWithProjection(vision())
    return _from_image(_seeing(diffusers.SkyReelsV2Transformer3DModel), encoder, unipc())


def chrono_edit() -> dict[str, Any]:
    transformer = _seeing(diffusers.ChronoEditTransformer3DModel)
    return _from_image(transformer, transformers.CLIPVisionModel(vision()), euler(shift=3.0))


def hunyuan_skyreels() -> dict[str, Any]:
    return hunyuan_video(in_channels=8)
