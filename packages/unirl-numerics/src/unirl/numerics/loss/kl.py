"""KL to a reference policy: estimators from log-probs of samples, and control of the KL coefficient."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .losses import LOG_RATIO_MAX

__all__ = ["KlEstimator", "KlRule", "kl_estimate", "next_kl_coefficient"]

KlEstimator = Literal["k1", "k2", "k3"]
KlRule = Literal["proportional", "doubling"]


def kl_estimate(
    log_probs: Tensor, reference_log_probs: Tensor, *, estimator: KlEstimator = "k3", straight_through: bool = False
) -> Tensor:
    """An estimate of KL(pi || reference) from samples of pi, element by element.

    log_probs, reference_log_probs: any one shape: [n, L] of tokens, [n, S] of transitions.  With d = log pi - log ref:

    - k1 = d. Unbiased, may be negative. Useless as a loss, since its expected gradient is 0. For rewards.
    - k2 = d^2 / 2. Biased in value; its expected gradient is that of KL(pi || ref).
    - k3 = exp(-d) - 1 + d. Unbiased and never negative; its expected gradient is that of KL(ref || pi).

    straight_through: the value of the estimator with the gradient of k2.
    The reference has no gradient. In k3, d is clamped to +-`LOG_RATIO_MAX`, with no gradient beyond. All expectations
    are over samples of pi itself: with samples of an older policy, weight by the ratio.

    Raises ValueError for shapes that differ and for an unknown estimator.
    Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
    """
    if log_probs.shape != reference_log_probs.shape:
        raise ValueError(
            f"kl_estimate: shapes {list(log_probs.shape)} and {list(reference_log_probs.shape)} must be equal."
        )
    difference = log_probs - reference_log_probs.detach()
    k2 = 0.5 * difference.square()
    if estimator == "k1":
        value = difference
    elif estimator == "k2":
        value = k2
    elif estimator == "k3":
        bounded = difference.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
        value = torch.expm1(-bounded) + bounded
    else:
        raise ValueError(f"kl_estimate: estimator '{estimator}' is not known; known are k1, k2, k3.")
    return value.detach() + k2 - k2.detach() if straight_through else value


def next_kl_coefficient(
    coefficient: float, kl: float, *, target: float, rule: KlRule = "proportional", gain: float = 0.1
) -> float:
    """The KL coefficient of the next step, which moves the measured `kl` towards `target`.

    coefficient: of this step, > 0; it is all the state there is.  kl: mean over this step, in the target's unit.
    "proportional": coefficient * (1 + gain * clip(kl / target - 1, -0.2, 0.2)).  gain: of a step; a horizon of H
    samples is gain = samples of the step / H.  Source: Ziegler et al., arXiv 1909.08593, section 2.2.
    "doubling": halved where kl < target / 1.5, doubled where kl > 1.5 target.  Source: PPO, arXiv 1707.06347, the rule
    below equation 8.

    Raises ValueError for a coefficient, target or gain that is not positive, a NaN kl, or an unknown rule.
    """
    if not (coefficient > 0 and target > 0 and gain > 0):
        raise ValueError(
            f"next_kl_coefficient: coefficient = {coefficient}, target = {target}, gain = {gain}; all must be above 0. "
            "A coefficient of 0 stays 0: leave the rule out instead."
        )
    if kl != kl:
        raise ValueError("next_kl_coefficient: the measured kl is not a number; look at the log-probs of the step.")
    if rule == "proportional":
        return coefficient * (1.0 + gain * min(max(kl / target - 1.0, -0.2), 0.2))
    if rule == "doubling":
        return coefficient * (0.5 if kl < target / 1.5 else 2.0 if kl > 1.5 * target else 1.0)
    raise ValueError(f"next_kl_coefficient: rule '{rule}' is not known; known are proportional, doubling.")
