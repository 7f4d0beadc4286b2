"""Golden vectors of PPO's clipped loss, the basis of many losses."""

from __future__ import annotations

import pytest

__all__ = ["CLIPS", "CLIPS_WITHOUT_DUAL"]

_NAMES = ("log_ratio", "advantage", "settings", "expected")
_ONE_SIDED = [
    (0.5, 1.0, {}, -1.2),
    (-0.5, 1.0, {}, -0.6065306597),
    (1.5, -1.0, {}, 4.4816890703),
    (0.1, -1.0, {}, 1.1051709181),
    (0.5, 1.0, {"clip_range_high": 0.28}, -1.28),
]
CLIPS = pytest.mark.parametrize(_NAMES, [*_ONE_SIDED, (1.5, -1.0, {"dual_clip": 3.0}, 3.0)])
"""Parametrizes a test by one log-ratio, one advantage, settings beside a clip range of 0.2, and the loss, which has ten
decimals."""
CLIPS_WITHOUT_DUAL = pytest.mark.parametrize(_NAMES, _ONE_SIDED)
"""The same, for a loss that has no dual clip."""
