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


def qwen_image21() -> dict[str, Any]:
    text = {
        "vocab_size": 512,
        "hidden_size": TEXT,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        "initializer_range": 0.2,
    }
    seen = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT}
    seen |= {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    ids = dict(vision_start_token_id=259, vision_end_token_id=260, image_token_id=261, video_token_id=262)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=seen, **ids)
    return {
        "transformer": diffusers.QwenImage21Transformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=TEXT,
            axes_dims_rope=(8, 4, 4),
        ),
        "vae": diffusers.AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[-0.75, -0.7, 0.1, 0.95],
            latents_std=[2.8, 1.45, 2.3, 0.6],
        ),
        "scheduler": euler(use_dynamic_shifting=True),
        "text_encoder": transformers.Qwen3VLForConditionalGeneration(config),
        "processor": processor("Qwen3VL", patch_size=16, longest=256),
    }


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
