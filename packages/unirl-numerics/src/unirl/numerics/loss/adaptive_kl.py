"""The KL penalty of an algorithm: its coefficient, fixed or adapted to a target KL, and the samples that get it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .kl import next_kl_coefficient
from .kl_gate import most_uncertain

if TYPE_CHECKING:
    from unirl.core.types.track import Track
    from unirl.numerics.loss.kl_config import KlConfig

__all__ = ["AdaptiveKl"]


class AdaptiveKl:
    """Base class of algorithms that add `kl_coef` times a KL to the loss and log the KL as `kl`.

    The coefficient is the algorithm's state. With `kl_target` it is multiplied after a step of n samples by
    1 + n / kl_horizon * clip(kl / kl_target - 1, -0.2, 0.2), kl being the mean over the step; without, it stays and
    there is no state. Source: Ziegler et al., arXiv 1909.08593, section 2.2.

    With `kl_gate` below 1 only the most uncertain samples of each group get the penalty, see `most_uncertain`:
    `advantages` goes through `with_kl_weights`, and the KL of the loss through `gated`.
    """

    def __init__(self, kl: KlConfig) -> None:
        self._kl = kl
        self._kl_coef = kl.kl_coef

    @property
    def kl_coef(self) -> float:
        """The coefficient of this step."""
        return self._kl_coef

    def with_kl_weights(self, track: Track, *, reward_weights: Mapping[str, float]) -> Track:
        """The track, all of it, with the `kl_weights` that `kl_gate` asks for. reward_weights: those of the recipe; a
        reward of negative weight counts as its opposite."""
        if not self._kl.kl_coef or self._kl.kl_gate == 1:
            return track
        assert track.rewards is not None
        parts, combined = track.reward_parts, track.rewards
        result = most_uncertain(
            combined,
            [-parts[name] if weight < 0 else parts[name] for name, weight in reward_weights.items()],
            share=self._kl.kl_gate,
            group_ids=track.group_ids,
            sample_ids=track.sample_ids,
            weights=track.sample_weights,
        )
        return dataclasses.replace(track, kl_weights=result)

    def gated(self, kl: Tensor, track: Track) -> Tensor:
        """The KL [n, S] of each token or step as the loss counts it. Every sample counts in the term's total."""
        return kl if track.kl_weights is None else kl * track.kl_weights[:, None]

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
