"""Settings of centred reward distillation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.numerics.forward_config import ForwardConfig
from unirl.numerics.loss.compared_samples import split_groups

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["CrdConfig"]


@dataclass
class CrdConfig(ForwardConfig):
    beta: float = limit(1.0, above=0)
    """Factor of the difference of two ELBOs in the implied reward: the larger, the smaller the step away from the
    compared policy that fits the advantages. ELBOs are averaged over a latent's elements. Published settings have 1 for
    a tenth of the advantages, the same as 10 here."""
    weighting: str = one_of("uniform", "adaptive", default="adaptive")
    """Weight of the error at each noise level in the ELBO: `uniform`, 1; `adaptive`, the level over the mean absolute
    error, which makes all levels pull about equally."""
    moving_reference: bool = False
    """Imply rewards by the distance to the lagged policy, which then makes the rollouts as well, instead of the initial
    policy. Published settings move it, with a decay of min(0.25 + 0.005 step, 0.999)."""
    kl_coef: float = limit(0.0, least=0)
    """Coefficient of the squared distance to the velocity of the initial policy; 0 turns it off. With `beta` 10, 2 is
    the 0.1 of published settings, whose squared error counts 5 times, of a tenth of the advantages."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also groups of one, and micro-batches smaller than a group."""
        yield from super().problems(plan, stage)
        yield from split_groups(plan, stage)
