# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""A random miniature checkpoint in the ordinary layout, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

__all__ = ["write"]

_CLIP_WIDTH = 16
_T5_WIDTH = 32


def write(folder: Path, *, seed: int) -> None:
    """Write a `FluxPipeline` without embedded guidance, of about 0.2 M random parameters; same seed, same bytes.

    8x VAE with four channels, packed in patches of 2 x 2; dynamic shift.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        letters = [chr(code) for code in range(33, 127)]
        vocab = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
        clip = CLIPTokenizer(vocab={token: index for index, token in enumerate(vocab)}, merges=[], model_max_length=77)
        special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
        unigrams = [(letter, -2.0) for letter in "▁abcdefghijklmnopqrstuvwxyz0123456789.,"]
        FluxPipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, base_image_seq_len=16, max_image_seq_len=256, base_shift=0.5, max_shift=1.15
            ),
            vae=_vae(),
            text_encoder=_clip_encoder(clip),
            tokenizer=clip,
            text_encoder_2=_t5_encoder(),
            tokenizer_2=T5Tokenizer(vocab=[*special, *unigrams], extra_ids=0, model_max_length=77),
        ).save_pretrained(folder)


def _transformer() -> FluxTransformer2DModel:
    result = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_T5_WIDTH,
        pooled_projection_dim=_CLIP_WIDTH,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=False,
    )
    with torch.no_grad():
        # Every weight moved, so that no zero or one of the initialisation hides a term.
        for parameter in result.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return result


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        sample_size=64,
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=_CLIP_WIDTH,
            intermediate_size=32,
            projection_dim=_CLIP_WIDTH,
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
            d_ff=48,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
    )
