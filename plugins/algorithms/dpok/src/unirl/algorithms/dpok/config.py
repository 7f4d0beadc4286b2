"""Settings of DPOK."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.numerics.loss.kl_config import KlConfig
from unirl.numerics.train.critic_config import unused_advantage_settings

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["DpokConfig"]


@dataclass
class DpokConfig(KlConfig):
    clip_range: float = limit(1e-4, above=0, most=1)
    """Clip range of the ratio. A sample outside it has no policy gradient, in whichever direction its ratio moved.
    Log-probs are averaged over the latent's elements, so small latents need larger values."""
    reward_weight: float = limit(100.0, above=0)
    """Factor of the policy loss."""
    kl_coef: float = limit(0.01, least=0)
    """Coefficient of the squared distance of the guided velocities to those of the reference policy (the initial
    weights), averaged over elements; at 0 that policy is not run."""
    critic: bool = False
    """Advantages are rewards less what a critic expects at each step, in place of those of a group. The backend trains
    it: `backend.critic.lr`."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also settings of group advantages beside a critic."""
        yield from super().problems(plan, stage)
        if self.critic and stage is not None:
            yield from unused_advantage_settings(stage)
