# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
"""Tokenizers, encoders and VAEs of tiny random pipelines."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from tokenizers.processors import TemplateProcessing
from unirl.model_host.tokens.miniature import byte_tokenizer

TEXT = 16
"""Width of language models."""
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type']=='text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


def tokenizer(length: int = 512) -> Any:
    """A token a byte, and one for the end, as T5's and CLIP's have it."""
    result = byte_tokenizer(_QWEN, chat_template=_CHAT)
    end = [("<|im_end|>", result.eos_token_id)]
    result.backend_tokenizer.post_processor = TemplateProcessing(single="$A <|im_end|>", special_tokens=end)
    result.model_max_length = length
    return result


def euler(**settings: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def t5(width: int = 32) -> Any:
    config = transformers.T5Config(vocab_size=512, d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return transformers.T5EncoderModel(config)


def llm(kind: str, *, width: int = TEXT, head: str = "Model", vocab_size: int = 512) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=2,
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


def qwen_vl(width: int = TEXT) -> Any:
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


def qwen2_vl(width: int = TEXT) -> Any:
    text = {"vocab_size": 512, "hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.2}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    seen = {"depth": 1, "embed_dim": 16, "hidden_size": width, "mlp_ratio": 2, "num_heads": 2}
    ids = dict(vision_start_token_id=259, vision_end_token_id=260, image_token_id=261, video_token_id=262)
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=seen, **ids)
    return transformers.Qwen2VLForConditionalGeneration(config)


def clip(width: int, kind: str = "CLIPTextModel", *, positions: int = 77) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=32,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=258,
        pad_token_id=256,
    )
    return getattr(transformers, kind)(config)


def vae(channels: int = 4, **settings: Any) -> Any:
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


def flux2_vae() -> Any:
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


def qwen_image_vae() -> Any:
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.75, -0.7, 0.1, 0.95],
        latents_std=[2.8, 1.45, 2.3, 0.6],
    )


def unipc() -> Any:
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def wan_vae() -> Any:
    return diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.75, -0.7, 0.1, 0.95],
        latents_std=[2.8, 1.45, 2.3, 0.6],
    )


def hunyuan_vae() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
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
    )


def processor(kind: str = "Qwen2VL", *, patch_size: int = 14, longest: int = 56) -> Any:
    """Processor of images and texts, without the part for videos."""
    size = {"shortest_edge": (2 * patch_size) ** 2, "longest_edge": longest**2}
    images = transformers.Qwen2VLImageProcessorPil(patch_size=patch_size, size=size)
    own = getattr(transformers, f"{kind}Processor")
    return own(image_processor=images, tokenizer=tokenizer(2048), chat_template=_CHAT)


def vision(width: int = 16) -> Any:
    config = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=16,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    return config


def dc() -> Any:
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


def with_usual(transformer: Any, **others: Any) -> dict[str, Any]:
    """With the usual parts where no others are given."""
    usual = {"vae": vae, "scheduler": euler, "text_encoder": t5, "tokenizer": tokenizer}
    made = {name: make() for name, make in usual.items() if name not in others}
    return {"transformer": transformer, **made, **others}
