"""Settings of advantage weighted matching."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.numerics.forward_config import ForwardConfig, unguided

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["AwmConfig"]


@dataclass
class AwmConfig(ForwardConfig):
    weighting: str = one_of("uniform", "t", "t2", "huber", "ghuber", default="uniform")
    """Log-prob at a point of noise level t with the error e of flow matching: `uniform`, -e; `t`, -t e; `t2`, -t^2 e;
    `huber`, -t sqrt(e); `ghuber`, -t e^p / p. The paper has `uniform`, its published code `ghuber`."""
    ghuber_power: float = limit(0.25, above=0, most=1)
    """The power p of `ghuber`."""
    ratio_over: str = one_of("point", "sample", default="point")
    """A ratio for each `point`, or one for each `sample` from the mean log-prob of its points."""
    clip_range: float = limit(1e-3, above=0, most=1)
    """Clip range of the ratio. Errors are averaged over the latent's elements, so ratios stay close to 1. The published
    code has 1, which binds nowhere, with one update for each rollout."""
    scale: float = limit(1.0, above=0)
    """Factor of the policy loss. The published code divides advantages by their clip, 5; that is 0.2 here."""
    kl_coef: float = limit(0.0, least=0)
    """Coefficient of the squared distance to the velocity of the initial policy, 0.003 in the published code; 0 turns
    it off."""
    lagged_coef: float = limit(0.0, least=0)
    """Coefficient of the squared distance to the velocity of the lagged policy, which then makes the rollouts as well;
    1 in the published code. 0 turns it off, and the live policy makes them."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also samples made with guidance."""
        yield from super().problems(plan, stage)
        yield from unguided(stage)
