"""The frozen half of HunyuanImage-3.0: VAE and ViT, and what they make of images. It never depends on what trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Siglip2VisionConfig, Siglip2VisionModel
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil
from unirl.core.errors import RecipeError
from unirl.core.types.array import Ragged
from unirl.core.types.data import MediaRef
from unirl.model_host.lazy_weights import CheckpointValues, empty_parameters
from unirl.model_host.unified.sequence import Block
from unirl.numerics.media import load_picture

from .resolutions import Resolutions
from .vae import HunyuanVae, vae_sizes

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["NAMES", "Images", "Vision", "cropped"]

NAMES = ("latents", "latent_sizes", "features", "feature_sizes")
"""What source images are in conditions."""


class Vision(nn.Module):
    """The ViT, transformers' SigLIP2 without its pooling head."""

    _keys_to_ignore_on_load_unexpected: ClassVar[tuple[str, ...]] = (r"^(?!vision_model\.)", r"^vision_model\.head\.")
    """Tensors of the checkpoint that others load, or that are not used."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        config = Siglip2VisionConfig(**{**settings, "vision_use_head": False})
        self.vision_model: Any = Siglip2VisionModel._from_config(config, attn_implementation="sdpa")


class Images:
    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        folder: Path,
        files: Sequence[Path],
        resolutions: Resolutions,
        batch: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
    ) -> None:
        """settings: config.json.  files: of the weights.  batch: images per call of the VAE; 0 is all.  dtypes: of the
        ViT and the VAE.

        Raises RecipeError, key `model.path`, for weights that are missing or unknown.
        """
        self._resolutions, self._batch, self._device = resolutions, batch, device
        try:
            sizes = vae_sizes(settings["vae"])
            self._processor: Any = Siglip2ImageProcessorPil.from_dict(dict(settings["vit_processor"]))
            with empty_parameters(dtypes[0]):
                vision = Vision(settings["vit"])
        except KeyError as error:
            raise RecipeError(f"model.path: config.json in {str(folder)!r} lacks {error}. Fetch it again.") from error
        except ValueError as error:
            raise RecipeError(
                f"model.path: in config.json of {str(folder)!r}, {error}. Choose another checkpoint."
            ) from error
        with empty_parameters(dtypes[1]):
            vae = HunyuanVae(sizes)
        for part in (vision, vae):
            values = CheckpointValues(part, files)
            part.requires_grad_(False).eval().to_empty(device=device)
            values.fill(part.state_dict())
        self.vision, self.vae = vision.vision_model, vae
        self._channels, self._width = sizes.channels, settings["vit"]["hidden_size"]

    @property
    def features(self) -> int:
        """Features of every image, those of padding included, as the published code has them."""
        return self._processor.max_num_patches

    def tokens(self, ref: MediaRef) -> tuple[int, int, int]:
        """Number of the ratio of a source image, and of its latents and features."""
        width, height = load_picture(ref).size
        ratio = self._resolutions.nearest(height, width)
        own, unit = self._resolutions.sizes[ratio], self._resolutions.unit
        return ratio, own[0] * own[1] // unit**2, self.features

    def encoded(self, sequences: Sequence[Sequence[Block]]) -> dict[str, Ragged]:
        """Conditions of the images in each sequence, by `NAMES`."""
        rows = [self._of_blocks(blocks) for blocks in sequences]
        return {name: tuple(row[name] for row in rows) for name in NAMES}

    def latents(self, media: Tensor) -> Tensor:
        """Normalised latents [N, C, h, w] of images in [-1, 1], at the mean of the posterior."""
        return torch.cat([self.vae.encode(chunk) for chunk in media.split(self._batch or len(media))])

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] fp32 in [0, 1] of such latents."""
        chunks = latents.split(self._batch or len(latents))
        return (torch.cat([self.vae.decode(chunk) for chunk in chunks]) / 2 + 0.5).clamp(0, 1)

    def _of_blocks(self, blocks: Sequence[Block]) -> dict[str, Tensor]:
        latents, features = [torch.zeros(0, self._channels)], [torch.zeros(0, self._width)]
        sizes: dict[str, list[Sequence[int]]] = {"latent": [], "feature": []}
        for block in blocks:
            image = load_picture(block.ref).convert("RGB")
            if block.kind == "latent":
                height, width = self._resolutions.sizes[self._resolutions.nearest(image.height, image.width)]
                pixels = torch.from_numpy(np.array(cropped(image, height=height, width=width)))
                grid = self.latents((pixels.permute(2, 0, 1)[None].float() / 127.5 - 1).to(self._device))
                latents.append(grid[0].flatten(1).T)
                sizes["latent"].append(grid.shape[2:])
            else:
                given = {name: value.to(self._device) for name, value in self._processed(image).items()}
                features.append(self.vision(**given).last_hidden_state[0].float())
                sizes["feature"].append(given["spatial_shapes"][0].tolist())
        result = {"latents": latents, "features": features}
        return {
            **{name: torch.cat([part.to(self._device) for part in parts]) for name, parts in result.items()},
            **{f"{kind}_sizes": torch.tensor(own, dtype=torch.int64).view(-1, 2) for kind, own in sizes.items()},
        }

    def _processed(self, image: Image) -> dict[str, Tensor]:
        return dict(cast("Any", self._processor)(image, return_tensors="pt"))


def cropped(image: Image, *, height: int, width: int) -> Image:
    """The middle of an image, scaled so that it fills this size."""
    from PIL.Image import Resampling

    scale = max(height / image.height, width / image.width)
    is_wide = height / image.height >= width / image.width
    size = (round(image.width * scale), height) if is_wide else (width, round(image.height * scale))
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    return image.resize(size, Resampling.LANCZOS).crop((left, top, left + width, top + height))
