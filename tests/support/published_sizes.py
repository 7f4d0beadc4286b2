"""Published checkpoints without their weights: configs of the published sizes, and the tokenizers of miniatures.

Transformers: the defaults of `ZImageTransformer2DModel` and `QwenImageTransformer2DModel` of diffusers, which are those of
the published checkpoints; of SD3.5 Medium, the config of stabilityai/stable-diffusion-3.5-medium; of FLUX.2 [klein] 4B,
`scripts/convert_flux2_to_diffusers.py` of diffusers; of Wan, `wan/configs/wan_t2v_A14B.py` of the repository
Wan-Video/Wan2.2 (dim 5120 of 40 heads, ffn_dim 13824, freq_dim 256, 40 layers, boundary 0.875) and the config of
Wan-AI/Wan2.1-T2V-1.3B-Diffusers; of Qwen3, the config of Qwen/Qwen3-8B. Text encoders: the configs of
openai/clip-vit-large-patch14, laion/CLIP-ViT-bigG-14-laion2B-39B-b160k, google/t5-v1_1-xxl, google/umt5-xxl, Qwen/Qwen3-4B and
Qwen/Qwen2.5-VL-7B-Instruct.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unirl.models.flux2_klein.tiny import write as write_flux2_klein
from unirl.models.qwen3.tiny import write as write_qwen3
from unirl.models.qwen_image.tiny import write as write_qwen_image
from unirl.models.sd3.tiny import write as write_sd3
from unirl.models.wan.tiny import write_wan21, write_wan22
from unirl.models.z_image.tiny import write as write_z_image

__all__ = ["write_published"]

VAE = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32}
CLIP = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072, "projection_dim": 768}
BIG_CLIP = {"num_hidden_layers": 32, "hidden_size": 1280, "intermediate_size": 5120, "projection_dim": 1280}
SD35_MEDIUM = {
    "transformer": {
        "sample_size": 128,
        "num_layers": 24,
        "attention_head_dim": 64,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 384,
        "dual_attention_layers": list(range(13)),
    },
    "text_encoder": {**CLIP, "num_attention_heads": 12, "vocab_size": 49408},
    "text_encoder_2": {**BIG_CLIP, "num_attention_heads": 20, "vocab_size": 49408},
    "text_encoder_3": {
        "vocab_size": 32128,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
    },
    "vae": VAE,
}
QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "layer_types": ["full_attention"] * 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
Z_IMAGE = {
    "transformer": {
        "dim": 3840,
        "n_layers": 30,
        "n_refiner_layers": 2,
        "n_heads": 30,
        "n_kv_heads": 30,
        "cap_feat_dim": 2560,
        "axes_dims": [32, 48, 48],
        "axes_lens": [1024, 512, 512],
    },
    "text_encoder": QWEN3_4B,
    "vae": VAE,
}
WAN_VAE = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "latents_mean": [0.0] * 16,
    "latents_std": [1.0] * 16,
}
QWEN_IMAGE = {
    "transformer": {
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "axes_dims_rope": [16, 56, 56],
    },
    "text_encoder": {
        "text_config": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "layer_types": ["full_attention"] * 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
        },
    },
    "vae": WAN_VAE,
}
FLUX2_KLEIN_4B = {
    "transformer": {
        "in_channels": 128,
        "num_layers": 5,
        "num_single_layers": 20,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3 * 2560,
        "mlp_ratio": 3.0,
        "axes_dims_rope": [32, 32, 32, 32],
    },
    "text_encoder": QWEN3_4B,
    "vae": {**VAE, "latent_channels": 32},
}
UMT5_XXL = {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
WAN_14B = {
    "attention_head_dim": 128,
    "num_attention_heads": 40,
    "num_layers": 40,
    "ffn_dim": 13824,
    "freq_dim": 256,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "rope_max_seq_len": 1024,
}
WAN22_A14B = {"transformer": WAN_14B, "transformer_2": WAN_14B, "text_encoder": UMT5_XXL, "vae": WAN_VAE}
WAN21_1B = {**WAN22_A14B, "transformer": {**WAN_14B, "num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}}
del WAN21_1B["transformer_2"]
QWEN3_8B = {
    "": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "layer_types": ["full_attention"] * 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
}
PUBLISHED: Mapping[str, tuple[Callable[..., None], Mapping[str, Mapping[str, Any]]]] = {
    "sd3": (write_sd3, SD35_MEDIUM),
    "z-image": (write_z_image, Z_IMAGE),
    "qwen-image": (write_qwen_image, QWEN_IMAGE),
    "flux2-klein": (write_flux2_klein, FLUX2_KLEIN_4B),
    "wan21": (write_wan21, WAN21_1B),
    "wan22": (write_wan22, WAN22_A14B),
    "qwen3": (write_qwen3, QWEN3_8B),
}


def write_published(folder: Path, model: str) -> None:
    """Write the folder of a model, by its name in recipes: no weights."""
    write, sizes = PUBLISHED[model]
    write(folder, seed=0)
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    for name, values in sizes.items():
        path = folder / name / "config.json"
        path.write_text(json.dumps(_over(json.loads(path.read_text(encoding="utf-8")), values)), encoding="utf-8")


def _over(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: _over(settings[key], value) for key, value in values.items() if isinstance(settings.get(key), dict)}
    return {**settings, **values, **inner}
