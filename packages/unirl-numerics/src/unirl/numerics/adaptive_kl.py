"""The coefficient of a divergence as the state of an algorithm: fixed, or drawn towards a target after each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .kl import next_kl_coefficient

if TYPE_CHECKING:
    from unirl.core.kl import KlConfig

__all__ = ["AdaptiveKl"]


class AdaptiveKl:
    """What an algorithm inherits that adds `kl_coef` times a divergence to its loss and logs the divergence as `kl`.

    A `unirl.core.roles.StatefulAlgorithm`, whose state is the coefficient. With `kl_target` it is multiplied after a
    step of n samples by 1 + n / kl_horizon * clip(kl / kl_target - 1, -0.2, 0.2), kl being the mean over the step;
    without, it stays and there is no state. Source: Ziegler et al., arXiv 1909.08593, section 2.2.
    """

    def __init__(self, kl: KlConfig) -> None:
        self._kl = kl
        self._kl_coef = kl.kl_coef

    @property
    def kl_coef(self) -> float:
        """The coefficient of this step."""
        return self._kl_coef

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Logs `kl_coef`, which this step had, and moves on to the next one's.

        A step that measured no divergence, or one that is not a number, leaves the coefficient as it is: it took no
        update, or its updates were skipped for gradients that are none either.
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
        """Raises ValueError for anything but a coefficient above 0."""
        found = state.get("kl_coef")
        if set(state) != {"kl_coef"} or not isinstance(found, float) or not 0 < found < math.inf:
            raise ValueError(f"'kl_coef' alone was expected, a number above 0; found {dict(state)}.")
        self._kl_coef = found
