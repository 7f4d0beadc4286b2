# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
"""Tiny random pipelines of many families, on one tokenizer and one VAE where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from torch import nn
from unirl.numerics.tokens.miniature import byte_tokenizer

__all__ = ["FAMILIES", "REFUSED", "Family", "write"]

_TEXT = 16
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type']=='text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


@dataclass(frozen=True, kw_only=True)
class Family:
    parts: Callable[[], dict[str, Any]]
    """Components by name; the class of the pipeline is `<name>`."""
    call: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """`model.call`."""
    guided: Callable[[float], dict[str, Any]] | None = None
    """Arguments with which the pipeline guides itself as ours does by this scale; None where ours has no such."""
    guidance: str = "two-pass"
    """Ours that is the same."""
    negative: dict[str, Any] | None = field(default_factory=lambda: {"negative_prompt": ["blurred"]})
    """Arguments for this negative prompt; None where the pipeline always takes the empty one."""
    sign: int = 1
    """-1 where the pipeline predicts x0 - x1."""
    frames: int = 1
    takes_row_sigmas: bool = True
    is_ragged: bool = False
    idle: int = 0
    """Layers of attention whose output the transformer drops."""


def write(folder: Path, name: str) -> None:
    """Write the pipeline of this class; the same bytes each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = (FAMILIES[name].parts if name in FAMILIES else REFUSED[name])()
        with torch.no_grad():
            # Every weight moved, so that no zero or one of the initialisation hides a term.
            for part in parts.values():
                if isinstance(part, nn.Module):
                    for parameter in part.parameters():
                        parameter.add_(0.05 * torch.randn(parameter.shape))
        getattr(diffusers, name)(**parts).save_pretrained(folder)


def _tokenizer(length: int = 512) -> Any:
    """A token a byte, and one for the end, as T5's and CLIP's have it."""
    result = byte_tokenizer(_QWEN, chat_template=_CHAT)
    end = [("<|im_end|>", result.eos_token_id)]
    result.backend_tokenizer.post_processor = TemplateProcessing(single="$A <|im_end|>", special_tokens=end)
    result.model_max_length = length
    return result


def _euler(**settings: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def _t5(width: int = 32) -> Any:
    config = transformers.T5Config(vocab_size=512, d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return transformers.T5EncoderModel(config)


def _llm(kind: str, *, width: int = _TEXT, head: str = "Model", layers: int = 2) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=width // 2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return getattr(transformers, f"{kind}{head}")(config)


def _qwen_vl(width: int = _TEXT) -> Any:
    text = {
        "vocab_size": 512,
        "hidden_size": width,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": width,
        "patch_size": 14,
    }
    ids = dict(vision_start_token_id=259, vision_end_token_id=260, image_token_id=261, video_token_id=262)
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    )


def _clip(width: int, kind: str = "CLIPTextModel") -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=32,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=258,
        pad_token_id=256,
    )
    return getattr(transformers, kind)(config)


