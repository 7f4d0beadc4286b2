"""The KL coefficient as state of an algorithm: fixed, or adapted towards a target KL after each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .kl import next_kl_coefficient

if TYPE_CHECKING:
    from unirl.numerics.loss.kl_config import KlConfig

__all__ = ["AdaptiveKl"]


class AdaptiveKl:
    """Base class of algorithms that add `kl_coef` times a KL to the loss and log the KL as `kl`.

    The coefficient is the algorithm's state. With `kl_target` it is multiplied after a step of n samples by
    1 + n / kl_horizon * clip(kl / kl_target - 1, -0.2, 0.2), kl being the mean over the step; without, it stays and
    there is no state. Source: Ziegler et al., arXiv 1909.08593, section 2.2.
    """

    def __init__(self, kl: KlConfig) -> None:
        self._kl = kl
        self._kl_coef = kl.kl_coef

    @property
    def kl_coef(self) -> float:
        """The coefficient of this step."""
        return self._kl_coef

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Log the `kl_coef` of this step and compute that of the next.

        A step whose KL is missing or NaN leaves the coefficient unchanged: it took no update, or its updates were
        skipped because their gradients were not finite.
        """
        target, used = self._kl.kl_target, self._kl_coef
        if target is None:
            return {}
        kl = metrics.get("kl", math.nan)
        if not math.isnan(kl):
            gain = metrics["samples"] / self._kl.kl_horizon
            self._kl_coef = next_kl_coefficient(used, kl, target=target, gain=gain)
        return {"kl_coef": used}

    def state(self) -> dict[str, Any]:
        return {} if self._kl.kl_target is None else {"kl_coef": self._kl_coef}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError unless the state is a coefficient above 0."""
        result = state.get("kl_coef")
        if set(state) != {"kl_coef"} or not isinstance(result, float) or not 0 < result < math.inf:
            raise ValueError(f"'kl_coef' alone was expected, a number above 0; found {dict(state)}.")
        self._kl_coef = result
