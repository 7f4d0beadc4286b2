"""ImageReward (arXiv 2304.05977): BLIP's text encoder attends to the image while it reads the prompt; a head rates it.

The published package does not load with current releases of transformers, whose BLIP has the same modules: only names
differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BlipTextConfig, BlipVisionConfig
from transformers.models.blip.modeling_blip import BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel
from unirl.core.errors import RecipeError
from unirl.core.specs.check import check_config
from unirl.model_host.lazy_weights import empty_parameters
from unirl.model_host.model_files import read_json
from unirl.model_host.state_dicts import fill, read_tensors
from unirl.numerics.pixels import widened

from .config import ImageRewardConfig
from .files import find_folder
from .head import build_head
from .preprocess import Preprocess
from .prompts import processor_folder, prompt_reader
from .reward import EncoderReward, Scorer

__all__ = ["build"]

_NAME = "image-reward"
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Mean and standard deviation of the head's output over the authors' data; they standardise a score."""
MAX_TOKENS = 35
HEAD_WIDTH = 64
"""Width of an attention head of BLIP's image encoder, base and large alike."""
_VISION, _TEXT, _HEAD = "blip.visual_encoder.", "blip.text_encoder.", "mlp."
"""Other weights in the file are projections for a loss in training."""
_VISION_NAMES = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "blocks.": "encoder.layers.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
    ".attn.qkv.": ".self_attn.qkv.",
    ".attn.proj.": ".self_attn.projection.",
}
_TEXT_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "layer_norm_eps",
    "pad_token_id",
)
"""Keys of `med_config.json`."""


class BlipRating(Scorer):
    encoders = ("vision", "text")

    def __init__(self, vision: nn.Module, text: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.vision = vision
        self.text = text
        self.head = head

    def encode_prompts(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[P, 2, L]: reading waits for the image."""
        return torch.stack([ids, mask], dim=1)

    def forward(self, pixels: Tensor, prompts: Tensor | None) -> Mapping[str, Tensor]:
        assert prompts is not None
        image = self.vision(pixel_values=pixels).last_hidden_state
        ids, mask = prompts.unbind(dim=1)
        read = self.text(input_ids=ids, attention_mask=mask, encoder_hidden_states=image).last_hidden_state[:, 0]
        rating = self.head(widened(read))[:, 0]
        return {"score": (rating - MEAN) / STD, "raw": rating}


def build(config: ImageRewardConfig, *, device: Any) -> EncoderReward:
    key = f"reward.{_NAME}"
    check_config(config, key=key)
    files = ("ImageReward.pt", "med_config.json")
    folder = find_folder(config.path, key=f"{key}.path", example=ImageRewardConfig.path, files=files)
    file = folder / files[0]
    if not file.is_file():
        raise RecipeError(f"{key}.path: {str(folder)!r} has no {files[0]}. Give the folder with {' and '.join(files)}.")
    text_config = read_json(folder / files[1], key=f"{key}.path")
    state = read_tensors(file, key=f"{key}.path")
    processor = processor_folder(config, folder, reward=_NAME)
    scorer, size_px = _filled(state, text_config, key=f"{key}.path", file=file)
    scorer.reader = prompt_reader(processor, max_tokens=MAX_TOKENS, reward=_NAME)
    preprocess = Preprocess(size_px=(size_px, size_px), fit="crop", edge_px=size_px, rounds_crop=True)
    return EncoderReward(scorer, config, name=_NAME, preprocess=preprocess, device=device)


def _filled(
    state: Mapping[str, Tensor], text_config: Mapping[str, Any], *, key: str, file: Path
) -> tuple[BlipRating, int]:
    """The scorer, and the edge of its images in pixels. Sizes of the image encoder are read off its weights."""
    vision_state, text_state, head_state = (
        {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        for prefix in (_VISION, _TEXT, _HEAD)
    )
    text_state.pop("embeddings.position_ids", None)
    missing = [name for name in _TEXT_KEYS if name not in text_config]
    patches, places = vision_state.get("patch_embed.proj.weight"), vision_state.get("pos_embed")
    if patches is None or places is None or missing:
        what = f"med_config.json lacks {missing[0]!r}" if missing else f"{str(file)!r} lacks {_VISION}*"
        raise RecipeError(f"{key}: {what}, so it is not an ImageReward checkpoint. Give the published folder.")
    width, _, patch_px, _ = patches.shape
    size_px = patch_px * math.isqrt(places.shape[1] - 1)
    vision_config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=len([name for name in vision_state if name.endswith(".norm1.weight")]),
        num_attention_heads=width // HEAD_WIDTH,
        image_size=size_px,
        patch_size=patch_px,
        layer_norm_eps=1e-6,
    )
    chosen = {name: text_config[name] for name in _TEXT_KEYS}
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "sep_token_id"))
    with empty_parameters(torch.float32):
        vision = BlipVisionModel(vision_config)
        text = BlipTextModel(BlipTextConfig(**chosen, **no_ids, encoder_hidden_size=width), add_pooling_layer=False)
    fill(vision, {_vision_name(name): value for name, value in vision_state.items()}, key=key, file=file)
    fill(text, text_state, key=key, file=file)
    head = build_head(head_state, width=chosen["hidden_size"], key=key, file=file)
    return BlipRating(vision, text, head), size_px


def _vision_name(name: str) -> str:
    if name.startswith("norm."):
        return f"post_layernorm.{name.removeprefix('norm.')}"
    for old, new in _VISION_NAMES.items():
        name = name.replace(old, new)
    return name
