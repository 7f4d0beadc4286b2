# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""Checkpoints with random weights in the true layout and architecture: nothing is downloaded, and speed, memory and
precision of sampling and training are those of the published ones.

    python benchmarks/gpu/random_checkpoint.py sd35-medium FOLDER [--size tiny]
    python benchmarks/gpu/random_checkpoint.py wan21-1.3b FOLDER [--size tiny]
    PYTHONPATH=benchmarks python benchmarks/gpu/random_checkpoint.py qwen3-1.7b FOLDER [--size tiny]

The module that trains and the VAE have their published configs. Text encoders have the published widths, which the
transformer sees, and one or two thin layers: prompts are encoded once. Tokenizers are those of the quickstarts.
`--size tiny` writes a miniature, to try the kit without a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from measure import DEVICE
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)
from unirl.quickstart import checkpoint_path, video_checkpoint_path

__all__ = ["sd35_transformer", "wan21_transformer"]

CLIP_WIDTHS = (768, 1280)
T5_WIDTH = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=WRITERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    options = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    options.folder.mkdir(parents=True, exist_ok=True)
    WRITERS[options.model](options.folder, options.size == "tiny")
    size = sum(file.stat().st_size for file in options.folder.rglob("*.safetensors")) / 2**30
    print(f"{options.model}, {options.size}: {size:.2f} GiB in {time.perf_counter() - began:.1f} s")


def sd35_transformer() -> SD3Transformer2DModel:
    """2.24 B parameters. Config: stabilityai/stable-diffusion-3.5-medium, transformer/config.json."""
    return SD3Transformer2DModel(
        sample_size=128,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=24,
        attention_head_dim=64,
        num_attention_heads=24,
        joint_attention_dim=T5_WIDTH,
        caption_projection_dim=1536,
        pooled_projection_dim=sum(CLIP_WIDTHS),
        pos_embed_max_size=384,
        dual_attention_layers=tuple(range(13)),
        qk_norm="rms_norm",
    )


def wan21_transformer() -> WanTransformer3DModel:
    """1.42 B parameters. Config: Wan-AI/Wan2.1-T2V-1.3B-Diffusers, transformer/config.json."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=12,
        attention_head_dim=128,
        in_channels=16,
        out_channels=16,
        text_dim=T5_WIDTH,
        freq_dim=256,
        ffn_dim=8960,
        num_layers=30,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=1024,
    )


def write_sd35(folder: Path, is_tiny: bool) -> None:
    if is_tiny:
        from unirl.models.sd3 import tiny

        tiny.write(folder, seed=0)
        return
    quickstart = checkpoint_path()
    clips = [
        CLIPTokenizer.from_pretrained(quickstart / name, model_max_length=77, trust_remote_code=False)
        for name in CLIP_TOKENIZERS
    ]
    t5 = T5Tokenizer.from_pretrained(quickstart / "tokenizer_3", trust_remote_code=False)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    with torch.device(DEVICE):
        encoders = [_clip(tokenizer, width) for tokenizer, width in zip(clips, CLIP_WIDTHS, strict=True)]
        parts: dict[str, nn.Module] = {
            "transformer": sd35_transformer(),
            "vae": _sd35_vae(),
            "text_encoder": encoders[0],
            "text_encoder_2": encoders[1],
            "text_encoder_3": T5EncoderModel(T5Config(**_t5_settings(len(t5)))),
        }
    tokenizers = {"tokenizer": clips[0], "tokenizer_2": clips[1], "tokenizer_3": t5}
    StableDiffusion3Pipeline(scheduler=scheduler, **tokenizers, **_in_bf16(parts)).save_pretrained(folder)


def write_wan21(folder: Path, is_tiny: bool) -> None:
    if is_tiny:
        from unirl.models.wan import tiny

        tiny.write_wan21(folder, seed=0)
        return
    tokenizer = T5Tokenizer.from_pretrained(
        video_checkpoint_path() / "tokenizer", model_max_length=512, trust_remote_code=False
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    with torch.device(DEVICE):
        parts: dict[str, nn.Module] = {
            "transformer": wan21_transformer(),
            # 8x in space, 4x in time, 16 channels: the published VAE is the default of its class.
            "vae": AutoencoderKLWan(),
            "text_encoder": UMT5EncoderModel(UMT5Config(**_t5_settings(len(tokenizer)))),
        }
    WanPipeline(scheduler=scheduler, tokenizer=tokenizer, **_in_bf16(parts)).save_pretrained(folder)


def write_qwen3(folder: Path, is_tiny: bool) -> None:
    """Every completion reaches the length limit: the stop token cannot be sampled."""
    from trl_cases import LARGER, Case, write_checkpoint

    sizes = LARGER if is_tiny else QWEN3
    with torch.device(DEVICE):
        case = Case(name="random", prompts=1, samples=1, max_new_tokens=1, ends=False, sizes=sizes)
        write_checkpoint(case, folder)


CLIP_TOKENIZERS = ("tokenizer", "tokenizer_2")
QWEN3: Mapping[str, int] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
"""1.72 B parameters. Config: Qwen/Qwen3-1.7B, config.json."""
WRITERS: Mapping[str, Callable[[Path, bool], None]] = {
    "sd35-medium": write_sd35,
    "wan21-1.3b": write_wan21,
    "qwen3-1.7b": write_qwen3,
}


def _sd35_vae() -> AutoencoderKL:
    """Config: stabilityai/stable-diffusion-3.5-medium, vae/config.json."""
    return AutoencoderKL(
        sample_size=1024,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _clip(tokenizer: CLIPTokenizer, width: int) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=width // 64,
            max_position_embeddings=77,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _t5_settings(vocab_size: int) -> dict[str, int | str]:
    """T5-XXL's width and form in one thin layer."""
    thin = {"d_kv": 64, "d_ff": 64, "num_layers": 1, "num_heads": 8}
    return {"vocab_size": vocab_size, "d_model": T5_WIDTH, "feed_forward_proj": "gated-gelu", **thin}


def _in_bf16(parts: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: part.to(torch.bfloat16) for name, part in parts.items()}


if __name__ == "__main__":
    main()
