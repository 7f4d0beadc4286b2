"""Settings of DiffusionNFT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.numerics.forward_config import ForwardConfig, unguided

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["DiffusionNftConfig"]


@dataclass
class DiffusionNftConfig(ForwardConfig):
    beta: float = limit(1.0, above=0)
    """Guidance strength: the positive and the negative policy are this far from the lagged one, in units of the step
    from it to the trained one. The paper has 1, or 0.1 for OCR and several rewards."""
    advantage_clip: float = limit(5.0, above=0)
    """An advantage A becomes the optimality r = clip(A, -c, c) / 2c + 1/2, between 0 and 1."""
    adaptive_weight: bool = True
    """Divide each squared error by its mean absolute error."""
    scale: float = limit(5.0, above=0)
    """Factor of the loss besides 1 / beta, as in the published code. Learning rates depend on it."""
    kl_coef: float = limit(0.0, least=0)
    """Coefficient of the squared distance to the velocity of the initial policy, 1e-4 in the published code; 0 turns it
    off."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also samples made with guidance."""
        yield from super().problems(plan, stage)
        yield from unguided(stage)
