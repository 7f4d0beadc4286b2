# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""A random miniature checkpoint in the ordinary layout, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3ForCausalLM
from unirl.model_host.tokens.miniature import byte_tokenizer

__all__ = ["write"]

_TEXT_WIDTH = 32
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}none{% endif %}{% endif %}"
)


def write(folder: Path, *, seed: int, shift: float = 6.0) -> None:
    """Write a `ZImagePipeline` of about 0.5 M random parameters; same seed, same bytes.

    8x VAE with 16 channels.  shift: of the schedule; 6 for Z-Image, 3 for Z-Image-Turbo.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = byte_tokenizer(_SPECIAL, chat_template=_TEMPLATE)
        language_model = _language_model(len(tokenizer))
        ZImagePipeline(
            transformer=_noisy(_transformer()),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
            vae=_vae(),
            text_encoder=language_model.model,
            tokenizer=tokenizer,
        ).save_pretrained(folder)
        # The published checkpoints index a `Qwen3Model`, and hold the weights of a language model under its names.
        language_model.save_pretrained(folder / "text_encoder")


def _transformer() -> ZImageTransformer2DModel:
    return ZImageTransformer2DModel(
        in_channels=16,
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=_TEXT_WIDTH,
        axes_dims=[8, 12, 12],
        axes_lens=[160, 32, 32],
    )


def _noisy(transformer: ZImageTransformer2DModel) -> ZImageTransformer2DModel:
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
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _language_model(vocab_size: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=_TEXT_WIDTH,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            # Wider than usual, so that a token's state depends on those before it and not on itself alone.
            initializer_range=0.2,
        )
    )
