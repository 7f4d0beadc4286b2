"""Flow-GRPO: policy gradients over the SDE steps of a flow model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from unirl.algorithms.flow_grpo.config import FlowGrpoConfig
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm, Replayed
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.diffusion.sampler import schedule_coefficients
from unirl.numerics.loss.adaptive_kl import AdaptiveKl
from unirl.numerics.loss.losses import (
    ClipSchedule,
    Surrogate,
    cispo_loss,
    clip_schedule,
    clipped_surrogate,
    divergence_surrogate,
    expand_leading,
    flow_grpo_kl,
    gaussian_kl,
    mean_shift_squared,
    ratio_norm,
    sequence_log_ratio,
    velocity_kl,
)
from unirl.numerics.loss.policy_metrics import mean_over, ratio_metrics
from unirl.numerics.train.steps import StepLosses, old_log_prob_steps, step_counts
from unirl.numerics.train.track_advantages import (
    advantages_of,
    chosen_and_clipped,
    step_advantages,
    track_advantages,
    whole_groups,
)

__all__ = ["FlowGrpo", "build"]


def build(
    config: FlowGrpoConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> FlowGrpo:
    check_config(config, key="algorithm")
    return FlowGrpo(config, advantage=advantage, reward_weights=reward_weights, train=train)


class FlowGrpo(StepLosses, AdaptiveKl, Algorithm):
    """Flow-GRPO, arXiv 2505.05470, equation 6, with the variants that differ from it by a setting.

    DanceGRPO (2505.07818) is the kernel `dance-sde`, with noise at all steps but the last and a random share of them
    trained on; Flow-GRPO-Fast and MixGRPO (2507.21802) are windows of SDE steps;
    GRPO-Guard (2510.22319) is `ratio_norm` with `step_weight: inverse-dt`; TempFlow-GRPO (2508.04324) is one SDE step
    in each trajectory with `step_weight: noise`; E-GRPO (2601.00423) is one with `sampling.sde.min_noise_std`;
    Flow-DPPO (2606.11025) is `loss: divergence`; DenseGRPO (2601.20218), without its noise levels by step, is
    `step_rewards`.
    """

    def __init__(
        self,
        config: FlowGrpoConfig,
        *,
        advantage: AdvantageConfig,
        reward_weights: Mapping[str, float],
        train: TrainConfig,
    ) -> None:
        super().__init__(config)
        self._config = config
        self._advantage = advantage
        self._reward_weights = reward_weights
        # The ratio of a sequence is a mean over its steps.
        self.separates_steps = config.ratio == "step"
        self._keeps_means = config.ratio_norm or config.loss == "divergence"
        self._replays = train.old_log_probs != "engine"

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        track = self.with_kl_weights(track, reward_weights=self._reward_weights)
        if not self._config.step_rewards:
            return track_advantages(track, self._advantage, reward_weights=self._reward_weights)
        every, weights = whole_groups(self._advantage), self._reward_weights
        # Of the samples: to choose some of them by.
        track, numbers = track_advantages(track, every, reward_weights=weights)
        by_step = step_advantages(track, every, reward_weights=weights)
        segment = dataclasses.replace(track.latent, advantages=by_step, step_rewards={})
        track, chosen = chosen_and_clipped(dataclasses.replace(track, segment=segment), self._advantage)
        return track, numbers | chosen

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """Store the old log-probs, recomputed as in the update or the engine's, and the means that a loss needs."""
        if not self._keeps_means:
            return old_log_prob_steps(track, forward, replays=self._replays)
        with torch.no_grad():
            old = forward(track)
            assert isinstance(old, Replayed)
        segment = dataclasses.replace(track.latent, log_probs=old.log_probs.detach(), means=old.means)
        return dataclasses.replace(track, segment=segment)

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        counted = step_counts(track)
        policy = counted
        if self._config.drop_zero_advantage:
            policy = counted * (expand_leading(advantages_of(track), counted) != 0)
        return {"policy": policy, "kl": counted} if self._config.kl_coef else {"policy": policy}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        config, weights = self._config, self.loss_weights(track)
        new = forward(track)
        assert isinstance(new, Replayed)
        surrogate, log_ratio = self._surrogate(track, new, progress)
        values = surrogate.loss * _step_weights(config.step_weight, track)
        terms = [LossTerm(name="policy", values=values, weights=weights["policy"])]
        metrics = ratio_metrics(surrogate.ratio, surrogate.clipped, log_ratio, weights["policy"])
        if config.loss == "divergence":
            metrics["divergence"] = mean_over(_divergence(track, new), weights["policy"])
            metrics["dropped_fraction"] = mean_over(surrogate.binding.float(), weights["policy"])
        if config.kl_coef:
            with torch.no_grad():
                reference = forward(track, policy="reference")
                assert isinstance(reference, Replayed)
            kl = _kl(config.kl_form, track, new, reference)
            values = self.gated(kl * _step_weights(config.kl_step_weight, track), track)
            terms.append(LossTerm(name="kl", values=values, weights=weights["kl"], scale=self.kl_coef))
            metrics["kl"] = mean_over(kl, weights["kl"])
        return Losses(terms=terms, metrics=metrics)

    def _surrogate(self, track: Track, new: Replayed, progress: float) -> tuple[Surrogate, Tensor]:
        """The policy loss of each step, and the detached log-ratio that it bounds."""
        config, advantages = self._config, advantages_of(track)
        old = _of(track.latent.log_probs)
        schedule = cast(ClipSchedule, config.clip_schedule)
        low = clip_schedule(schedule, config.clip_range, progress)
        high = low if config.clip_range_high is None else clip_schedule(schedule, config.clip_range_high, progress)
        log_ratio = new.log_probs - old
        if config.ratio_norm:
            shift = mean_shift_squared(new.means, _of(track.latent.means))
            log_ratio = ratio_norm(log_ratio, mean_shift_sq=shift, std=new.std)
        if config.ratio == "sequence":
            log_ratio = sequence_log_ratio(log_ratio, new.valid)
        if config.loss == "cispo":
            result = cispo_loss(new.log_probs, old, advantages, clip_low=low, clip_high=high)
        elif config.loss == "divergence":
            assert config.threshold is not None
            divergence = _divergence(track, new)
            result = divergence_surrogate(log_ratio, advantages, divergence=divergence, threshold=config.threshold)
        else:
            dual = config.dual_clip
            result = clipped_surrogate(log_ratio, advantages, clip_low=low, clip_high=high, dual_clip=dual)
        return result, log_ratio.detach()


