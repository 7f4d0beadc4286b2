"""Whether a video starts at the image that it was asked to continue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.numerics.media import load_image
from unirl.numerics.pixels import resize, widened

from .config import FirstFrameConfig
from .temporal import rms
from .video_input import videos_of

__all__ = ["FirstFrameReward", "build"]

_NAME = "first-frame"


def build(config: FirstFrameConfig, *, device: Any) -> FirstFrameReward:
    return FirstFrameReward()


class FirstFrameReward:
    def score(self, samples: ScoreInput) -> Scores:
        """[N] 1 - rms(I(0) - image), 0 to 1; the gradient flows into the first frames.

        The image is the prompt's medium of role `first_frame`, stretched to the size of the video by Pillow's bicubic
        filter where it has another, as pipelines of image to video do.
        Raises RewardFailed for a sample without exactly one, and DataError for a file that cannot be read.
        """
        videos, _ = videos_of(samples, reward=_NAME, least=1)
        read: dict[str, Tensor] = {}
        scores: list[Tensor] = []
        for row, frames in enumerate(videos):
            refs = [ref for ref in samples.inputs.media[row] if ref.role == "first_frame" and ref.modality == "image"]
            if len(refs) != 1:
                raise RewardFailed(
                    f"reward.{_NAME}: got {len(refs)} images of role `first_frame` for sample "
                    f"{samples.sample_ids[row]!r} (prompt {samples.inputs.prompts[row]!r}), expected 1 in the prompt "
                    "file."
                )
            uri = refs[0].uri
            if uri not in read:
                read[uri] = load_image(refs[0])
            start = widened(frames[0])
            image = resize(read[uri][None].to(start), (start.shape[1], start.shape[2]), filter="bicubic")[0]
            scores.append(1 - rms(start - image))
        return Scores(values=torch.stack(scores))

    def close(self) -> None:
        pass
