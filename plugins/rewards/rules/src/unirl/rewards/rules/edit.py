"""Reward of edits in the world of shapes: is what was asked for there, and is everything else as in the source?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.numerics.media import load_image

from .config import EditConfig
from .edits_world import ATTRIBUTES, VALUES
from .image_input import images_of
from .metadata_input import indices_of, words_of
from .shapes_reading import NOTHING, read_shapes, shape_region
from .shapes_world import SIZE_PX

__all__ = ["EditReward", "build"]

_NAME = "edit"
MAX_DIFFERENCE = 0.1
"""Per channel: a pixel that differs by more has changed. JPEG and a VAE stay below on plain backgrounds."""
MARGIN_PX = 3
"""Around a shape; its soft edge is not background."""
ENOUGH_BACKGROUND = 0.99
"""Share of the background that counts as all of it: what a VAE leaves here and there should not order good edits."""


def build(config: EditConfig, *, device: Any) -> EditReward:
    return EditReward()


class EditReward:
    """Reads source and result by rule; see `shapes_reading` for the thresholds."""

    @torch.no_grad()
    def score(self, samples: ScoreInput) -> Scores:
        """asked x kept x background, in [0, 1], and each of them.

        asked: 1 where the attribute that metadata `attribute` names has the value `value`.  kept: share of the other
        two attributes that equal the source's.  background: share of the pixels outside of both shapes that differ
        from the source's by at most 0.1 in every channel, over 0.99, at most 1.  perfect: 1 where all three are 1.

        Raises RewardFailed, naming the sample, for metadata of other words, for a prompt without exactly one image of
        role `source`, and for a source of another size, without a shape of this world, or that has the value already.
        """
        images = images_of(samples, reward=_NAME, size_px=(SIZE_PX, SIZE_PX))
        sources, row_of = _sources(samples)
        sources, rows = sources.to(images), torch.tensor(row_of, device=images.device)
        seen, before = _read(images), _read(sources)[rows]
        attribute = torch.tensor(indices_of(samples, "attribute", ATTRIBUTES, reward=_NAME), device=images.device)
        value = torch.tensor(_values(samples, attribute), device=images.device)
        chosen = torch.nn.functional.one_hot(attribute, len(ATTRIBUTES)).bool()
        _check_sources(samples, before, value=value, chosen=chosen)
        asked = (seen[chosen] == value).float()
        kept = ((seen == before) & ~chosen).sum(dim=1) / (len(ATTRIBUTES) - 1)
        background = (_background(images, sources[rows]) / ENOUGH_BACKGROUND).clamp(max=1)
        is_perfect = (asked == 1) & (kept == 1) & (background == 1)
        parts = {"asked": asked, "kept": kept, "background": background, "perfect": is_perfect.float()}
        return Scores(values=asked * kept * background, parts=parts)

    def close(self) -> None:
        pass


def _read(images: Tensor) -> Tensor:
    """[N, 3] indices of colour, shape and place, in the order of ATTRIBUTES."""
    seen = read_shapes(images)
    return torch.stack([getattr(seen, name) for name in ATTRIBUTES], dim=1)


def _values(samples: ScoreInput, attribute: Tensor) -> list[int]:
    """The index of each sample's value among those of its attribute."""
    result: list[int] = []
    words = words_of(samples, "value", reward=_NAME)
    for row, (word, number) in enumerate(zip(words, attribute.tolist(), strict=True)):
        known = VALUES[ATTRIBUTES[number]]
        if word not in known:
            raise RewardFailed(
                f"reward.{_NAME}: metadata 'value' of sample {samples.sample_ids[row]!r} is {word!r}; for attribute "
                f"{ATTRIBUTES[number]!r} it is one of {', '.join(known)}."
            )
        result.append(known.index(word))
    return result


def _sources(samples: ScoreInput) -> tuple[Tensor, list[int]]:
    """The distinct source images [S, 3, 64, 64], and which of them belongs to each sample."""
    images: list[Tensor] = []
    number_of: dict[str, int] = {}
    result: list[int] = []
    for row, media in enumerate(samples.inputs.media):
        refs = [ref for ref in media if ref.role == "source" and ref.modality == "image"]
        if len(refs) != 1:
            raise _failed(samples, row, f"got {len(refs)} source images, expected one of role `source`")
        (ref,) = refs
        if ref.uri not in number_of:
            image = load_image(ref)
            if image.shape[1:] != (SIZE_PX, SIZE_PX):
                size = f"{image.shape[1]} x {image.shape[2]}"
                raise _failed(samples, row, f"got a source of {size} pixels, expected {SIZE_PX} x {SIZE_PX}")
            number_of[ref.uri] = len(images)
            images.append(image)
        result.append(number_of[ref.uri])
    if not images:
        return torch.zeros(0, 3, SIZE_PX, SIZE_PX), result
    return torch.stack(images), result


def _check_sources(samples: ScoreInput, before: Tensor, *, value: Tensor, chosen: Tensor) -> None:
    for row in ((before == NOTHING).any(dim=1)).nonzero().flatten().tolist():
        lacking = " and ".join(
            name for name, index in zip(ATTRIBUTES, before[row].tolist(), strict=True) if index == NOTHING
        )
        raise _failed(samples, row, f"the source shows no {lacking} of the world of shapes")
    for row in (before[chosen] == value).nonzero().flatten().tolist():
        name = str(samples.metadata[row]["value"])
        raise _failed(samples, row, f"the source is {name!r} already, so there is nothing to edit; change `value`")


def _failed(samples: ScoreInput, row: int, problem: str) -> RewardFailed:
    name, prompt = samples.sample_ids[row], samples.inputs.prompts[row]
    return RewardFailed(f"reward.{_NAME}: sample {name!r} (prompt {prompt!r}): {problem}. Change the prompt file.")


def _background(images: Tensor, sources: Tensor) -> Tensor:
    """[N] share of the pixels outside of both shapes that are as in the source; 0 where no pixel is outside."""
    regions = [shape_region(each, margin_px=MARGIN_PX) for each in (images, sources)]
    outside = ~(regions[0] | regions[1])
    is_same = (images - sources).abs().amax(dim=1) <= MAX_DIFFERENCE
    return (outside & is_same).sum(dim=(1, 2)) / outside.sum(dim=(1, 2)).clamp(min=1)
