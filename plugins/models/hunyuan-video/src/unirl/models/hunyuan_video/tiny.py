# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""A random miniature checkpoint in the ordinary layout, for tests and the conformance matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
)

__all__ = ["write"]

_CHANNELS, _TEXT_WIDTH, _POOLED_WIDTH = 4, 32, 16
_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""Where Llama 3 splits text into words."""
_WORDS = (
    *("Ġthe", "Ġvideo", "Ġby", "Ġdetailing", "Ġfollowing", "Ġaspects", "ĠThe", "Ġmain", "Ġcontent", "Ġand", "Ġtheme"),
    *("Ġof", "Ġcolor", "Ġshape", "Ġsize", "Ġtexture", "Ġquantity", "Ġtext", "Ġspatial", "Ġrelationships", "Ġobjects"),
    *("ĠActions", "Ġevents", "Ġbehaviors", "Ġtemporal", "Ġphysical", "Ġmovement", "Ġchanges", "Ġbackground"),
    *("Ġenvironment", "Ġlight", "Ġstyle", "Ġatmosphere", "Ġcamera", "Ġangles", "Ġmovements", "Ġtransitions", "Ġused"),
    *("Ġin", "Ġleft", "ĊĊ", "Describe", "system", "user"),
)
"""Those of the pipeline's template, as byte-level BPE writes them: one token each, as in Llama 3's vocabulary. And
"left", without which two prompts of the conformance suite would have equally many tokens."""


def write(folder: Path, *, seed: int) -> None:
    """Write a `HunyuanVideoPipeline` of about 0.4 M random parameters; same seed, same bytes.

    VAE of 8x in space and 4x in time with 4 channels. The shift is that of the release.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, clip = _tokenizer(), _clip_tokenizer()
        HunyuanVideoPipeline(
            transformer=_transformer(),
            vae=_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
            text_encoder=_text_encoder(tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=_clip_encoder(clip),
            tokenizer_2=clip,
        ).save_pretrained(folder)


def _transformer() -> HunyuanVideoTransformer3DModel:
    """Every weight moved, so that no zero or one of the initialisation hides a term."""
    result = HunyuanVideoTransformer3DModel(
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        guidance_embeds=True,
        text_embed_dim=_TEXT_WIDTH,
        pooled_projection_dim=_POOLED_WIDTH,
        rope_axes_dim=(4, 6, 6),
    )
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return result


def _vae() -> AutoencoderKLHunyuanVideo:
    return AutoencoderKLHunyuanVideo(
        latent_channels=_CHANNELS,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )


def _text_encoder(tokenizer: PreTrainedTokenizerFast) -> LlamaModel:
    return LlamaModel(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=1024,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            # Wider than usual, so that a token's state depends on those before it and not on itself alone.
            initializer_range=0.2,
        )
    )


def _clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=_POOLED_WIDTH,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=77,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """Llama 3's byte-level BPE, with merges for the words of the template alone: the rest is one token a byte."""
    merges = list(dict.fromkeys((word[:end], word[end]) for word in _WORDS for end in range(1, len(word))))
    vocab = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    inner: Any = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocab)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(_SPECIAL))
    begin = _SPECIAL[0]
    inner.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, inner.token_to_id(begin))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=begin, eos_token="<|eot_id|>", pad_token="<|end_of_text|>"
    )


def _clip_tokenizer() -> CLIPTokenizer:
    """CLIP's byte-level BPE without merges: one token a character."""
    letters = [chr(code) for code in range(33, 127)]
    vocab = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    return CLIPTokenizer(vocab={token: index for index, token in enumerate(vocab)}, merges=[], model_max_length=77)
