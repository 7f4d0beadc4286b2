# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
"""Pipelines from text to images."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from .parts import (
    TEXT,
    clip,
    dc,
    euler,
    flux2_vae,
    llm,
    qwen_image_vae,
    qwen_vl,
    t5,
    tokenizer,
    vae,
    wan_vae,
    with_usual,
)


def sd3() -> dict[str, Any]:
    return with_usual(
        diffusers.SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=24,
            pos_embed_max_size=64,
        ),
        scheduler=euler(shift=3.0),
        text_encoder=clip(8, "CLIPTextModelWithProjection"),
        tokenizer=tokenizer(77),
        text_encoder_2=clip(16, "CLIPTextModelWithProjection"),
        tokenizer_2=tokenizer(77),
        text_encoder_3=t5(),
        tokenizer_3=tokenizer(),
    )


def chroma() -> dict[str, Any]:
    return with_usual(
        diffusers.ChromaTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=[4, 4, 8],
            approximator_hidden_dim=32,
            approximator_layers=1,
            approximator_num_channels=16,
        ),
    )


def flux_dev() -> dict[str, Any]:
    return flux(guidance_embeds=True)


def flux(*, guidance_embeds: bool = False, in_channels: int = 16) -> dict[str, Any]:
    return with_usual(
        diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=in_channels,
            out_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            axes_dims_rope=[4, 4, 8],
            guidance_embeds=guidance_embeds,
        ),
        scheduler=euler(use_dynamic_shifting=True),
        text_encoder=clip(16),
        tokenizer=tokenizer(77),
        text_encoder_2=t5(),
        tokenizer_2=tokenizer(),
    )


def flux2_klein() -> dict[str, Any]:
    return with_usual(
        diffusers.Flux2Transformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            timestep_guidance_channels=32,
            axes_dims_rope=[4, 4, 4, 4],
            guidance_embeds=False,
        ),
        vae=flux2_vae(),
        text_encoder=llm("Qwen3", head="ForCausalLM"),
    )


def qwen_image() -> dict[str, Any]:
    return with_usual(
        diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            axes_dims_rope=(8, 4, 4),
        ),
        vae=qwen_image_vae(),
        scheduler=euler(use_dynamic_shifting=True, shift_terminal=0.02),
        text_encoder=qwen_vl(),
        tokenizer=tokenizer(2048),
    )


def z_image() -> dict[str, Any]:
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 64, 64],
    )
    with torch.no_grad():
        transformer.x_pad_token.fill_(1.0)  # made by torch.empty
        transformer.cap_pad_token.fill_(1.0)
    return {
        "transformer": transformer,
        "vae": vae(4),
        "scheduler": euler(shift=3.0),
        "text_encoder": llm("Qwen3"),
        "tokenizer": tokenizer(),
    }


def sana() -> dict[str, Any]:
    return with_usual(
        diffusers.SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=TEXT,
            sample_size=32,
        ),
        vae=dc(),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, final_sigmas_type="zero"
        ),
        text_encoder=llm("Gemma2"),
    )


def lumina2() -> dict[str, Any]:
    return with_usual(
        diffusers.Lumina2Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            hidden_size=16,
            num_layers=2,
            num_attention_heads=2,
            num_kv_heads=2,
            multiple_of=16,
            axes_dim_rope=[4, 2, 2],
            axes_lens=[600, 64, 64],
            cap_feat_dim=TEXT,
        ),
        text_encoder=llm("Gemma2"),
    )


def aura_flow() -> dict[str, Any]:
    return with_usual(
        diffusers.AuraFlowTransformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_projection_dim=16,
            joint_attention_dim=32,
            out_channels=4,
            pos_embed_max_size=1024,
        ),
    )


def ovis() -> dict[str, Any]:
    return with_usual(
        diffusers.OvisImageTransformer2DModel(
            patch_size=1,
            in_channels=16,
            out_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            axes_dims_rope=(4, 4, 8),
        ),
        text_encoder=llm("Qwen3"),
    )


def krea2() -> dict[str, Any]:
    text = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    return {
        "transformer": diffusers.Krea2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=32,
            timestep_embed_dim=8,
            text_hidden_dim=16,
            num_text_layers=3,
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=16,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 2, 2),
            rope_theta=1000.0,
        ),
        "vae": qwen_image_vae(),
        "scheduler": euler(use_dynamic_shifting=True),
        "text_encoder": transformers.Qwen3VLModel(
            transformers.Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=261, video_token_id=262)
        ),
        "tokenizer": tokenizer(2048),
        "text_encoder_select_layers": (0, 1, 2),
    }


def bria() -> dict[str, Any]:
    return with_usual(
        diffusers.BriaTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=None,
            axes_dims_rope=[0, 4, 4],
        ),
        vae=vae(4, scaling_factor=0.13, shift_factor=0),
    )


def cogview4() -> dict[str, Any]:
    return with_usual(
        diffusers.CogView4Transformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=4,
            num_attention_heads=4,
            out_channels=4,
            text_embed_dim=TEXT,
            time_embed_dim=8,
            condition_dim=4,
        ),
        scheduler=euler(
            base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
        ),
        text_encoder=llm("Glm", head="ForCausalLM"),
    )


def ernie() -> dict[str, Any]:
    return with_usual(
        diffusers.ErnieImageTransformer2DModel(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=64,
            in_channels=16,
            out_channels=16,
            text_in_dim=TEXT,
            rope_axes_dim=(4, 6, 6),
        ),
        vae=flux2_vae(),
        scheduler=euler(shift=3.0),
        text_encoder=llm("Llama"),
    )


def lumina() -> dict[str, Any]:
    return with_usual(
        diffusers.LuminaNextDiT2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            hidden_size=32,
            num_layers=2,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            cross_attention_dim=TEXT,
            learn_sigma=True,
        ),
        text_encoder=llm("Gemma"),
    )


def hidream() -> dict[str, Any]:
    return with_usual(
        diffusers.HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=[32, TEXT],
            text_emb_dim=24,
            num_routed_experts=2,
            num_activated_experts=1,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(128, 128),
            llama_layers=[0, 1],
            # Else a training mode, which the pipeline never uses, adds a loss of the routers.
            force_inference_output=True,
        ),
        scheduler=euler(shift=3.0),
        text_encoder=clip(8, "CLIPTextModelWithProjection", positions=218),
        tokenizer=tokenizer(218),
        text_encoder_2=clip(16, "CLIPTextModelWithProjection", positions=218),
        tokenizer_2=tokenizer(218),
        text_encoder_3=t5(),
        tokenizer_3=tokenizer(),
        text_encoder_4=llm("Llama", head="ForCausalLM"),
        tokenizer_4=tokenizer(),
    )


def bria_fibo() -> dict[str, Any]:
    return with_usual(
        diffusers.BriaFiboTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=2 * TEXT,
            text_encoder_dim=TEXT,
            axes_dims_rope=[0, 4, 4],
        ),
        vae=wan_vae(),
        # An empty prompt is token 128000.
        text_encoder=llm("SmolLM3", head="ForCausalLM", vocab_size=128001),
    )
