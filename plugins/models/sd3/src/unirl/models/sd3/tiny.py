# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""A random miniature checkpoint in the ordinary layout, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

__all__ = ["write"]

_CLIP_WIDTHS = (16, 32)
_T5_WIDTH = 64


def write(
    folder: Path, *, seed: int, with_t5: bool = True, scheduler: FlowMatchEulerDiscreteScheduler | None = None
) -> None:
    """Write a `StableDiffusion3Pipeline` of about 0.3 M random parameters; same seed, same bytes.

    8x VAE with four levels, 16 channels; the text encoders differ in width, so padding and order matter.
    with_t5: False leaves the third encoder out.  scheduler: another one than static shift 3.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip = _clip_tokenizer()
        StableDiffusion3Pipeline(
            transformer=_noisy(_transformer()),
            scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_vae(),
            text_encoder=_clip_encoder(clip, width=_CLIP_WIDTHS[0]),
            tokenizer=clip,
            text_encoder_2=_clip_encoder(clip, width=_CLIP_WIDTHS[1]),
            tokenizer_2=clip,
            text_encoder_3=_t5_encoder() if with_t5 else None,
            tokenizer_3=_t5_tokenizer() if with_t5 else None,
        ).save_pretrained(folder)


def _transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=_T5_WIDTH,
        caption_projection_dim=64,
        pooled_projection_dim=sum(_CLIP_WIDTHS),
        pos_embed_max_size=64,
        qk_norm="rms_norm",
    )


def _noisy(transformer: SD3Transformer2DModel) -> SD3Transformer2DModel:
    """Every weight moved, so that no zero or one of the initialisation hides a term."""
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return transformer


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        sample_size=64,
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _clip_encoder(tokenizer: CLIPTokenizer, *, width: int) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=64,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=77,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _t5_encoder() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=64,
            d_model=_T5_WIDTH,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
    )


def _clip_tokenizer() -> CLIPTokenizer:
    """CLIP's byte-level BPE without merges: one token a character."""
    letters = [chr(code) for code in range(33, 127)]
    vocab = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    return CLIPTokenizer(vocab={token: index for index, token in enumerate(vocab)}, merges=[], model_max_length=77)


def _t5_tokenizer() -> T5Tokenizer:
    """T5's unigram model, one token a character."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    letters = [(letter, -2.0) for letter in "▁abcdefghijklmnopqrstuvwxyz0123456789.,"]
    return T5Tokenizer(vocab=[*special, *letters], extra_ids=0, model_max_length=77)
