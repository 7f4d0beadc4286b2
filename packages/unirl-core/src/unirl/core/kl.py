"""Settings of a divergence from the reference policy, alike in every algorithm that has one, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import PartConfig

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["KlConfig", "TokenKlConfig", "kl_reasons"]


@dataclass
class KlConfig(PartConfig):
    """The coefficient of the divergence. The config of an algorithm inherits it."""

    kl_coef: float = 0.0
    """Coefficient of the divergence from the initial policy; 0 never runs that policy."""
    kl_target: float | None = None
    """Divergence that the coefficient is to hold, in the unit of the metric `kl`, which is a mean over tokens or SDE
    steps: the coefficient starts at `kl_coef`, rises after steps above the target and falls after those below it. None
    keeps it as it is."""
    kl_horizon: float = 10_000.0
    """Samples over which an adaptive coefficient changes: a step of n samples changes it by at most 0.2 n / kl_horizon
    of itself."""


@dataclass
class TokenKlConfig(KlConfig):
    """With how the divergence of a token is estimated."""

    kl_estimator: str = "k3"
    """`k3`, never negative; `k2`, whose gradient is that of the divergence; `k1`, the plain difference of log-probs,
    whose own gradient is 0 on average, so that it needs one of the next two."""
    kl_straight_through: bool = False
    """The value of the estimator with the gradient of `k2`."""
    kl_weighs_by_ratio: bool = False
    """Weigh the divergence of a token by its ratio, which has a gradient, so that value and gradient are unbiased with
    samples of the old policy (DeepSeek-V3.2, arXiv 2512.02556; on by default in TRL)."""


def kl_reasons(config: KlConfig, plan: Plan) -> Iterator[str]:
    """Why the settings of a divergence cannot be, for `unirl_check_plan`."""
    if config.kl_coef < 0:
        yield f"algorithm.kl_coef: {config.kl_coef} was asked for; it must be 0 or more."
    if config.kl_horizon <= 0:
        yield f"algorithm.kl_horizon: {config.kl_horizon} was asked for; it must be above 0."
    if config.kl_target is not None:
        yield from _target_reasons(config, config.kl_target, plan)
    if isinstance(config, TokenKlConfig):
        if config.kl_estimator not in ("k1", "k2", "k3"):
            yield f"algorithm.kl_estimator: {config.kl_estimator!r} was asked for; it is one of k1, k2, k3."
        has_gradient = config.kl_estimator != "k1" or config.kl_straight_through or config.kl_weighs_by_ratio
        if config.kl_coef and not has_gradient:
            yield (
                "algorithm.kl_estimator: the gradient of 'k1' is 0 on average, so as a loss it holds nothing back; use "
                "k2 or k3, or set algorithm.kl_straight_through=true or algorithm.kl_weighs_by_ratio=true."
            )


def _target_reasons(config: KlConfig, target: float, plan: Plan) -> Iterator[str]:
    if target <= 0:
        yield f"algorithm.kl_target: {target} was asked for; it must be above 0, or null for a fixed coefficient."
    if config.kl_coef == 0:
        yield (
            f"algorithm.kl_target: {target} was asked for, and a coefficient of 0 stays 0; set algorithm.kl_coef to "
            "the one that it starts at, such as 0.01."
        )
    samples = plan.data.prompts_per_step * plan.data.samples_per_prompt
    if 0 < config.kl_horizon < samples:
        yield (
            f"algorithm.kl_horizon: {config.kl_horizon:g} was asked for, fewer than the {samples} samples of one step; "
            "the coefficient would swing. Use a multiple of them, such as ten times as many."
        )
    if len(plan.sampling) > 1:
        yield (
            f"algorithm.kl_target: one coefficient cannot hold the divergences of {len(plan.sampling)} tracks, "
            f"{', '.join(sorted(plan.sampling))}; set it to null."
        )
