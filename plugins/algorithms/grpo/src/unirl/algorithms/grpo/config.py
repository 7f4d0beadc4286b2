"""Settings of GRPO over tokens. Its relatives have the same settings with other defaults."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.token_policy import TokenPolicyConfig

__all__ = [
    "CispoConfig",
    "DapoConfig",
    "DrGrpoConfig",
    "GrpoConfig",
    "GspoConfig",
    "ReinforcePpConfig",
    "RlooConfig",
]


@dataclass
class GrpoConfig(TokenPolicyConfig):
    loss: str = "clip"
    """`clip`, the clipped surrogate of PPO; `cispo`, which clips the weight of a token and keeps its gradient."""
    ratio: str = "token"
    """`token`: each token has its own ratio. `sequence`: all tokens of a text have one, the geometric mean (GSPO)."""
    aggregation: str = "seq-mean-token-mean"
    """What a token weighs: `token-mean`, all alike; `seq-mean-token-mean`, each text alike, whatever its length;
    `seq-mean-token-sum`, the sum of each text; `seq-mean-token-sum-norm`, that divided by `horizon`."""
    horizon: float | None = None
    """Constant that `seq-mean-token-sum-norm` divides by; None is `max_length`."""
    max_length: int = 0
    """Longest text in tokens, for `horizon` and `overlong_buffer`: ${sampling.max_new_tokens}. 0 where neither needs
    it."""
    overlong_buffer: int = 0
    """Tokens before `max_length` over which the reward of a text falls, linearly, by up to `overlong_penalty`; 0 is no
    penalty (DAPO)."""
    overlong_penalty: float = 1.0
    """What a text of `max_length` loses of its reward."""
    drop_zero_advantage: bool = False
    """Leave texts without signal, as those of a group of equal rewards, out of the average, so that the others weigh
    more."""


@dataclass
class DrGrpoConfig(GrpoConfig):
    aggregation: str = "seq-mean-token-sum-norm"
    """Texts are summed and divided by a constant, so that long ones count in full."""


@dataclass
class DapoConfig(GrpoConfig):
    clip_range_high: float | None = 0.28
    """Upper clip, wider than the lower one: rare tokens may become likelier."""
    aggregation: str = "token-mean"
    """All tokens weigh alike."""
    drop_zero_advantage: bool = True
    """Groups of equal rewards count nowhere; `data.refill_rounds` draws others in their place."""


@dataclass
class GspoConfig(GrpoConfig):
    ratio: str = "sequence"
    """All tokens of a text have one ratio."""
    clip_range: float = 3e-4
    """Lower clip, of a mean over the tokens of a text and therefore small."""
    clip_range_high: float | None = 4e-4
    """Upper clip."""


@dataclass
class RlooConfig(GrpoConfig):
    aggregation: str = "seq-mean-token-sum"
    """The sum over a text: the log-prob of the whole of it."""


@dataclass
class ReinforcePpConfig(GrpoConfig):
    aggregation: str = "token-mean"
    """All tokens weigh alike."""
    kl_estimator: str = "k2"
    """Its gradient is that of the divergence."""


@dataclass
class CispoConfig(GrpoConfig):
    loss: str = "cispo"
    """The weight of a token is clipped, its gradient stays."""
    clip_range: float = 1.0
    """Lower clip of the weight, at 1 - clip_range: 1 is none, as in the paper."""
    clip_range_high: float | None = 4.0
    """Upper clip of the weight, at 1 + clip_range_high. The paper tunes it and gives no number; 5 as the largest weight
    is what arXiv 2510.13786 found to work over a wide range."""
    aggregation: str = "token-mean"
    """All tokens weigh alike."""
