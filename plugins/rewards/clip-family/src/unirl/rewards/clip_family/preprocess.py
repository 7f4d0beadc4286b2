"""From pixels to an encoder's input: resize, crop or pad, normalise; all with a gradient.

Images are scaled as Pillow scales them, by its antialiased filters, with each of the two passes clipped to [0, 1].
Pillow also rounds each pass to 8 bits, which has no gradient and is left out. On images of 8 bits the difference is at
most 1.2 / 255: half of 1 / 255 from each pass, the first times the sum of the filter's absolute weights, under 1.3.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from torch import Tensor
from torch.nn.functional import pad
from unirl.core.errors import RecipeError
from unirl.model_host.model_files import read_json
from unirl.numerics.pixels import resize

__all__ = ["CLIP_MEAN", "CLIP_STD", "Preprocess"]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_FILE = "preprocessor_config.json"
_FILTERS: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}
"""By Pillow's number."""


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    size_px: tuple[int, int]
    """Height and width of the encoder's input."""
    fit: Literal["crop", "stretch", "pad"]
    """`crop`: the shorter edge to `edge_px`, then the middle.  `stretch`: both edges, whatever the aspect.  `pad`: the
    longer edge, with black around."""
    edge_px: int = 0
    rounds_crop: bool = False
    """Round half a pixel of the crop's offset to even, as torchvision does, instead of down, as transformers does."""
    filter: Literal["bilinear", "bicubic"] = "bicubic"
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    @classmethod
    def of_folder(cls, folder: Path, *, key: str) -> Self:
        """As the folder's `preprocessor_config.json` says. Raises RecipeError, key `key`, for steps not supported."""
        file = folder / _FILE
        config = read_json(file, key=key)
        size: Any = config.get("size", 224)
        edges: dict[str, int] = size if isinstance(size, dict) else {"shortest_edge": size}
        crop: Any = config.get("crop_size") if config.get("do_center_crop", "crop_size" in config) else None
        crop_px = crop if isinstance(crop, dict) else {"height": crop, "width": crop}
        mean, std = (tuple(config.get(name) or ()) for name in ("image_mean", "image_std"))
        is_known = (
            config.get("do_resize", True) and config.get("do_rescale", True) and config.get("do_normalize", True)
        ) and abs(config.get("rescale_factor", 1 / 255) * 255 - 1) < 1e-6
        shortest = edges.get("shortest_edge", 0)
        has_size = crop is None if set(edges) == {"height", "width"} else crop and shortest >= max(crop_px.values())
        if not (is_known and has_size and len(mean) == len(std) == 3 and config.get("resample", 3) in _FILTERS):
            raise RecipeError(
                f"{key}: {str(file)!r} asks for other steps than resize (bilinear or bicubic), centre crop, 1/255 and "
                f"normalise: got {config}. Give the folder of a CLIP or SigLIP checkpoint."
            )
        target = crop_px if crop else edges
        return cls(
            size_px=(target["height"], target["width"]),
            fit="crop" if crop else "stretch",
            edge_px=shortest,
            filter=_FILTERS[config.get("resample", 3)],
            mean=mean,
            std=std,
        )

    def padded(self) -> Self:
        """The same with the whole image in the middle of a black square."""
        return dataclasses.replace(self, fit="pad")

    def __call__(self, images: Tensor) -> Tensor:
        """[N, 3, height, width] of images [N, 3, H, W] in [0, 1], in their dtype, fp32 or fp64."""
        images = self._fitted(images)
        mean, std = (images.new_tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return (images - mean) / std

    def _fitted(self, images: Tensor) -> Tensor:
        (height, width), (rows, columns) = self.size_px, images.shape[2:]
        if self.fit == "stretch":
            return resize(images, self.size_px, filter=self.filter)
        if self.fit == "pad":
            scale = max(height, width) / max(rows, columns)
            scaled = resize(images, (round(rows * scale), round(columns * scale)), filter=self.filter)
            above, left = ((edge - length) // 2 for edge, length in zip(self.size_px, scaled.shape[2:], strict=True))
            return pad(scaled, (left, width - scaled.shape[3] - left, above, height - scaled.shape[2] - above))
        longer = int(self.edge_px * max(rows, columns) / min(rows, columns))
        new = (longer, self.edge_px) if rows > columns else (self.edge_px, longer)
        scaled = resize(images, new, filter=self.filter)
        top, left = (self._offset(edge - length) for edge, length in zip(new, self.size_px, strict=True))
        return scaled[:, :, top : top + height, left : left + width]

    def _offset(self, spare_px: int) -> int:
        return round(spare_px / 2) if self.rounds_crop else spare_px // 2