def _divergence(track: Track, new: Replayed) -> Tensor:
    """[n, S] KL per element of the new from the old policy, detached."""
    return gaussian_kl(new.means.detach(), _of(track.latent.means), new.std)


def _kl(form: str, track: Track, new: Replayed, reference: Replayed) -> Tensor:
    """[n, S] KL to the reference policy, with gradient."""
    if form == "gaussian":
        return gaussian_kl(new.means, reference.means, new.std)
    if form == "flow-grpo-code":
        return flow_grpo_kl(new.means, reference.means, new.g)
    segment = track.latent
    on_velocity = schedule_coefficients(segment.sampler, segment.sigmas).on_velocity
    return velocity_kl(new.means, reference.means, on_velocity[segment.scored_steps.clamp(min=0)])


def _step_weights(kind: str, track: Track) -> Tensor | float:
    """[n, S] factor of each step's loss, of the schedule alone: what other rows do must not matter, nor the split."""
    if kind == "uniform":
        return 1.0
    segment = track.latent
    sigmas, steps = segment.sigmas, segment.scored_steps.clamp(min=0)
    if kind == "noise":
        # Equation 8 of TempFlow-GRPO, arXiv 2508.04324: Norm(sigma_t sqrt(dt)), of mean 1 over the steps.
        std = schedule_coefficients(segment.sampler, sigmas).std
        return (std / std[std > 0].mean())[steps]
    return 1.0 / (sigmas[steps] - sigmas[steps + 1])


def _of(value: Tensor | None) -> Tensor:
    """A field that earlier phases have filled."""
    assert value is not None
    return value
