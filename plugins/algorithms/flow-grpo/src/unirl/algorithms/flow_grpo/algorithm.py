"""Flow-GRPO: the clipped surrogate over the SDE steps of a flow model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from unirl.algorithms.flow_grpo.config import FlowGrpoConfig
from unirl.core.roles import Forward, Losses, LossTerm, Replayed
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.adaptive_kl import AdaptiveKl
from unirl.numerics.loss.losses import (
    ClipSchedule,
    clip_schedule,
    clipped_surrogate,
    expand_leading,
    flow_grpo_kl,
    gaussian_kl,
    mean_shift_squared,
    ratio_norm,
)
from unirl.numerics.loss.policy_metrics import mean_over, ratio_metrics
from unirl.numerics.train.track_advantages import advantages_of, track_advantages

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


class FlowGrpo(AdaptiveKl):
    """Flow-GRPO, arXiv 2505.05470, equation 6, with the variants that differ from it by a setting.

    DanceGRPO (2505.07818) is the kernel `dance-sde`, with noise at all steps but the last and a random share of them
    trained on; Flow-GRPO-Fast and MixGRPO (2507.21802) are windows of SDE steps;
    GRPO-Guard (2510.22319) is `ratio_norm` with `step_weight: inverse-dt`.
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
        self._replays_anchor = train.old_log_probs == "replay" or config.ratio_norm

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        return track_advantages(track, self._advantage, reward_weights=self._reward_weights)

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        """Replace the engine's log-probs with recomputed ones, computed exactly as in the update."""
        if not self._replays_anchor:
            return track
        with torch.no_grad():
            old = forward(track)
            assert isinstance(old, Replayed)
        means = old.means if self._config.ratio_norm else None
        segment = dataclasses.replace(track.latent, log_probs=old.log_probs.detach(), means=means)
        return dataclasses.replace(track, segment=segment)

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        counted = track.sample_weights[:, None] * (track.latent.scored_steps >= 0)
        policy = counted
        if self._config.drop_zero_advantage:
            policy = counted * (expand_leading(advantages_of(track), counted) != 0)
        return {"policy": policy, "kl": counted} if self._config.kl_coef else {"policy": policy}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        config, segment = self._config, track.latent
        new = forward(track)
        assert isinstance(new, Replayed)
        weights = self.loss_weights(track)
        log_ratio = new.log_probs - _of(segment.log_probs)
        if config.ratio_norm:
            shift = mean_shift_squared(new.means, _of(segment.means))
            log_ratio = ratio_norm(log_ratio, mean_shift_sq=shift, std=new.std)
        schedule = cast(ClipSchedule, config.clip_schedule)
        low = clip_schedule(schedule, config.clip_range, progress)
        high = low if config.clip_range_high is None else clip_schedule(schedule, config.clip_range_high, progress)
        surrogate = clipped_surrogate(
            log_ratio, advantages_of(track), clip_low=low, clip_high=high, dual_clip=config.dual_clip
        )
        values = surrogate.loss * _step_weights(config.step_weight, track, new)
        terms = [LossTerm(name="policy", values=values, weights=weights["policy"])]
        metrics = ratio_metrics(surrogate.ratio, surrogate.clipped, log_ratio.detach(), weights["policy"])
        if config.kl_coef:
            with torch.no_grad():
                reference = forward(track, policy="reference")
                assert isinstance(reference, Replayed)
            if config.kl_form == "gaussian":
                kl = gaussian_kl(new.means, reference.means, new.std)
            else:
                kl = flow_grpo_kl(new.means, reference.means, new.g)
            terms.append(LossTerm(name="kl", values=kl, weights=weights["kl"], scale=self.kl_coef))
            metrics["kl"] = mean_over(kl, weights["kl"])
        return Losses(terms=terms, metrics=metrics)


def _step_weights(kind: str, track: Track, replayed: Replayed) -> Tensor | float:
    """[n, S] factor of each step's loss."""
    if kind == "uniform":
        return 1.0
    if kind == "noise":
        # The mean is over a row's own steps: a mean over the micro-batch would make the loss depend on the split.
        std = replayed.std.reshape(replayed.log_probs.shape)
        counted = replayed.valid.to(std.dtype)
        return std / ((std * counted).sum(dim=1, keepdim=True) / counted.sum(dim=1, keepdim=True).clamp(min=1))
    sigmas, steps = track.latent.sigmas, track.latent.scored_steps.clamp(min=0)
    return 1.0 / (sigmas[steps] - sigmas[steps + 1])


def _of(value: Tensor | None) -> Tensor:
    """A field that earlier phases have filled."""
    assert value is not None
    return value
