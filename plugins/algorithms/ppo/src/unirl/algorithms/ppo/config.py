"""Settings of PPO over tokens and over denoise steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.loss.kl_config import KlConfig
from unirl.numerics.tokens.policy_config import AGGREGATIONS, TokenPolicyConfig
from unirl.numerics.train.critic_config import GaeConfig, unused_advantage_settings

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["FlowPpoConfig", "PpoConfig"]


@dataclass
class PpoConfig(TokenPolicyConfig, GaeConfig):
    aggregation: str = one_of(*AGGREGATIONS, default="token-mean")
    """How token losses of policy and critic are aggregated. `token-mean`: mean over all tokens; `seq-mean-token-mean`:
    mean over each completion, so that its length does not matter; `seq-mean-token-sum`: sum over each completion;
    `seq-mean-token-sum-norm`: that sum divided by `horizon`."""
    horizon: float | None = limit(None, above=0)
    """Constant that `seq-mean-token-sum-norm` divides by, such as ${sampling.max_new_tokens}."""
    kl_in_reward: bool = True
    """Where the KL penalty goes while `kl_coef` is above 0: into each token's reward (True), or into the loss."""
    kl_estimator: str = "k1"
    """Estimator of each token's KL. In the reward: `k1`, the log-prob difference, unbiased; `k3`, never negative; or
    `k2`. In the loss: `k3` or `k2`, since the gradient of `k1` is 0 on average."""

    @property
    def kl_is_loss(self) -> bool:
        return not self.kl_in_reward

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also a horizon without its aggregation, gradient settings of a KL in the reward, and group advantages."""
        yield from super().problems(plan, stage)
        has_constant = self.aggregation == "seq-mean-token-sum-norm"
        if (self.horizon is not None) != has_constant:
            yield Reason(
                key=".horizon",
                text=f"got {self.horizon} with aggregation {self.aggregation!r}; expected a number above 0 with "
                "seq-mean-token-sum-norm, such as '${sampling.max_new_tokens}', and null otherwise.",
            )
        for key in ("kl_straight_through", "kl_weighs_by_ratio"):
            if self.kl_in_reward and getattr(self, key):
                yield Reason(
                    key=f".{key}",
                    text="got true, but a KL penalty in the reward has no gradient; set it to false, or "
                    "algorithm.kl_in_reward=false.",
                )
        if stage is not None:
            yield from unused_advantage_settings(stage)


@dataclass
class FlowPpoConfig(KlConfig, GaeConfig):
    clip_range: float = limit(1e-4, above=0, most=1)
    """Clip range of the ratio. Log-probs are averaged over the latent's elements, so 1e-4 here is a mean shift of 0.026
    standard deviations at 65,536 elements. Use larger values for small latents."""
    clip_range_high: float | None = limit(None, above=0)
    """Upper clip range, if it differs from the lower one."""

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Lower and upper clip range."""
        return self.clip_range, self.clip_range if self.clip_range_high is None else self.clip_range_high

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also group advantages, and log-probs without the constants that the KL divides by."""
        yield from super().problems(plan, stage)
        if stage is None:
            return
        yield from unused_advantage_settings(stage)
        sampling = stage.sampling
        if not self.kl_coef or not isinstance(sampling, LatentSamplingConfig) or sampling.kernel != "cps":
            return
        if sampling.kernel_options.get("constants") is False:
            yield Reason(
                key="sampling.kernel_options.constants",
                text="got false, which drops the constants of the log-prob that kl_coef divides by; set it to true, or "
                "algorithm.kl_coef=0.",
            )
