"""Per-token KL to the reference policy, shared by all token losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..loss.adaptive_kl import AdaptiveKl
from ..loss.kl import KlEstimator, kl_estimate
from ..loss.losses import bounded_ratio
from ..loss.policy_metrics import mean_over
from .policy import TokenWeights

if TYPE_CHECKING:
    from unirl.core.roles import Forward, LossTerm, Metric
    from unirl.core.types.track import Track
    from unirl.numerics.loss.kl_config import TokenKlConfig


__all__ = ["TokenKl", "token_kl"]


def token_kl(log_probs: Tensor, reference: Tensor, *, old_log_probs: Tensor, config: TokenKlConfig) -> Tensor:
    """KL estimate of each token, by the estimator in `config`. All [n, S]; the reference gets no gradient.

    old_log_probs: of the sampling policy, for `kl_weighs_by_ratio`, whose ratio is a `bounded_ratio`.

    With the ratio, the expected gradient over samples of the old policy is that of KL(pi || ref) for every estimator.
    For k1 and k3 that takes the gradient of the ratio as well; with k2 or `kl_straight_through` the estimator has all
    of it, and the ratio has none.
    Source: DeepSeek-V3.2, arXiv 2512.02556, equation 7, for k3.
    """
    kl = kl_estimate(
        log_probs,
        reference,
        estimator=cast(KlEstimator, config.kl_estimator),
        straight_through=config.kl_straight_through,
    )
    if not config.kl_weighs_by_ratio:
        return kl
    ratio = bounded_ratio(log_probs - old_log_probs)
    has_gradient = config.kl_estimator == "k2" or config.kl_straight_through
    return kl * (ratio.detach() if has_gradient else ratio)


class TokenKl(AdaptiveKl):
    """Base class of algorithms over tokens that add a KL penalty to the loss: the term `kl`, with a coefficient that
    may adapt. With `kl_coef` 0 both methods return nothing, and the reference policy is not run."""

    def __init__(self, kl: TokenKlConfig) -> None:
        super().__init__(kl)
        self._token_kl = kl

    def kl_weights(self, weights: TokenWeights) -> dict[str, Tensor]:
        """The term's entry in `Algorithm.loss_weights`.  weights: of all trained tokens."""
        return {"kl": weights.announced} if self._token_kl.kl_coef else {}

    def kl_terms(
        self, track: Track, forward: Forward, *, log_probs: Tensor, old_log_probs: Tensor, weights: TokenWeights
    ) -> tuple[list[LossTerm], dict[str, Metric]]:
        """The loss term, and the metric `kl`: its mean over the tokens.

        log_probs, old_log_probs: [n, S] under the current and the old policy, finite everywhere.
        """
        if not self._token_kl.kl_coef:
            return [], {}
        reference = forward(track, policy="reference").log_probs
        kl = token_kl(
            log_probs,
            # Values at weight 0 may be NaN, and must not reach an exponential.
            torch.where(weights.counted > 0, reference, 0.0),
            old_log_probs=old_log_probs,
            config=self._token_kl,
        )
        term = weights.term("kl", self.gated(kl, track), scale=self.kl_coef)
        return [term], {"kl": mean_over(kl, weights.counted)}
