"""Settings of SRPO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.numerics.loss.reward_loss_config import RewardLossConfig, outside_rectified_flow

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["SrpoConfig"]


@dataclass
class SrpoConfig(RewardLossConfig):
    num_points: int = limit(4, least=1)
    """Noise levels at which each sample is trained on, drawn anew for each rollout, one in each of this many equal
    parts of 0 to 1. Each costs a forward and a decoding."""
    step: float = limit(0.1, above=0, most=1)
    """Length in sigma of the model's step from each point; a point nearer to 0 steps to 0."""
    discount: float = limit(1.0, above=0, most=1)
    """A point weighs this times as much as the next noisier one: less than 1 favours early steps, where a reward is
    harder to exploit."""
    positive: str = ""
    """Phrase put before each prompt for the reward, such as `Realistic photo.`; empty is the prompt itself."""
    negative: str = ""
    """Phrase put before each prompt for a second reward, which is subtracted; empty subtracts nothing. What the reward
    says of both wordings alike then has no gradient. Only rewards that read the prompt can be compared so."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also phrases without a difference, and a sampler whose latents are noised otherwise."""
        yield from super().problems(plan, stage)
        if self.negative and self.positive == self.negative:
            yield Reason(
                key=".negative",
                text=f"got {self.negative!r}, which is algorithm.positive as well; their difference is 0. Choose "
                "another phrase, or an empty one.",
            )
        yield from outside_rectified_flow(stage, key="sampling.kernel", advice="Use sampling.kernel=euler.")
