"""Settings of DPO."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.numerics.loss.compared_samples import PairsConfig

__all__ = ["DpoConfig"]


@dataclass
class DpoConfig(PairsConfig):
    beta: float = limit(0.1, above=0)
    """Strength of the pull to the reference policy: the larger, the closer the model stays. The paper has 0.1, and 0.5
    for summaries. With `length_normalized` use larger ones, such as 5."""
    label_smoothing: float = limit(0.0, least=0, below=0.5)
    """Probability that a preference is the wrong way round, for noisy labels (conservative DPO)."""
    length_normalized: bool = False
    """Compare means over the tokens of a completion in place of sums (Tulu 3, arXiv 2411.15124), so that longer
    completions have no larger margin."""
