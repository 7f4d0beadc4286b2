"""Mirror symmetry, read off the pixels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config

from symmetry_reward.config import SymmetryConfig
from symmetry_reward.plugin import SPEC

__all__ = ["Symmetry", "build", "mirror_symmetry"]

_DIMS = {"left-right": -1, "top-bottom": -2}
"""Dim of [N, 3, H, W] that is turned around."""


def build(config: SymmetryConfig, *, device: Any) -> Symmetry:
    """device: has no weights to put there; it scores where the images are."""
    check_config(config, key=f"reward.{SPEC.name}")
    return Symmetry(axis=config.axis)


class Symmetry:
    """A `unirl.core.roles.Reward`. Scores are differentiable with respect to the pixels."""

    def __init__(self, *, axis: str) -> None:
        self._axis = axis

    def score(self, samples: ScoreInput) -> Scores:
        """One number for each sample, in their order. Raises RewardFailed for what cannot be scored."""
        images = samples.of("image", reward=SPEC.name).stacked
        finite = images.detach().isfinite().flatten(1).all(dim=1)
        if not bool(finite.all()):
            sample = samples.sample_ids[int((~finite).nonzero()[0])]
            raise RewardFailed(f"reward.{SPEC.name}: sample {sample!r} has pixels that are not finite.")
        parts = {axis: mirror_symmetry(images, dim=dim) for axis, dim in _DIMS.items()}
        both = torch.stack(list(parts.values())).mean(dim=0)
        values = both if self._axis == "both" else parts[self._axis]
        return Scores(values=values, parts={axis: result.detach() for axis, result in parts.items()})

    def close(self) -> None:
        """Nothing is held."""


def mirror_symmetry(images: Tensor, *, dim: int) -> Tensor:
    """1 - mean (x - x')^2, x' being x turned around along `dim`.

    images: [N, 3, H, W] in [0, 1].  Returns [N] in [0, 1], of their dtype, with gradient.
    Squares rather than absolute values: the gradient has no jump where a pixel meets its mirror image.
    """
    return 1 - (images - images.flip(dim)).square().flatten(1).mean(dim=1)
