"""References of parts: the original pipeline of a model, the formula of an algorithm.

Conformance runs both sides and compares them. The reference side shares no code with the part's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from unirl.core.types.array import Array

if TYPE_CHECKING:
    from unirl.core.specs.part_config import PartConfig
    from unirl.core.types.inputs import Inputs
    from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
    from unirl.core.types.track import Sampler
    from unirl.numerics.loss.kl_config import TokenKlConfig
    from unirl.numerics.loss.reward_loss_config import RewardLossConfig
    from unirl.numerics.tokens.policy_config import TokenPolicyConfig

__all__ = [
    "FurtherPoints",
    "LossInNumpy",
    "LossInputs",
    "PointLossInputs",
    "ReferenceRun",
    "RewardLossInputs",
    "RunMediaReference",
    "RunReference",
    "RunTextReference",
    "TextReferenceRun",
    "TokenLossInputs",
    "TokenMean",
    "clipped_token",
    "reward_loss",
    "token_divergence",
    "token_importance",
]


@dataclass(frozen=True, kw_only=True)
class ReferenceRun:
    """Results of the reference pipeline for some prompts, deterministic (Euler, no step noise)."""

    sigmas: Array
    """[T+1] of its scheduler, ending in 0."""
    final: Array
    """[N, ...] its final latents, in the layout of the model's `latent_shape`."""
    media: Array
    """[N, 3, H, W], or [N, F, 3, H, W] for videos, in [0, 1]: its decoded media. Not constant, since constant media say
    nothing about decoding."""


class RunReference(Protocol):
    """Runs the pipeline named by a model's `reference` from a checkpoint folder, without any code of the model."""

    def __call__(
        self, folder: Path, *, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Array
    ) -> ReferenceRun:
        """initial: [N, ...] latents to start from.  sampling: steps, size and guidance are honoured."""
        ...


class RunMediaReference(Protocol):
    """The same for a model that needs media besides the text."""

    def __call__(self, folder: Path, *, inputs: Inputs, sampling: LatentSamplingConfig, initial: Array) -> ReferenceRun:
        """inputs: texts with their media.  The model under test has the settings of its spec's `trial`."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextReferenceRun:
    """Greedy completions of the reference implementation for some prompts."""

    prompt_tokens: Sequence[Array]
    """[P] int64 per prompt, including its chat template."""
    tokens: Sequence[Array]
    """[L] int64 per completion: the most likely tokens, up to and including the first stop token, or
    `max_new_tokens`."""
    log_probs: Sequence[Array]
    """[L] log-probs of these tokens at temperature 1, from forwards over the whole sequence, without a cache."""


class RunTextReference(Protocol):
    """Runs the implementation named by a model's `reference` from a checkpoint folder, in fp32 and without any code of
    the model."""

    def __call__(self, folder: Path, *, inputs: Inputs, sampling: TextSamplingConfig) -> TextReferenceRun:
        """inputs: texts, with their media where the model reads them.
        sampling: the chat settings, `max_new_tokens` and `stop_token_ids` are honoured."""
        ...


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Inputs of a loss over SDE steps: fp64 NumPy arrays of n samples with S steps each."""

    log_probs: Any
    """[n, S] under the trained weights."""
    old_log_probs: Any
    """[n, S] in the denominator of the ratio."""
    means: Any
    """[n, S, ...] of the transitions under the trained weights."""
    old_means: Any
    """[n, S, ...] of the transitions under the old policy."""
    reference_means: Any
    """[n, S, ...] of the transitions under the reference policy."""
    std: Any
    """[n, S] standard deviations of the transitions."""
    g: Any
    """[n, S] diffusion coefficients."""
    sigmas: Any
    """[T+1] noise levels."""
    sde_steps: Any
    """[n, S] int64 index of each step into `sigmas`; -1 is none."""
    sampler: Sampler | None = None
    """Kernel of the transitions, for losses that read more of the schedule than the stored steps. Trials have
    `flow-sde`."""
    advantages: Any = None
    """[n]; or [n, S] if they differ by step. None with a critic: the reference computes advantages and returns
    itself."""
    rewards: Any = None
    """[n]; set with a critic, like the next two."""
    values: Any = None
    """[n, S] current values of the critic, before each step."""
    old_values: Any = None
    """[n, S] its values when the advantages were computed."""
    kl_weights: Any = None
    """[n] factor of each sample's KL penalty; None is 1."""
    weights: Any
    """[n] weights of the samples; 0 excludes one."""
    progress: float
    """0 to 1 over the run."""
    fixed: Self | None = None
    """Inputs at the point where the gradient is taken, while these are moved; None where only the value is needed."""

    @property
    def detached(self) -> Self:
        """Inputs that stay fixed under differentiation: read these inside a stop-gradient of the formula."""
        return self.fixed or self

    def kl_weight(self, row: int) -> float:
        """Factor of the KL penalty of one sample."""
        return 1.0 if self.kl_weights is None else float(self.kl_weights[row])


