"""How different an image is from the others of its prompt, in CLIP's features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPModel
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config
from unirl.numerics.group_distance import group_distance
from unirl.numerics.pixels import widened

from .config import ClipDiversityConfig
from .dual_encoders import load_encoders
from .files import find_folder
from .preprocess import Preprocess
from .prompts import processor_folder
from .reward import EncoderReward, Scorer

__all__ = ["ClipDiversity", "build"]

_NAME = "clip-diversity"


class Features(Scorer):
    """`score` is [n, width]: the image's features, of length 1. The prompt is not read."""

    encoders = ("model",)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, prompts: Tensor | None) -> Mapping[str, Tensor]:
        return {"score": normalize(widened(self.model.get_image_features(pixel_values=pixels).pooler_output), dim=1)}


class ClipDiversity(EncoderReward):
    """1 less the cosine of two images' features, to the others of a group."""

    def __init__(self, *arguments: Any, to: str, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._to = to

    def score(self, samples: ScoreInput) -> Scores:
        features = super().score(samples).values.detach()

        def distances(rows: Sequence[int]) -> Tensor:
            own = features[list(rows)]
            # Rounding may leave a cosine of 1 above it.
            return (1 - own @ own.T).clamp(min=0)

        return Scores(values=group_distance(samples.group_ids, distances, to=self._to))


def build(config: ClipDiversityConfig, *, device: Any) -> ClipDiversity:
    key = f"reward.{_NAME}"
    check_config(config, key=key)
    folder = find_folder(config.path, key=f"{key}.path", example=ClipDiversityConfig.path)
    model = load_encoders(folder, CLIPModel, key=f"{key}.path")
    # The text encoder is not needed.
    del model.text_model
    preprocess = Preprocess.of_folder(processor_folder(config, folder, reward=_NAME), key=f"{key}.path")
    return ClipDiversity(Features(model), config, name=_NAME, preprocess=preprocess, device=device, to=config.to)