def _vae(channels: int = 4, **settings: Any) -> Any:
    return diffusers.AutoencoderKL(
        sample_size=64,
        block_out_channels=(4,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=2,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **(settings or {"scaling_factor": 1.5, "shift_factor": 0.06}),
    )


def _parts(transformer: Any, **others: Any) -> dict[str, Any]:
    """With the usual parts where no others are given."""
    usual = {"vae": _vae, "scheduler": _euler, "text_encoder": _t5, "tokenizer": _tokenizer}
    made = {name: make() for name, make in usual.items() if name not in others}
    return {"transformer": transformer, **made, **others}


def _sd3() -> dict[str, Any]:
    return _parts(
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
        scheduler=_euler(shift=3.0),
        text_encoder=_clip(8, "CLIPTextModelWithProjection"),
        tokenizer=_tokenizer(77),
        text_encoder_2=_clip(16, "CLIPTextModelWithProjection"),
        tokenizer_2=_tokenizer(77),
        text_encoder_3=_t5(),
        tokenizer_3=_tokenizer(),
    )


def _chroma() -> dict[str, Any]:
    return _parts(
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


def _flux_dev() -> dict[str, Any]:
    return _parts(
        diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            axes_dims_rope=[4, 4, 8],
            guidance_embeds=True,
        ),
        scheduler=_euler(use_dynamic_shifting=True),
        text_encoder=_clip(16),
        tokenizer=_tokenizer(77),
        text_encoder_2=_t5(),
        tokenizer_2=_tokenizer(),
    )


def _flux2_klein() -> dict[str, Any]:
    return _parts(
        diffusers.Flux2Transformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=_TEXT,
            timestep_guidance_channels=32,
            axes_dims_rope=[4, 4, 4, 4],
            guidance_embeds=False,
        ),
        vae=_flux2_vae(),
        text_encoder=_llm("Qwen3", head="ForCausalLM"),
    )


def _flux2_vae() -> Any:
    return diffusers.AutoencoderKLFlux2(
        sample_size=64,
        block_out_channels=(4,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _qwen_image_vae() -> Any:
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.75, -0.7, 0.1, 0.95],
        latents_std=[2.8, 1.45, 2.3, 0.6],
    )


def _qwen_image() -> dict[str, Any]:
    return _parts(
        diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=_TEXT,
            axes_dims_rope=(8, 4, 4),
        ),
        vae=_qwen_image_vae(),
        scheduler=_euler(use_dynamic_shifting=True, shift_terminal=0.02),
        text_encoder=_qwen_vl(),
        tokenizer=_tokenizer(2048),
    )


def _z_image() -> dict[str, Any]:
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=_TEXT,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 64, 64],
    )
    with torch.no_grad():
        transformer.x_pad_token.fill_(1.0)  # made by torch.empty
        transformer.cap_pad_token.fill_(1.0)
    return {
        "transformer": transformer,
        "vae": _vae(4),
        "scheduler": _euler(shift=3.0),
        "text_encoder": _llm("Qwen3"),
        "tokenizer": _tokenizer(),
    }


def _dc() -> Any:
    return diffusers.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )


def _sana() -> dict[str, Any]:
    return _parts(
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
            caption_channels=_TEXT,
            sample_size=32,
        ),
        vae=_dc(),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, final_sigmas_type="zero"
        ),
        text_encoder=_llm("Gemma2"),
    )


def _lumina2() -> dict[str, Any]:
    return _parts(
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
            cap_feat_dim=_TEXT,
        ),
        text_encoder=_llm("Gemma2"),
    )


def _aura_flow() -> dict[str, Any]:
    return _parts(
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


def _ovis() -> dict[str, Any]:
    return _parts(
        diffusers.OvisImageTransformer2DModel(
            patch_size=1,
            in_channels=16,
            out_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=_TEXT,
            axes_dims_rope=(4, 4, 8),
        ),
        text_encoder=_llm("Qwen3"),
    )


def _krea2() -> dict[str, Any]:
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
        "vae": _qwen_image_vae(),
        "scheduler": _euler(use_dynamic_shifting=True),
        "text_encoder": transformers.Qwen3VLModel(
            transformers.Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=261, video_token_id=262)
        ),
        "tokenizer": _tokenizer(2048),
        "text_encoder_select_layers": (0, 1, 2),
    }


def _bria() -> dict[str, Any]:
    return _parts(
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
        vae=_vae(4, scaling_factor=0.13, shift_factor=0),
    )


def _cogview4() -> dict[str, Any]:
    return _parts(
        diffusers.CogView4Transformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=4,
            num_attention_heads=4,
            out_channels=4,
            text_embed_dim=_TEXT,
            time_embed_dim=8,
            condition_dim=4,
        ),
        scheduler=_euler(
            base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
        ),
        text_encoder=_llm("Glm", head="ForCausalLM"),
    )


