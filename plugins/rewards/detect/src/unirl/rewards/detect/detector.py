"""Open-vocabulary object detection with transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForZeroShotObjectDetection

from .checkpoint import load
from .geneval_rules import Detection

__all__ = ["Detector", "query"]

_GROUNDED = ("grounding-dino", "mm-grounding-dino")
_CONTRASTIVE = ("owlv2", "owlvit")


class Detector:
    """Finds all objects of a class. One class per forward pass: no other class competes for a box, and a score does not
    depend on what else the prompt asks for."""

    def __init__(self, path: str, *, key: str, batch_size: int, device: Any) -> None:
        """path: folder of a checkpoint.  key: of this setting. Raises RecipeError as `load` does."""
        self._checkpoint = load(
            path,
            key=key,
            auto=AutoModelForZeroShotObjectDetection,
            kinds=(*_GROUNDED, *_CONTRASTIVE),
            device=device,
        )
        self._batch_size = batch_size

    @torch.no_grad()
    def find(self, images: Sequence[Image.Image], name: str, *, threshold: float) -> list[list[Detection]]:
        """Objects of class `name` with a score above the threshold, for each image; images have one size.

        Boxes are in pixels, clipped to the image.
        """
        result: list[list[Detection]] = []
        for start in range(0, len(images), self._batch_size):
            result += self._found(images[start : start + self._batch_size], name, threshold)
        return result

    def _found(self, images: Sequence[Image.Image], name: str, threshold: float) -> list[list[Detection]]:
        checkpoint = self._checkpoint
        texts = checkpoint.tokens([query(name, kind=checkpoint.kind)] * len(images))
        outputs = checkpoint.model(**texts, **checkpoint.pixels(images))
        width, height = images[0].size
        found = checkpoint.image_processor.post_process_object_detection(
            outputs, threshold=threshold, target_sizes=torch.tensor([[height, width]] * len(images))
        )
        return [list(_inside(one["boxes"].cpu(), one["scores"].tolist(), width=width, height=height)) for one in found]


def _inside(boxes: Tensor, scores: Sequence[float], *, width: int, height: int) -> Iterator[Detection]:
    """Detections clipped to the image, without those outside it, such as in OWLv2's padding. boxes: [n, 4]."""
    clipped = boxes.clamp(min=0).minimum(torch.tensor([width, height, width, height]))
    for (left, top, right, bottom), score in zip(clipped.tolist(), scores, strict=True):
        if right > left and bottom > top:
            yield Detection(box=(left, top, right, bottom), score=score)


def query(name: str, *, kind: str) -> str:
    """The text that a detector was trained to look for: a caption for OWL, a lower-case phrase that ends in a full stop
    for Grounding DINO."""
    return f"{name.lower()}." if kind in _GROUNDED else f"a photo of a {name}"
