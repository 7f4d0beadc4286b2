"""Settings of PPO over tokens."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.token_policy import TokenPolicyConfig

__all__ = ["PpoConfig"]


@dataclass
class PpoConfig(TokenPolicyConfig):
    gamma: float = 1.0
    """Discount from token to token, in [0, 1]; 1 is none, as the reward of a text comes at its end."""
    gae_lambda: float = 0.95
    """In [0, 1]. 1 compares the reward with the critic's value alone, without bias; 0 compares each value with the next
    one, with the least spread."""
    whiten_advantages: bool = True
    """Shift and scale the advantages to mean 0 and variance 1 over all tokens of the rollout."""
    clip_range_value: float | None = 0.2
    """The critic's new value counts within this distance of its old one, where that makes the loss larger; in units of
    the reward. None clips nothing."""
    value_coef: float = 0.5
    """Factor of the critic's loss."""
    aggregation: str = "token-mean"
    """What a token weighs, for policy and critic: `token-mean`, all alike; `seq-mean-token-mean`, each text alike,
    whatever its length; `seq-mean-token-sum`, the sum of each text; `seq-mean-token-sum-norm`, that divided by
    `horizon`."""
    horizon: float | None = None
    """Constant that `seq-mean-token-sum-norm` divides by, such as ${sampling.max_new_tokens}."""
    kl_in_reward: bool = True
    """Where the divergence goes while `kl_coef` is above 0: into the reward of each token (True), or into the loss."""
    kl_estimator: str = "k1"
    """Of a token's divergence. In the reward `k1`, the plain difference of log-probs, which is unbiased; `k3`, never
    negative; `k2`. In the loss `k3` or `k2`: the gradient of `k1` is 0 on average."""
