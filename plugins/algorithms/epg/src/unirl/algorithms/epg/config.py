"""Settings of ELBO policy gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.numerics.forward_config import ForwardConfig, unguided

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["EpgConfig"]


@dataclass
class EpgConfig(ForwardConfig):
    form: str = one_of("epg", "pepg", "par", default="pepg")
    """`epg`: the policy gradient, weighted by the ratio to the policy that sampled. `pepg`: the same with a penalty on
    the KL divergence from that policy. `par`: regression of the log-ratio on the advantage, with the gradient of
    `pepg`. The paper recommends `pepg`."""
    weighting: str = one_of("uniform", "adaptive", default="adaptive")
    """Weight of the error at each noise level in the ELBO: `uniform`, 1; `adaptive`, the level over the mean absolute
    error, which makes all levels pull about equally, and which the paper recommends."""
    elbo_scale: float = limit(1.0, above=0)
    """Factor of the ELBO, which is averaged over a latent's elements: at 1 ratios stay close to 1, so that the three
    forms differ little; at the number of elements it is the ELBO of the whole sample. Log-ratios, and with them the
    penalty of `pepg` and `par`, grow with it."""
    ratio_over: str = one_of("point", "sample", default="point")
    """A ratio for each `point`, or one for each `sample` from the mean ELBO of its points. The paper has both, and
    finds the first, of a single noise level, as good as the second."""
    kl_coef: float = limit(0.0, least=0)
    """Coefficient of the squared distance to the velocity of the initial policy; 0 turns it off."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also samples made with guidance."""
        yield from super().problems(plan, stage)
        yield from unguided(stage)
