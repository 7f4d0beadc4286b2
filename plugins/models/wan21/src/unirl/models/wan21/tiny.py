# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""A random miniature checkpoint in the ordinary layout, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

__all__ = ["write"]

_TEXT_WIDTH = 32
_CHANNELS = 4


def write(
    folder: Path,
    *,
    seed: int,
    scheduler: UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler | None = None,
) -> None:
    """Write a `WanPipeline` of about 0.4 M random parameters; same seed, same bytes.

    VAE of 8x in space and 4x in time with 4 channels, each with a mean and deviation of its own.  scheduler: another
    one than Wan 2.1's.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        WanPipeline(
            transformer=_noisy(_transformer()),
            scheduler=scheduler or _scheduler(),
            vae=_vae(),
            text_encoder=_text_encoder(),
            tokenizer=_tokenizer(),
        ).save_pretrained(folder)


def _scheduler() -> UniPCMultistepScheduler:
    """The solver that Wan 2.1 is published with, and the shift for 480p."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def _transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        num_layers=2,
        attention_head_dim=24,
        num_attention_heads=2,
        text_dim=_TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=96,
        rope_max_seq_len=64,
    )


def _noisy(transformer: WanTransformer3DModel) -> WanTransformer3DModel:
    """Every weight moved, so that no zero or one of the initialisation hides a term."""
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return transformer


def _vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=_CHANNELS,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.75, -0.7, 0.1, 0.95],
        latents_std=[2.8, 1.45, 2.3, 0.6],
    )


def _text_encoder() -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=64,
            d_model=_TEXT_WIDTH,
            d_kv=16,
            d_ff=48,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
    )


def _tokenizer() -> T5Tokenizer:
    """UMT5's unigram model, one token a character."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    letters = [(letter, -2.0) for letter in "▁abcdefghijklmnopqrstuvwxyz0123456789.,\"'"]
    return T5Tokenizer(vocab=[*special, *letters], extra_ids=0, model_max_length=512)
