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
    inversion_points: int = limit(0, least=0)
    """Inversion: at this many of the least noisy levels the model steps towards noise, where a gradient that raises a
    reward lowers it in samples, and the reward is that with the negative phrase. The other levels have the reward with
    the positive one. 0 subtracts the one from the other at every level."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also phrases without a difference, and a sampler whose latents are noised otherwise."""
        yield from super().problems(plan, stage)
        if self.negative and self.positive == self.negative:
            yield Reason(
                key=".negative",
                text=f"got {self.negative!r}, which is algorithm.positive as well; their difference is 0. Choose "
                "another phrase, or an empty one.",
            )
        if self.inversion_points:
            yield from self._of_inversion()
        yield from outside_rectified_flow(stage, key="sampling.kernel", advice="Use sampling.kernel=euler.")

    def _of_inversion(self) -> Iterator[Reason]:
        count, key = self.inversion_points, ".inversion_points"
        if count >= self.num_points:
            yield Reason(
                key=key,
                text=f"got {count}, expected fewer than algorithm.num_points={self.num_points}: the other levels have "
                "the reward.",
            )
        elif count / self.num_points + self.step >= 1:
            yield Reason(
                key=key,
                text=f"got {count} of {self.num_points} noise levels, from which steps of {self.step:g} lead to pure "
                "noise, which no clean latent is recovered from. Use fewer, or a smaller algorithm.step.",
            )
        if not self.negative:
            yield Reason(key=key, text=f"got {count} without algorithm.negative, whose reward they lower. Set it.")
        if self.reward_loss != "linear":
            yield Reason(
                key=key,
                text=f"got {count} with reward_loss={self.reward_loss}, whose target is that of a reward to raise. Use "
                "reward_loss=linear.",
            )
