# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
"""Pipelines from text to videos."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from .parts import TEXT, clip, euler, hunyuan_vae, llm, qwen2_vl, qwen_vl, t5, tokenizer, unipc, wan_vae, with_usual


def wan() -> dict[str, Any]:
    return with_usual(
        diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=64,
        ),
        vae=wan_vae(),
        scheduler=unipc(),
        transformer_2=None,
    )


def wan_vace() -> dict[str, Any]:
    transformer = diffusers.WanVACETransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=64,
        vace_layers=[0],
        # Two latents of four channels and a mask of 8 x 8 pixels.
        vace_in_channels=72,
    )
    return {**wan(), "transformer": transformer}


def hunyuan_video(*, in_channels: int = 4) -> dict[str, Any]:
    return with_usual(
        diffusers.HunyuanVideoTransformer3DModel(
            in_channels=in_channels,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
        ),
        vae=hunyuan_vae(),
        scheduler=euler(shift=7.0),
        text_encoder=llm("Llama"),
        text_encoder_2=clip(8),
        tokenizer_2=tokenizer(77),
    )


def ltx() -> dict[str, Any]:
    vae = diffusers.AutoencoderKLLTXVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, True, False),
        decoder_spatio_temporal_scaling=(True, True, True, False),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_residual=(False, False, False, False),
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=False,
        patch_size=4,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    return {
        "transformer": diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=1,
            caption_channels=32,
        ),
        "vae": vae,
        "scheduler": euler(use_dynamic_shifting=True, shift_terminal=0.1),
        "text_encoder": t5(),
        "tokenizer": tokenizer(),
    }


def mochi() -> dict[str, Any]:
    return with_usual(
        diffusers.MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=12,
            out_channels=None,
            text_embed_dim=32,
            time_embed_dim=4,
            max_sequence_length=64,
        ),
        vae=diffusers.AutoencoderKLMochi(
            latent_channels=12,
            out_channels=3,
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        scheduler=euler(invert_sigmas=True),
    )


def wan_5b() -> dict[str, Any]:
    """Wan 2.2 of one transformer, with a timestep for each token."""
    return {**wan(), "expand_timesteps": True}


def skyreels() -> dict[str, Any]:
    return with_usual(
        diffusers.SkyReelsV2Transformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=64,
        ),
        vae=wan_vae(),
        scheduler=unipc(),
    )


def sana_video() -> dict[str, Any]:
    return with_usual(
        diffusers.SanaVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=TEXT,
            qk_norm="rms_norm_across_heads",
        ),
        vae=wan_vae(),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0, final_sigmas_type="zero"
        ),
        text_encoder=llm("Gemma2"),
    )


def hunyuan_video15() -> dict[str, Any]:
    return {
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=TEXT,
            text_embed_2_dim=32,
            image_embed_dim=12,
            rope_axes_dim=(2, 4, 4),
            target_size=64,
            task_type="t2v",
        ),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8, 8),
            layers_per_block=1,
            spatial_compression_ratio=16,
            temporal_compression_ratio=4,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        "scheduler": euler(shift=7.0),
        "text_encoder": qwen_vl().model.language_model,
        "tokenizer": tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": transformers.ByT5Tokenizer(),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=1.0),
    }


def easy_animate() -> dict[str, Any]:
    return with_usual(
        diffusers.EasyAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            patch_size=2,
            num_layers=2,
            mmdit_layers=2,
            time_embed_dim=8,
            text_embed_dim=TEXT,
            text_embed_dim_t5=None,
            sample_height=8,
            sample_width=8,
        ),
        vae=diffusers.AutoencoderKLMagvit(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=2,
            spatial_group_norm=False,
        ),
        text_encoder=qwen2_vl(),
    )
