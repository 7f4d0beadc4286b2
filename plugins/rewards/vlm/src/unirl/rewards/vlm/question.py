"""Questions to a judge, and what every judge answers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image
from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput
from unirl.numerics.media import load_image

from .template import Template

__all__ = ["Answerer", "Question", "pictures_of", "png_of", "sources_of"]

_SLACK = 1e-4
"""Rounding that a decoder may leave outside [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Question:
    text: str
    images: tuple[Image.Image, ...]
    """Shown before the text, in this order. RGB, 8 bits."""


class Answerer(Protocol):
    def texts(self, questions: Sequence[Question], *, max_new_tokens: int) -> list[str]:
        """The answer to each question; "" for one that is empty or cut off. Raises RewardFailed."""
        ...

    def expected(self, questions: Sequence[Question], template: Template) -> list[tuple[float, ...]]:
        """The expected value of each score of the template, for each question."""
        ...

    def stated(self, questions: Sequence[Question], answers: Sequence[frozenset[str]]) -> list[tuple[float, str]]:
        """Probability that an answer begins with one of these spellings of a word, and the most probable first token,
        for each question. Raises RewardFailed."""
        ...

    def plain(self, text: str) -> str:
        """A text to quote in a question, in which no control token of the judge is one."""
        ...

    def close(self) -> None: ...


def pictures_of(samples: ScoreInput, *, reward: str, num_frames: int) -> list[tuple[Image.Image, ...]]:
    """The image of each sample, or `num_frames` frames of its video at equal distances, first and last among them.

    Raises RewardFailed for other media, and for pixels outside [0, 1]; NaN counts as outside.
    """
    is_video = samples.media is not None and samples.media.kind == "video"
    result: list[tuple[Image.Image, ...]] = []
    for row, pixels in enumerate(samples.of("video" if is_video else "image", reward=reward).arrays):
        frames: Tensor = pixels if is_video else pixels[None]
        if not bool(((frames >= -_SLACK) & (frames <= 1 + _SLACK)).all()):
            raise RewardFailed(
                f"reward.{reward}: sample {samples.sample_ids[row]!r} (prompt {samples.inputs.prompts[row]!r}) has NaN "
                "or values outside [0, 1]; pixels must lie in [0, 1]."
            )
        count = min(num_frames, len(frames))
        places = np.linspace(0, len(frames) - 1, count).round().astype(int) if count > 1 else [0]
        result.append(tuple(_pil(frames[int(place)]) for place in places))
    return result


def sources_of(samples: ScoreInput, *, reward: str) -> list[tuple[Image.Image, ...]]:
    """The source images of each sample's prompt. Raises RewardFailed for a sample without one."""
    read: dict[str, Image.Image] = {}
    result: list[tuple[Image.Image, ...]] = []
    for row, media in enumerate(samples.inputs.media):
        refs = [ref for ref in media if ref.role == "source" and ref.modality == "image"]
        if not refs:
            raise RewardFailed(
                f"reward.{reward}: sample {samples.sample_ids[row]!r} (prompt {samples.inputs.prompts[row]!r}) has no "
                "source image; expected media of role `source` and modality `image` in the prompt file."
            )
        for ref in refs:
            if ref.uri not in read:
                read[ref.uri] = _pil(load_image(ref))
        result.append(tuple(read[ref.uri] for ref in refs))
    return result


def png_of(image: Image.Image) -> bytes:
    """The image as a PNG file: every pixel as it is."""
    out = io.BytesIO()
    # Level 1: a local endpoint is waited for, and a photograph shrinks little either way.
    image.save(out, format="png", compress_level=1)
    return out.getvalue()


def _pil(pixels: Tensor) -> Image.Image:
    """pixels: [3, H, W] in [0, 1]."""
    return Image.fromarray((pixels.detach().float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy())
