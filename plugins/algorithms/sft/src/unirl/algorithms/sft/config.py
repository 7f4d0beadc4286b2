"""Settings of supervised fine-tuning, by flow-matching regression or by the next-token loss."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import one_of
from unirl.core.specs.part_config import PartConfig
from unirl.numerics.forward_config import ForwardConfig

__all__ = ["SftConfig", "TextSftConfig"]


@dataclass
class SftConfig(ForwardConfig):
    point_levels: str = one_of("uniform", "logit-normal", "schedule", default="logit-normal")
    """Distribution of the noise levels: `logit-normal`, which prefers the middle, as in the training of Stable
    Diffusion 3; `uniform` over [0, 1]; `schedule`, the levels that the sampler visits."""


@dataclass
class TextSftConfig(PartConfig):
    aggregation: str = one_of("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", default="token-mean")
    """How losses of tokens are aggregated: `token-mean`, the mean over all tokens of the update, as in pretraining;
    `seq-mean-token-mean`: mean over each completion, so that its length does not matter; `seq-mean-token-sum`: sum over
    each completion, its negative log-likelihood."""
