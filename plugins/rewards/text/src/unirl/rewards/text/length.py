"""The reward `length`: full within a range, falling linearly outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config

from .config import LengthConfig

__all__ = ["LengthReward", "build", "excess"]

_NAME = "reward.length"


def build(config: LengthConfig, *, device: Any) -> LengthReward:
    return LengthReward(config)


def excess(lengths: Tensor, *, least: int, most: int, falloff: int) -> tuple[Tensor, Tensor]:
    """How far lengths [N] lie above `most` and below `least`, each [N] fp32: 0 to 1 at `falloff` units and beyond.

    1 - over is the score; -over is the soft overlong penalty of DAPO, arXiv 2503.14476, equation 13, with
    `most` = L_max - L_cache and `falloff` = L_cache.
    """
    over, under = (((apart).clamp(min=0) / falloff).clamp(max=1) for apart in (lengths - most, least - lengths))
    return over.float(), under.float()


class LengthReward:
    """Parts, each [N]: `length` in units; `over` and `under`, how far it is out of the range, 0 to 1."""

    def __init__(self, config: LengthConfig) -> None:
        check_config(config, key=_NAME)
        self._config = config

    def score(self, samples: ScoreInput) -> Scores:
        """Raises RewardFailed for `unit: tokens` where the samples have no number of tokens."""
        config, texts = self._config, samples.of("text", reward="length").texts
        if config.unit == "tokens":
            if samples.lengths is None:
                raise RewardFailed(
                    f"{_NAME}.unit: got tokens, and these samples have no number of generated tokens; use it with "
                    "text that an engine generated, or choose words or characters."
                )
            counts = list(samples.lengths)
        else:
            counts = [len(text.split()) if config.unit == "words" else len(text) for text in texts]
        lengths = torch.tensor(counts)
        over, under = excess(lengths, least=config.least, most=config.most, falloff=config.falloff)
        values = (0.0 if config.penalty else 1.0) - over - under
        return Scores(values=values, parts={"length": lengths.float(), "over": over, "under": under})

    def close(self) -> None:
        """Nothing to release."""
