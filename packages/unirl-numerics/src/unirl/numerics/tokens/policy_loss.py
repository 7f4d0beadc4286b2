"""A policy loss over tokens with its optional terms: importance weights, KL penalty, entropy bonus."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from unirl.core.roles import Losses, ReplayedTokens

from ..loss.losses import Surrogate, clipped_surrogate
from ..loss.policy_metrics import mean_over, ratio_metrics
from .importance_weights import ImportanceLevel, truncated_importance_weights
from .kl import TokenKl
from .policy import TokenWeights
from .replay import per_token

if TYPE_CHECKING:
    from unirl.core.roles import Forward
    from unirl.core.types.track import Track
    from unirl.numerics.tokens.policy_config import TokenPolicyConfig

__all__ = ["TokenPolicyLoss"]


class TokenPolicyLoss(TokenKl):
    """Base class of algorithms whose loss compares the tokens' new log-probs with the old ones.

    The terms are `policy`, `kl` and `entropy`, the last two if their coefficients are not 0.
    """

    def __init__(self, config: TokenPolicyConfig) -> None:
        super().__init__(config)
        self._token_policy = config

    def policy_weights(self, policy: TokenWeights, every: TokenWeights) -> dict[str, Tensor]:
        """`Algorithm.loss_weights`.  policy: weights of the policy term.  every: of all trained tokens."""
        result = {"policy": policy.announced, **self.kl_weights(every)}
        return {**result, "entropy": every.announced} if self._token_policy.entropy_coef else result

    def policy_losses(
        self,
        track: Track,
        forward: Forward,
        surrogate: Callable[[Tensor, Tensor, Tensor], tuple[Surrogate, Tensor]],
        *,
        policy: TokenWeights,
        every: TokenWeights,
    ) -> Losses:
        """`Algorithm.loss`.

        surrogate: takes new and old log-probs and bool `counted`, all [n, S] and finite; returns the loss of each token
        and the detached log-ratio that is clipped.
        """
        config, segment = self._token_policy, track.text
        new = forward(track)
        assert isinstance(new, ReplayedTokens)
        # Values at weight 0 may be NaN, and must not reach an exponential.
        is_counted = every.counted > 0
        live = torch.where(is_counted, new.log_probs, 0.0)
        old = torch.where(is_counted, per_token(segment, "log_probs"), 0.0)
        result, log_ratio = surrogate(live, old, is_counted)
        values = result.loss
        metrics = ratio_metrics(result.ratio, result.clipped, log_ratio, policy.counted)
        if config.tis != "none":
            correction = truncated_importance_weights(
                old,
                per_token(segment, "engine_log_probs"),
                is_counted,
                cap=config.tis_cap,
                level=cast(ImportanceLevel, config.tis),
            )
            values = values * correction.weights
            metrics.update(correction.metrics())
        terms = [policy.term("policy", values)]
        divergence, measured = self.kl_terms(track, forward, log_probs=live, old_log_probs=old, weights=every)
        terms += divergence
        metrics |= measured
        entropy = new.entropy
        assert entropy is not None, "a replay of text gives the entropy of every token"
        metrics["entropy"] = mean_over(entropy, every.counted)
        if config.entropy_coef:
            terms.append(every.term("entropy", entropy, scale=-config.entropy_coef))
        return Losses(terms=terms, metrics=metrics)

    def clipped_tokens(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Surrogate, Tensor]:
        """PPO's clipped surrogate of each token. log_ratio: [n, S].  advantages: [n] or [n, S]."""
        low, high = self._token_policy.clip_bounds
        dual = self._token_policy.dual_clip
        result = clipped_surrogate(log_ratio, advantages, clip_low=low, clip_high=high, dual_clip=dual)
        return result, log_ratio.detach()
