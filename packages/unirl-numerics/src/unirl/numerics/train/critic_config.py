"""Settings of algorithms whose advantages come from a critic, with their limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.core.specs.part_config import PartConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Stage

__all__ = ["GaeConfig", "unused_advantage_settings"]


@dataclass
class GaeConfig(PartConfig):
    """Advantages by GAE and the value loss. An algorithm's config inherits from it. An action is a token or a step."""

    gamma: float = limit(1.0, least=0, most=1)
    """Discount per action, in [0, 1]; 1 (no discount) is usual, since the reward comes at the last one."""
    gae_lambda: float = limit(0.95, least=0, most=1)
    """Lambda of GAE, in [0, 1]. 1: return minus value, unbiased. 0: one-step TD error, with the least variance."""
    whiten_advantages: bool = True
    """Normalise advantages to mean 0 and variance 1 over all actions of the rollout."""
    clip_range_value: float | None = limit(0.2, above=0)
    """Clip range of the value loss: the new value is clipped to this distance from the old one where that makes the
    loss larger; in units of the reward. None turns clipping off."""
    value_coef: float = limit(0.5, above=0, hint="At 0 no critic learns.")
    """Coefficient of the value loss."""


def unused_advantage_settings(stage: Stage) -> Iterator[Reason]:
    """A reason for each setting of group advantages that a recipe gives to an algorithm with a critic."""
    assert stage.algorithm is not None
    for item in dataclasses.fields(stage.advantage):
        result = getattr(stage.advantage, item.name)
        if item.name != "constant_reward" and result != item.default:
            yield Reason(
                key=f"advantage.{item.name}",
                text=f"got {result}; the advantages of {stage.algorithm.name} come from its critic. Leave it out.",
            )
