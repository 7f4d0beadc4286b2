"""The divergence of tokens from the reference policy, as every loss over tokens adds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .adaptive_kl import AdaptiveKl
from .kl import KlEstimator, kl_estimate
from .policy_metrics import mean_over
from .token_policy import TokenWeights

if TYPE_CHECKING:
    from unirl.core.kl import TokenKlConfig
    from unirl.core.roles import Metric, Replay
    from unirl.core.track import Track

    from .reduction import LossTerm

__all__ = ["TokenKl", "token_kl"]


def token_kl(log_probs: Tensor, reference: Tensor, *, old_log_probs: Tensor, config: TokenKlConfig) -> Tensor:
    """What `config` takes for the divergence of each token. All [n, S]; the reference gets no gradient.

    old_log_probs: of the policy that sampled, for `kl_weighs_by_ratio`.
    """
    kl = kl_estimate(
        log_probs,
        reference,
        estimator=cast(KlEstimator, config.kl_estimator),
        straight_through=config.kl_straight_through,
    )
    return kl * (log_probs - old_log_probs).exp() if config.kl_weighs_by_ratio else kl


class TokenKl(AdaptiveKl):
    """What an algorithm over tokens inherits that adds a divergence to its loss: the term `kl`, with a coefficient that
    may adapt. Both methods give nothing where `kl_coef` is 0, and the reference policy is not run."""

    def __init__(self, kl: TokenKlConfig) -> None:
        super().__init__(kl)
        self._token_kl = kl

    def kl_weights(self, weights: TokenWeights) -> dict[str, Tensor]:
        """What `Algorithm.weights` says of the term.  weights: of all tokens that are trained on."""
        return {"kl": weights.announced} if self._token_kl.kl_coef else {}

    def kl_terms(
        self, track: Track, replay: Replay, *, log_probs: Tensor, old_log_probs: Tensor, weights: TokenWeights
    ) -> tuple[list[LossTerm], dict[str, Metric]]:
        """The term of the loss, and `kl` for the log: its mean over the tokens.

        log_probs, old_log_probs: [n, S] of the policy that trains and of the old one, finite everywhere.
        """
        if not self._token_kl.kl_coef:
            return [], {}
        reference = replay(track, policy="reference").log_probs
        kl = token_kl(
            log_probs,
            # What weighs nothing may be no number, and must not reach an exponential.
            torch.where(weights.counted > 0, reference, 0.0),
            old_log_probs=old_log_probs,
            config=self._token_kl,
        )
        return [weights.term("kl", kl, scale=self.kl_coef)], {"kl": mean_over(kl, weights.counted)}
