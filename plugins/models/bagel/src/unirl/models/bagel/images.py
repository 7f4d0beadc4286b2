# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""The frozen half of BAGEL: VAE and ViT, and what they make of images. It never depends on what trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.types.array import Ragged
from unirl.core.types.data import MediaRef
from unirl.model_host.diffusion.sizes import Sizes as ImageSizes
from unirl.model_host.lazy_weights import CheckpointValues, empty_parameters
from unirl.model_host.model_files import read_json
from unirl.model_host.unified.sequence import Block
from unirl.numerics.media import load_picture

from .checkpoint import VAE, VISION, Sizes
from .sources import Scale, pixels
from .vae import load_vae, pack, unpack
from .vision import Vision, grid_places, vision_config

__all__ = ["NAMES", "Images"]

NAMES = ("latents", "latent_places", "features", "feature_places")
"""What source images are in conditions."""
_LEAST_PATCHES = 16 / 70
"""Shortest side for the ViT, as a share of its longest: 224 of 980 pixels."""


class Images:
    def __init__(
        self,
        folder: Path,
        *,
        files: Sequence[Path],
        sizes: Sizes,
        images: ImageSizes,
        patch: int,
        batch: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
    ) -> None:
        """files: of the weights besides the VAE's.  images: sizes that are generated.  patch: side of a latent token,
        in the VAE's latents.  batch: images per call of the VAE; 0 is all.  dtypes: of the ViT and the VAE.

        Raises RecipeError, key `model.path`, for weights that are missing or unknown.
        """
        self._sizes, self._unit, self._patch, self._batch, self._device = sizes, images.unit, patch, batch, device
        with empty_parameters(dtypes[0]):
            self.vision = Vision(vision_config(read_json(folder / VISION))).requires_grad_(False).eval()
        values = CheckpointValues(self.vision, files)
        self.vision.to_empty(device=device)
        values.fill(self.vision.state_dict())
        self.vae: Any = cast(Any, load_vae(folder / VAE, dtype=dtypes[1])).to(device)
        # The table of latents is as large as the largest image: 1024 pixels, at least 512.
        largest, cell = sizes.latent_side * images.unit, self.vision.patch
        self._of_vae = Scale(largest=largest, least=largest // 2, unit=images.unit)
        least = max(1, round(_LEAST_PATCHES * self.vision.side))
        self._of_vision = Scale(largest=self.vision.side * cell, least=least * cell, unit=cell)

    def tokens(self, ref: MediaRef) -> tuple[int, int]:
        """Numbers of the latents and of the features of an image."""
        size = self._of_vae.size(*load_picture(ref).size)
        width, height = self._of_vision.size(*size)
        return size[0] * size[1] // self._unit**2, width * height // self.vision.patch**2

    def encoded(self, sequences: Sequence[Sequence[Block]]) -> dict[str, Ragged]:
        """Conditions of the images in each sequence, by `NAMES`."""
        rows = [self._of_blocks(blocks) for blocks in sequences]
        return {name: tuple(row[name] for row in rows) for name in NAMES}

    def latents(self, media: Tensor) -> Tensor:
        """Normalised latents [N, p p C, h, w] of images in [-1, 1], at the mean of the posterior."""
        settings = self.vae.config
        chunks = media.to(self.vae.dtype).split(self._batch or len(media))
        mean = torch.cat([self.vae.encode(chunk).latent_dist.mode() for chunk in chunks]).float()
        return pack((mean - settings.shift_factor) * settings.scaling_factor, patch=self._patch)

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] fp32 in [0, 1] of such latents."""
        settings = self.vae.config
        packed = latents.float() / settings.scaling_factor + settings.shift_factor
        chunks = unpack(packed, patch=self._patch).to(self.vae.dtype).split(self._batch or len(latents))
        decoded = torch.cat([self.vae.decode(chunk, return_dict=False)[0].float() for chunk in chunks])
        return (decoded / 2 + 0.5).clamp(0, 1)

    def _of_blocks(self, blocks: Sequence[Block]) -> dict[str, Tensor]:
        each: dict[str, list[Tensor]] = {
            "latents": [torch.zeros(0, self._sizes.latent, device=self._device)],
            "features": [torch.zeros(0, self._sizes.vision, device=self._device)],
            "latent_places": [torch.zeros(0, dtype=torch.int64, device=self._device)],
            "feature_places": [torch.zeros(0, dtype=torch.int64, device=self._device)],
        }
        for block in blocks:
            image = self._of_vae.scaled(load_picture(block.ref))
            if block.kind == "latent":
                latents = self.latents(pixels(image).to(self._device))
                tokens, grid, side = latents[0].flatten(1).T, latents.shape[2:], self._sizes.latent_side
            else:
                seen = pixels(self._of_vision.scaled(image)).to(self._device)
                grid, side = (size // self.vision.patch for size in seen.shape[2:]), self.vision.side
                tokens = self.vision(seen)
            each[f"{block.kind}s"].append(tokens.float())
            each[f"{block.kind}_places"].append(grid_places(*grid, side=side).to(self._device))
        return {name: torch.cat(values) for name, values in each.items()}
