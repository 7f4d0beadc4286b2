"""Settings of direct group preference optimization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.numerics.forward_config import ForwardConfig
from unirl.numerics.loss.compared_samples import split_groups

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["DgpoConfig"]


@dataclass
class DgpoConfig(ForwardConfig):
    beta: float = limit(100.0, above=0)
    """Strength of the pull to the reference policy: the larger, the closer the model stays. The paper has 100. Errors
    are averaged over a latent's elements and over the samples of a group, so that it depends on neither number."""
    point_range: list[float] = limit([0.3, 1.0], least=0, most=1, length=2)
    """Part of the distribution of noise levels which is drawn from, as two quantiles from clean to noise. The paper
    leaves out low levels, at which samples of few steps have artifacts; its authors recommend 0.3 to 0.6."""

    moving_reference: bool = False
    """Compare with the lagged policy, which then makes the rollouts as well, instead of the initial one, as TDM-R1 does
    (arXiv 2603.07700)."""
    kl_coef: float = limit(0.0, least=0)
    """Coefficient of the squared distance to the velocity of the initial policy; 0 turns it off. The authors' code has
    0.02 for a loss without the factor beta, the same as 0.02 beta here."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also groups of one, and micro-batches smaller than a group."""
        yield from super().problems(plan, stage)
        yield from split_groups(plan, stage)
