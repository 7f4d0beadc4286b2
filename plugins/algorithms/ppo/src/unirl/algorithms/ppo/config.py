"""Settings of PPO over tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.numerics.tokens.policy_config import AGGREGATIONS, TokenPolicyConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["PpoConfig"]


@dataclass
class PpoConfig(TokenPolicyConfig):
    gamma: float = limit(1.0, least=0, most=1)
    """Discount per token, in [0, 1]; 1 is no discount, usual since the reward comes at the last token."""
    gae_lambda: float = limit(0.95, least=0, most=1)
    """Lambda of GAE, in [0, 1]. 1: return minus value, unbiased. 0: one-step TD error, with the least variance."""
    whiten_advantages: bool = True
    """Normalise advantages to mean 0 and variance 1 over all tokens of the rollout."""
    clip_range_value: float | None = limit(0.2, above=0)
    """Clip range of the value loss: the new value is clipped to this distance from the old one where that makes the
    loss larger; in units of the reward. None turns clipping off."""
    value_coef: float = limit(0.5, above=0, hint="At 0 no critic learns.")
    """Coefficient of the value loss."""
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
        if stage is None:
            return
        for item in dataclasses.fields(stage.advantage):
            result = getattr(stage.advantage, item.name)
            if item.name != "constant_reward" and result != item.default:
                yield Reason(
                    key=f"advantage.{item.name}",
                    text=f"got {result}; the advantages of ppo come from its critic, see algorithm.gae_lambda "
                    "and algorithm.whiten_advantages. Leave it out.",
                )
