"""BAGEL's frozen ViT in the names of its published checkpoint, on the layers of transformers' SigLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipEncoder

__all__ = ["Vision", "grid_places", "vision_config"]


def vision_config(settings: Mapping[str, Any]) -> SiglipVisionConfig:
    """Settings in vit_config.json. The checkpoint has one layer fewer than they say, and no pooling head."""
    config = SiglipVisionConfig(**{**settings, "num_hidden_layers": settings["num_hidden_layers"] - 1})
    config._attn_implementation = "sdpa"
    return config


def grid_places(height: int, width: int, *, side: int) -> Tensor:
    """[height * width] places of a grid in the upper left corner of a table of `side` columns, row by row."""
    return (torch.arange(height)[:, None] * side + torch.arange(width)).flatten()


class _Embeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(config.num_channels * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding((config.image_size // config.patch_size) ** 2, config.hidden_size)


class _Transformer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embeddings, self.encoder = _Embeddings(config), SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class _Holder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_model = _Transformer(config)


class Vision(nn.Module):
    _keys_to_ignore_on_load_unexpected: ClassVar[tuple[str, ...]] = (r"^(?!vit_model\.)",)
    """Tensors of the checkpoint that `module.Bagel` loads."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.patch: int = config.patch_size
        self.side: int = config.image_size // config.patch_size
        self.vit_model = _Holder(config)

    def forward(self, pixels: Tensor) -> Tensor:
        """[n, V] of an image [1, 3, H, W] in [-1, 1], whose sides are multiples of the patch: its patches row by row,
        all of which see each other."""
        model, patch = self.vit_model.vision_model, self.patch
        height, width = pixels.shape[2] // patch, pixels.shape[3] // patch
        # Numbers of a patch in the order row, column, channel.
        patches = pixels[0].unflatten(2, (width, patch)).unflatten(1, (height, patch))
        flat = patches.permute(1, 3, 2, 4, 0).reshape(height * width, -1)
        embeddings = model.embeddings
        states = embeddings.patch_embedding(flat.to(embeddings.patch_embedding.weight.dtype))
        places = grid_places(height, width, side=self.side).to(pixels.device)
        states = states + embeddings.position_embedding(places)
        return model.post_layernorm(model.encoder(inputs_embeds=states[None]).last_hidden_state[0])