@dataclass(frozen=True, kw_only=True)
class FurtherPoints:
    """Points that a loss asks for besides its first ones."""

    x: Any
    """[n, k, ...]."""
    sigma: Any
    """[n, k] their noise levels."""
    velocities: Mapping[str, Any]
    """Policy -> [n, k, ...], for each policy that the loss asked for there."""


@dataclass(frozen=True, kw_only=True)
class PointLossInputs:
    """Inputs of a loss over velocities at points that it chooses: fp64 NumPy arrays of n samples with k points each.

    For algorithms that need no trajectory.
    """

    clean: Any
    """[n, ...] latents that generation ended with."""
    x: Any
    """[n, k, ...] points that the loss asked for."""
    sigma: Any
    """[n, k] their noise levels."""
    velocities: Mapping[str, Any]
    """Policy -> [n, k, ...], for each policy that the loss asked for there."""
    further: Sequence[FurtherPoints] = ()
    """Only with a fake score: the other points of `loss`, then those of `fake_score_loss`."""
    old_log_probs: Any = None
    """[n, k] that the algorithm froze before the first update, of losses with a ratio."""
    units: Sequence[Sequence[int]] = ()
    """Rows of each unit; single rows where the algorithm sets none."""
    advantages: Any
    """[n]."""
    weights: Any
    """[n] weights of the samples; 0 excludes one."""
    progress: float
    """0 to 1 over the run."""
    fixed: Self | None = None
    """Inputs at the point where the gradient is taken, while these are moved; None where only the value is needed."""

    @property
    def detached(self) -> Self:
        """Inputs that stay fixed under differentiation: read these inside a stop-gradient of the formula."""
        return self.fixed or self


@dataclass(frozen=True, kw_only=True)
class RewardLossInputs:
    """Inputs of a loss over the rewards of media that it decodes: fp64 NumPy arrays of n samples with k media each.

    For algorithms that need differentiable rewards.
    """

    rewards: Any
    """[n, k] weighted sum of the rewards, of the media in the order of decoding."""
    weights: Any
    """[n] weights of the samples; 0 excludes one."""
    progress: float
    """0 to 1 over the run."""
    fixed: Self | None = None
    """Inputs at the point where the gradient is taken, while these are moved; None where only the value is needed."""

    @property
    def detached(self) -> Self:
        """Inputs that stay fixed under differentiation: read these inside a stop-gradient of the formula."""
        return self.fixed or self


@dataclass(frozen=True, kw_only=True)
class TokenLossInputs:
    """Inputs of a loss over tokens: fp64 NumPy arrays of n completions with up to S tokens each.

    Conformance gives all of them. None is for tests of losses that do not read a field.
    """

    log_probs: Any
    """[n, S] under the trained weights."""
    old_log_probs: Any
    """[n, S] in the denominator of the ratio."""
    engine_log_probs: Any = None
    """[n, S] from the engine."""
    reference_log_probs: Any = None
    """[n, S] under the reference policy."""
    distributions: Any = None
    """Policy -> [n, S, V] log-probs of every token of the vocabulary: `live` for the trained weights, and `reference`,
    of algorithms without log-probs that need this one."""
    entropy: Any = None
    """[n, S] in nats, entropy of each token's distribution under the trained weights."""
    valid: Any
    """[n, S] bool: trained tokens."""
    advantages: Any = None
    """[n]; or [n, S] if they differ by token. None with a critic: the reference computes advantages and returns
    itself."""
    rewards: Any = None
    """[n]; set with a critic, like the next two."""
    values: Any = None
    """[n, S] current values of the critic, before each token."""
    old_values: Any = None
    """[n, S] its values when the advantages were computed."""
    returns: Any = None
    """[n, S] its value targets."""
    kl_weights: Any = None
    """[n] factor of each sample's KL penalty; None is 1."""
    weights: Any
    """[n] weights of the completions; 0 excludes one."""
    is_truncated: Any
    """[n] bool: truncated by the length limit."""
    units: Sequence[Sequence[int]] = ()
    """Rows of each unit; single rows where the algorithm sets none."""
    progress: float = 0.0
    """0 to 1 over the run."""
    fixed: Self | None = None
    """Inputs at the point where the gradient is taken, while these are moved; None where only the value is needed."""

    @property
    def detached(self) -> Self:
        """Inputs that stay fixed under differentiation: read these inside a stop-gradient of the formula."""
        return self.fixed or self

    def kl_weight(self, row: int) -> float:
        """Factor of the KL penalty of one sample."""
        return 1.0 if self.kl_weights is None else float(self.kl_weights[row])