def _wan() -> dict[str, Any]:
    return _parts(
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
        vae=diffusers.AutoencoderKLWan(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[-0.75, -0.7, 0.1, 0.95],
            latents_std=[2.8, 1.45, 2.3, 0.6],
        ),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer_2=None,
    )


def _hunyuan_video() -> dict[str, Any]:
    return _parts(
        diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4,
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
        vae=diffusers.AutoencoderKLHunyuanVideo(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            scaling_factor=0.476986,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
        ),
        scheduler=_euler(shift=7.0),
        text_encoder=_llm("Llama"),
        text_encoder_2=_clip(8),
        tokenizer_2=_tokenizer(77),
    )


def _ltx() -> dict[str, Any]:
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
        "scheduler": _euler(use_dynamic_shifting=True, shift_terminal=0.1),
        "text_encoder": _t5(),
        "tokenizer": _tokenizer(),
    }


def _mochi() -> dict[str, Any]:
    return _parts(
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
        scheduler=_euler(invert_sigmas=True),
    )


def _ernie() -> dict[str, Any]:
    return _parts(
        diffusers.ErnieImageTransformer2DModel(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=64,
            in_channels=16,
            out_channels=16,
            text_in_dim=_TEXT,
            rope_axes_dim=(4, 6, 6),
        ),
        vae=_flux2_vae(),
        scheduler=_euler(shift=3.0),
        text_encoder=_llm("Llama"),
    )


def _scale(scale: float) -> dict[str, Any]:
    return {"guidance_scale": scale}


def _added_scale(scale: float) -> dict[str, Any]:
    """Of pipelines that add the scaled difference to the positive prediction; they are off at 0."""
    return {"guidance_scale": scale - 1}


FAMILIES: dict[str, Family] = {
    "StableDiffusion3Pipeline": Family(parts=_sd3, guided=_scale, idle=1),
    "FluxPipeline": Family(parts=_flux_dev, call={"guidance_scale": 2.5}),
    "Flux2KleinPipeline": Family(
        parts=_flux2_klein, call={"text_encoder_out_layers": [1]}, guided=_scale, negative=None
    ),
    "ChromaPipeline": Family(parts=_chroma, guided=_scale),
    "QwenImagePipeline": Family(
        parts=_qwen_image,
        guided=lambda scale: {"true_cfg_scale": scale},
        guidance="norm-corrected",
        is_ragged=True,
        idle=2,
    ),
    "ZImagePipeline": Family(
        parts=_z_image,
        guided=_added_scale,
        is_ragged=True,
    ),
    "SanaPipeline": Family(parts=_sana, call={"complex_human_instruction": None}, guided=_scale),
    "Lumina2Pipeline": Family(parts=_lumina2),
    "AuraFlowPipeline": Family(parts=_aura_flow, guided=_scale, takes_row_sigmas=False),
    "OvisImagePipeline": Family(parts=_ovis, guided=_scale),
    "Krea2Pipeline": Family(parts=_krea2, guided=_added_scale),
    "BriaPipeline": Family(parts=_bria, guided=_scale),
    "ErnieImagePipeline": Family(parts=_ernie, guided=_scale, takes_row_sigmas=False, is_ragged=True),
    "WanPipeline": Family(parts=_wan, guided=_scale, frames=9),
    "HunyuanVideoPipeline": Family(
        parts=_hunyuan_video, call={"prompt_template": {"template": "{}", "crop_start": 0}}, frames=9
    ),
    "LTXPipeline": Family(parts=_ltx, guided=_scale, frames=9),
    "MochiPipeline": Family(parts=_mochi, guided=_scale, sign=-1, frames=7, idle=1),
}
REFUSED: dict[str, Callable[[], dict[str, Any]]] = {"CogView4Pipeline": _cogview4}
"""Pipelines that are refused when they are loaded, with the number that is off."""
