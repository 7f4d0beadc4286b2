# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""A random miniature checkpoint in the ordinary layout, for tests and the conformance matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from PIL import Image
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
)
from unirl.core.types.data import MediaRef

__all__ = ["media", "media_plus", "write", "write_edit", "write_edit_plus"]

_TEXT_WIDTH = 32
_CHANNELS = 4
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_VIDEO = "<|video_pad|>"
_WORDS = (
    *("system", "Describe", "Ġthe", "Ġimage", "Ġby", "Ġdetailing", "Ġcolor", "Ġshape", "Ġsize", "Ġtexture"),
    *("Ġquantity", "Ġtext", "Ġspatial", "Ġrelationships", "Ġof", "Ġobjects", "Ġand", "Ġbackground"),
    *("user", "assistant"),
)
"""Those of the pipeline's template, as byte-level BPE writes them: one token each, as in Qwen2.5-VL's vocabulary."""
_EDIT_WORDS = (
    *("system", "Describe", "Ġthe", "Ġkey", "Ġfeatures", "Ġof", "Ġinput", "Ġimage", "Ġ(", "Ġconsistency", "color"),
    *("Ġshape", "Ġsize", "Ġtexture", "Ġobjects", "Ġbackground", "),", "Ġthen", "Ġexplain", "Ġhow", "Ġuser", "'s"),
    *("Ġtext", "Ġinstruction", "Ġshould", "Ġalter", "Ġor", "Ġmodify", "ĠGenerate", "Ġa", "Ġnew", "Ġthat", "Ġmeets"),
    *("Ġrequirements", "Ġwhile", "Ġmaintaining", "Ġwith", "Ġoriginal", "Ġwhere", "Ġappropriate", "user", "assistant"),
)
"""The same of the template for editing; a word comes before those that begin with a part of it."""


def write(folder: Path, *, seed: int, scheduler: FlowMatchEulerDiscreteScheduler | None = None) -> None:
    """Write a `QwenImagePipeline` of about 0.6 M random parameters; same seed, same bytes.

    8x VAE with 4 channels, each with its own mean and deviation.  scheduler: another one than Qwen-Image's.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = _tokenizer()
        QwenImagePipeline(
            transformer=_noisy(_transformer()),
            scheduler=scheduler or _scheduler(),
            vae=_vae(),
            text_encoder=_text_encoder(tokenizer),
            tokenizer=tokenizer,
        ).save_pretrained(folder)


def write_edit(folder: Path, *, seed: int) -> None:
    """The same for `QwenImageEditPipeline`."""
    _write_edit(folder, QwenImageEditPipeline, seed=seed, zero_cond_t=False)


def write_edit_plus(folder: Path, *, seed: int, zero_cond_t: bool = True) -> None:
    """The same for `QwenImageEditPlusPipeline`.  zero_cond_t: whether its sources have timestep 0, as in
    Qwen-Image-Edit-2511, or that of the image, as in 2509."""
    _write_edit(folder, QwenImageEditPlusPipeline, seed=seed, zero_cond_t=zero_cond_t)


def media(folder: Path, *, number: int) -> tuple[MediaRef, ...]:
    """Write the source image of sample `number`, random pixels of a ratio that depends on it."""
    return (_source(folder, 10 * number, (((64, 64), (40, 90), (96, 48))[number % 3])),)


def media_plus(folder: Path, *, number: int) -> tuple[MediaRef, ...]:
    """The same with one or two images."""
    sizes = (((64, 64), (96, 48)), ((40, 90),), ((96, 48), (64, 64)))[number % 3]
    return tuple(_source(folder, 10 * number + place, size) for place, size in enumerate(sizes))


def _source(folder: Path, number: int, size: tuple[int, int]) -> MediaRef:
    pixels = np.random.Generator(np.random.Philox(key=number)).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = folder / f"source-{number}.png"
    Image.fromarray(pixels).save(file)
    return MediaRef(modality="image", role="source", uri=str(file))


def _write_edit(folder: Path, kind: Any, *, seed: int, zero_cond_t: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = _tokenizer(_EDIT_WORDS)
        kind(
            transformer=_noisy(_transformer(zero_cond_t=zero_cond_t)),
            scheduler=_scheduler(),
            vae=_vae(),
            text_encoder=_text_encoder(tokenizer),
            tokenizer=tokenizer,
            # By parts: transformers' processor is one of videos, too, which needs torchvision.
            processor=tokenizer,
        ).save_pretrained(folder)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 12845056}).save_pretrained(
        folder / "processor"
    )
    _edit(folder / "processor" / "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessor")
    _edit(folder / "model_index.json", processor=["transformers", "Qwen2VLProcessor"])


def _edit(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}, indent=2))


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The settings that Qwen-Image is published with."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def _transformer(*, zero_cond_t: bool = False) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * _CHANNELS,
        out_channels=_CHANNELS,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=_TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
        zero_cond_t=zero_cond_t,
    )


def _noisy(transformer: QwenImageTransformer2DModel) -> QwenImageTransformer2DModel:
    """Every weight moved, so that no zero or one of the initialisation hides a term."""
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return transformer


def _vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=_CHANNELS,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.75, -0.7, 0.1, 0.95],
        latents_std=[2.8, 1.45, 2.3, 0.6],
    )


def _text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (*_SPECIAL, _VIDEO)}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": _TEXT_WIDTH,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
                # Wider than usual, so that a token's state depends on those before it and not on itself alone.
                "initializer_range": 0.2,
                "bos_token_id": ids["<|endoftext|>"],
                "eos_token_id": ids["<|im_end|>"],
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": _TEXT_WIDTH,
                "patch_size": 14,
            },
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids[_VIDEO],
        )
    )


def _tokenizer(words: tuple[str, ...] = _WORDS) -> Qwen2Tokenizer:
    """Qwen2's byte-level BPE, with merges for the words of the template alone: the rest is one token a byte."""
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    vocab = [*_bytes(), *(left + right for left, right in merges)]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(vocab)},
        merges=merges,
        additional_special_tokens=[*_SPECIAL[1:], _VIDEO],
    )


def _bytes() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes: printable ones as they are, others from 256 on."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = 256 - len(kept)
    return [*map(chr, kept), *(chr(256 + number) for number in range(moved))]