class LossInNumpy(Protocol):
    """An algorithm's loss over one update, every term with its scale, written from the paper's formula in NumPy.

    Where the formula has a stop-gradient, it reads `inputs.detached`: the gradient is that of its differences.

    inputs: those of its track kind; `RewardLossInputs` where it needs differentiable rewards, `PointLossInputs` where
        it needs no trajectory.
    """

    def __call__(self, config: PartConfig, inputs: Any) -> float: ...


def reward_loss(
    config: RewardLossConfig, inputs: RewardLossInputs, *, draw_weights: Sequence[float] | None = None
) -> float:
    """The mean loss over all draws of all samples, for algorithms that backpropagate rewards. draw_weights: [k] of a
    sample's draws; None is 1 for each.

    -R: DRaFT, arXiv 2309.17400, equation 1.  max(target - R, 0): ReFL, arXiv 2304.05977.  |target - R|: AlignProp's
    code.
    """
    total, weights = 0.0, 0.0
    for rewards, weight in zip(inputs.rewards, inputs.weights, strict=True):
        for number, reward in enumerate(rewards if weight else ()):
            lacking = -float(reward) if config.reward_target is None else config.reward_target - float(reward)
            value = {"linear": lacking, "hinge": max(lacking, 0.0), "target": abs(lacking)}[config.reward_loss]
            factor = float(weight) * (1.0 if draw_weights is None else draw_weights[number])
            total, weights = total + factor * value, weights + factor
    return config.loss_scale * total / weights if weights else 0.0


def token_divergence(config: TokenKlConfig, inputs: TokenLossInputs, row: int, token: int) -> float:
    """Schulman's estimators (2020) of the KL to the reference, for one token, times the factor of its sample."""
    difference = float(inputs.log_probs[row, token] - inputs.reference_log_probs[row, token])
    estimate = {"k1": difference, "k2": difference**2 / 2, "k3": math.exp(-difference) - 1 + difference}
    value = inputs.kl_weight(row) * estimate[config.kl_estimator]
    if not config.kl_weighs_by_ratio:
        return value
    # DeepSeek-V3.2, arXiv 2512.02556: the expectation is over samples of the old policy.
    ratio = math.exp(float(inputs.log_probs[row, token] - inputs.old_log_probs[row, token]))
    return ratio * value


def clipped_token(config: TokenPolicyConfig, ratio: float, advantage: float) -> float:
    """PPO, arXiv 1707.06347, equation 7: the pessimistic bound of the clipped ratio, to be minimised."""
    low, high = config.clip_bounds
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    factor = max(ratio, 1 - low)
    # Dual clip, arXiv 1912.09729.
    return -advantage * (factor if config.dual_clip is None else min(factor, config.dual_clip))


def token_importance(
    config: TokenPolicyConfig, inputs: TokenLossInputs, row: int, token: int, tokens: Sequence[int]
) -> float:
    """The bounded importance weight old policy / engine of a token or completion. tokens: its tokens."""
    if config.tis == "none":
        return 1.0
    chosen = [token] if config.tis == "token" else tokens
    gap = sum(float(inputs.old_log_probs[row, t] - inputs.engine_log_probs[row, t]) for t in chosen)
    return min(math.exp(gap), config.tis_cap)


class TokenMean:
    """A mean over tokens and completions, by an algorithm's `aggregation`."""

    def __init__(self, mode: str, *, horizon: float) -> None:
        """horizon: the constant of `seq-mean-token-sum-norm`."""
        self._mode, self._horizon = mode, horizon
        self._sum = self._count = 0.0

    def add(self, tokens: Sequence[float], weight: float) -> None:
        """The tokens of one completion."""
        if self._mode == "token-mean":
            self._sum += weight * sum(tokens)
            self._count += weight * len(tokens)
            return
        divisor = {
            "seq-mean-token-mean": len(tokens),
            "seq-mean-token-sum": 1,
            "seq-mean-token-sum-norm": self._horizon,
        }[self._mode]
        self._sum += weight * sum(tokens) / divisor
        self._count += weight

    @property
    def value(self) -> float:
        return self._sum / self._count if self._count else 0.0
