"""Colours of objects, by zero-shot classification with CLIP.

Source: GenEval, arXiv 2310.11513, section 3: the colour whose texts are most similar to the object's crop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPModel

from .checkpoint import load
from .geneval_metadata import COLORS
from .geneval_rules import Box

__all__ = ["ColorNamer", "crop"]

_TEXTS = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
_LONGEST = 16
"""Aspect ratio of a crop beyond which its ends are cut off."""


class ColorNamer:
    def __init__(self, path: str, *, key: str, batch_size: int, device: Any) -> None:
        """path: folder of a CLIP checkpoint.  key: of this setting. Raises RecipeError as `load` does."""
        self._checkpoint = load(path, key=key, auto=CLIPModel, kinds=("clip",), device=device)
        self._batch_size = batch_size
        self._colors: dict[str, Tensor] = {}

    @torch.no_grad()
    def name(self, crops: Sequence[Image.Image], name: str) -> list[str]:
        """The colour of each crop of an object of class `name`, one of `COLORS`."""
        if name not in self._colors:
            self._colors[name] = self._embedded_colors(name)
        result: list[str] = []
        model = self._checkpoint.model
        for start in range(0, len(crops), self._batch_size):
            pixels = self._checkpoint.pixels(crops[start : start + self._batch_size])
            images = model.visual_projection(model.vision_model(**pixels).pooler_output)
            result += [COLORS[index] for index in (images @ self._colors[name].T).argmax(dim=1).tolist()]
        return result

    def _embedded_colors(self, name: str) -> Tensor:
        """[colours, D] the normalised mean of the normalised embeddings of each colour's texts."""
        model = self._checkpoint.model
        texts = [text.format(color=color, name=name) for color in COLORS for text in _TEXTS]
        embedded = model.text_projection(model.text_model(**self._checkpoint.tokens(texts)).pooler_output)
        embedded = torch.nn.functional.normalize(embedded, dim=-1).unflatten(0, (len(COLORS), len(_TEXTS)))
        return torch.nn.functional.normalize(embedded.mean(dim=1), dim=-1)


def crop(image: Image.Image, box: Box) -> Image.Image:
    """The part of an image inside a box, one pixel at least.

    GenEval paints what Mask2Former's mask leaves out in grey. A detector of boxes has no mask, so the background within
    the box stays. CLIP's image processor takes the square in the middle of a long crop; what is further from it than
    eight times the shorter side is cut off here, since enlarging a line of pixels whole takes gigabytes.
    """
    left, top, right, bottom = (round(value) for value in box)
    left, top = min(left, image.width - 1), min(top, image.height - 1)
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    width, height = right - left, bottom - top
    longest = _LONGEST * min(width, height)
    cut_x, cut_y = max(width - longest, 0) // 2, max(height - longest, 0) // 2
    return image.crop((left + cut_x, top + cut_y, right - cut_x, bottom - cut_y))
