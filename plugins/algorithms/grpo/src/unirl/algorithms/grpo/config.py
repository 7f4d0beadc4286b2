"""Settings of GRPO over tokens. Its variants have the same settings with other defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from unirl.core.limits import Reason, limit, one_of
from unirl.core.types.sampling import TextSamplingConfig
from unirl.numerics.tokens.policy_config import AGGREGATIONS, TokenPolicyConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

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
    defined_with: ClassVar[Mapping[str, Any]] = {}
    """Values of `advantage` settings that the algorithm's definition requires."""

    clip_range: float = limit(0.2, above=0, most=1)
    """Lower clip of the ratio, at 1 - clip_range; 1 is none. Also the upper one unless `clip_range_high` is set."""
    loss: str = one_of("clip", "cispo", default="clip")
    """`clip`: PPO's clipped surrogate. `cispo`: clips a token's importance weight and keeps its gradient."""
    ratio: str = one_of("token", "sequence", "completion", default="token")
    """`token`: one ratio per token. `sequence`: one per completion, the geometric mean over its tokens (GSPO).
    `completion`: one per completion, the product over its tokens (off-policy RLOO)."""
    aggregation: str = one_of(*AGGREGATIONS, default="seq-mean-token-mean")
    """How token losses are aggregated. `token-mean`: mean over all tokens; `seq-mean-token-mean`: mean over each
    completion, so that its length does not matter; `seq-mean-token-sum`: sum over each completion;
    `seq-mean-token-sum-norm`: that sum divided by `horizon`."""
    horizon: float | None = limit(None, above=0)
    """Constant that `seq-mean-token-sum-norm` divides by; None is `max_length`."""
    max_length: int = limit(0, least=0)
    """Maximum completion length in tokens, for `horizon` and `overlong_buffer`; normally ${sampling.max_new_tokens}. 0
    where neither needs it."""
    overlong_buffer: int = limit(0, least=0)
    """Soft overlong penalty (DAPO): over this many tokens before `max_length` the reward falls linearly, by up to
    `overlong_penalty`. 0 turns it off."""
    overlong_penalty: float = limit(1.0, least=0)
    """Penalty on the reward of a completion of `max_length` tokens."""
    drop_zero_advantage: bool = False
    """Leave completions with zero advantage, such as those of a zero-variance group, out of the loss average, so that
    the others weigh more."""

    @property
    def has_clipped_loss(self) -> bool:
        return self.loss == "clip"

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also settings of another loss or aggregation, lengths, and advantages that the definition rules out."""
        yield from super().problems(plan, stage)
        yield from self._of_the_loss()
        yield from self._lengths()
        if stage is None or stage.algorithm is None:
            return
        name = stage.algorithm.name
        for key, expected in self.defined_with.items():
            result = getattr(stage.advantage, key)
            if result != expected:
                yield Reason(
                    key=f"advantage.{key}",
                    text=f"got {_yaml(result)}, expected {_yaml(expected)} by the definition of {name}. Set "
                    f"advantage.{key}={_yaml(expected)}, or use algorithm=grpo, which takes any advantage.",
                )
        sampling = stage.sampling
        if isinstance(sampling, TextSamplingConfig) and self.max_length not in (0, sampling.max_new_tokens):
            yield Reason(
                key=".max_length",
                text=f"got {self.max_length}, but track {stage.name!r} has completions of up to "
                f"{sampling.max_new_tokens} tokens. Set algorithm.max_length='${{sampling.max_new_tokens}}'.",
            )
        if stage.environment is not None and self.overlong_buffer:
            yield Reason(
                key=".overlong_buffer",
                text=f"got {self.overlong_buffer}, a penalty on the length of one completion, with environment "
                f"{stage.environment.name!r}, whose episodes have several. Set it to 0; environment.max_tokens limits "
                "an episode.",
            )

    def _of_the_loss(self) -> Iterator[Reason]:
        if self.loss == "clip":
            if self.ratio == "completion" and self.aggregation != "seq-mean-token-sum":
                yield Reason(
                    key=".ratio",
                    text="got 'completion', one ratio per completion, with aggregation "
                    f"{self.aggregation!r}; expected algorithm.aggregation=seq-mean-token-sum, as in algorithm=rloo.",
                )
            return
        if self.dual_clip is not None:
            yield Reason(
                key=".dual_clip",
                text="it bounds the clipped loss; loss 'cispo' has its own bound. Set it to null.",
            )
        if self.ratio != "token":
            yield Reason(
                key=".ratio",
                text="loss 'cispo' weights each token by its own ratio; use 'token', or loss 'clip'.",
            )

    def _lengths(self) -> Iterator[Reason]:
        has_constant = self.aggregation == "seq-mean-token-sum-norm"
        if self.horizon is not None and not has_constant:
            yield Reason(
                key=".horizon",
                text=f"got {self.horizon}, but algorithm.aggregation {self.aggregation!r} does not divide by a "
                "constant. Set it to null, or use seq-mean-token-sum-norm.",
            )
        if self.overlong_buffer > self.max_length > 0:
            yield Reason(
                key=".overlong_buffer",
                text=f"got {self.overlong_buffer}, expected at most algorithm.max_length, {self.max_length}.",
            )
        needs = ["algorithm.overlong_buffer"] if self.overlong_buffer else []
        needs += [f"aggregation {self.aggregation!r} without a horizon"] if has_constant and not self.horizon else []
        if needs and not self.max_length:
            yield Reason(
                key=".max_length",
                text=f"got 0, but {' and '.join(needs)} needs it; set "
                "algorithm.max_length='${sampling.max_new_tokens}'.",
            )


@dataclass
class DrGrpoConfig(GrpoConfig):
    defined_with: ClassVar[Mapping[str, Any]] = {"normalize": False}

    aggregation: str = "seq-mean-token-sum-norm"
    """Token losses are summed and divided by a constant, which removes the length bias."""


@dataclass
class DapoConfig(GrpoConfig):
    clip_range_high: float | None = 0.28
    """Upper clip range, wider than the lower one, so that rare tokens can become likelier (clip-higher)."""
    aggregation: str = "token-mean"
    """Mean over all tokens."""
    drop_zero_advantage: bool = True
    """Zero-variance groups are left out; `data.dynamic_sampling_rounds` replaces them with further prompts."""


@dataclass
class GspoConfig(GrpoConfig):
    ratio: str = "sequence"
    """One ratio per completion."""
    clip_range: float = 3e-4
    """Lower clip range; small, because the ratio is a geometric mean over the tokens of a completion."""
    clip_range_high: float | None = 4e-4
    """Upper clip range."""


@dataclass
class RlooConfig(GrpoConfig):
    defined_with: ClassVar[Mapping[str, Any]] = {"leave_one_out": True, "normalize": False, "center": "group"}

    aggregation: str = "seq-mean-token-sum"
    """Sum over each completion, so that the loss is of the completion's log-prob."""


@dataclass
class ReinforcePpConfig(GrpoConfig):
    defined_with: ClassVar[Mapping[str, Any]] = {"normalize": True, "scope": "global", "center": "global"}

    aggregation: str = "token-mean"
    """Mean over all tokens."""
    kl_estimator: str = "k2"
    """Its gradient is that of the KL."""


@dataclass
class CispoConfig(GrpoConfig):
    loss: str = "cispo"
    """A token's importance weight is clipped; its gradient is kept."""
    clip_range: float = 1.0
    """Lower clip of the weight, at 1 - clip_range; 1 means no lower bound, as in the paper."""
    clip_range_high: float | None = 4.0
    """Upper clip of the weight, at 1 + clip_range_high. The paper tunes it and gives no number; arXiv 2510.13786 found
    that a largest weight of 5 works over a wide range."""
    aggregation: str = "token-mean"
    """Mean over all tokens."""


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
