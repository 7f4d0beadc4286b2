"""Base of algorithms that backpropagate rewards into the sampler; a subclass decides which latents get a gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from unirl.core.roles import Algorithm, Losses, LossTerm, Metric
from unirl.core.specs.check import check_config

from ..forward_process import FORWARD
from ..loss.policy_metrics import mean_over
from ..loss.reward_loss import backpropagated, reward_loss
from ..noise import stream

if TYPE_CHECKING:
    from unirl.core.roles import Forward, GradientScore
    from unirl.core.specs.config import AdvantageConfig, TrainConfig
    from unirl.core.types.track import Track

    from ..loss.reward_loss_config import RewardLossConfig

__all__ = ["Estimates", "RewardGradient"]


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Clean latents that a loss decodes and scores."""

    latents: Sequence[Tensor]
    """[n, ...] fp32 of each draw, with gradient."""
    end_stored: bool = False
    """They recompute the stored clean latents, so their distance is worth a metric."""


class RewardGradient(Algorithm):
    """Loss terms of rewards with gradient. There are no advantages: each sample follows the slope of its own reward.

    A subclass says which latents are decoded, and which of them the gradient goes through.
    """

    def __init__(
        self,
        config: Any,
        *,
        score: GradientScore | None,
        seed: int,
        rewards: Sequence[str] = (),
        stacked: bool = True,
    ) -> None:
        """config: a `RewardLossConfig`.  rewards: names of those that count.  stacked: points in one forward."""
        self._settings: RewardLossConfig = config
        self._score, self._rewards = score, rewards
        self.seed, self.stacked = seed, stacked

    @classmethod
    def build(
        cls,
        config: RewardLossConfig,
        *,
        advantage: AdvantageConfig,
        reward_weights: Mapping[str, float],
        train: TrainConfig,
        seed: int,
        score: GradientScore | None,
    ) -> Self:
        """See `unirl.core.roles.Algorithm`."""
        check_config(config, key="algorithm")
        counted = [name for name, weight in reward_weights.items() if weight]
        return cls(config, score=score, seed=seed, rewards=counted, stacked=train.replay != "serial")

    @abstractmethod
    def estimates(self, track: Track, forward: Forward) -> Estimates:
        """The clean latents to score, `len(draw_weights)` of them for each row."""

    @property
    def draw_weights(self) -> Sequence[float]:
        """Relative weight of each of a sample's draws."""
        return (1.0,)

    @property
    def rewarded_draws(self) -> Sequence[bool]:
        """Which of a sample's draws have the reward itself, and no other score, for the metrics."""
        return (True,) * len(self.draw_weights)

    def score_of(self, draw: int) -> GradientScore:
        """The score of each of a sample's draws."""
        return self.score

    def score(self, track: Track, media: Tensor) -> Tensor:
        """[n], with gradient."""
        assert self._score is not None, "built without rewards, which are where training runs"
        return self._score(track, media)

    def draw(self, count: int, track: Track, *, number: int) -> int:
        """One of 0 to count - 1, evenly: the same for all samples of a rollout, on all ranks and after a resume.

        number: of the draw, so that several of a rollout are independent.
        """
        # All rows have one version, since staleness is refused; `progress` would differ after a resume with more steps.
        label = f"version {max(track.policy_version)}"
        bits = stream(seed=self.seed, rollout=FORWARD, label=label, step=-2 - number)
        return int(bits.random_raw() % count)

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The track as it is: the loss has none."""
        return track, {}

    def loss_weights(self, track: Track) -> Mapping[str, Tensor]:
        draws = torch.tensor(self.draw_weights, device=track.sample_weights.device)
        return {"reward": track.sample_weights[:, None] * draws}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        weights = self.loss_weights(track)["reward"]
        result = self.estimates(track, forward)
        rewards = torch.stack([self._reward(x, track, forward, draw) for draw, x in enumerate(result.latents)], dim=1)
        shown = weights * torch.tensor(self.rewarded_draws, device=weights.device)
        config, metrics = self._settings, {"reward_recomputed": mean_over(rewards, shown)}
        if config.reward_loss == "hinge":
            assert config.reward_target is not None
            metrics["reward_at_target"] = mean_over((rewards >= config.reward_target).float(), shown)
        if result.end_stored:
            # Rows of weight 0 repeat a sample, or are padding.
            gap = (result.latents[0].detach() - track.latent.final).abs().flatten(1).amax(dim=1)
            largest = torch.where(weights[:, 0] > 0, gap, 0.0).max()
            metrics["latent_mismatch_max"] = Metric(total=largest, reduce="max")
        values = reward_loss(rewards, kind=config.reward_loss, target=config.reward_target)
        term = LossTerm(name="reward", values=values, weights=weights, scale=config.loss_scale)
        return Losses(terms=[term], metrics=metrics)

    def _reward(self, latents: Tensor, track: Track, forward: Forward, draw: int) -> Tensor:
        return backpropagated(
            latents,
            track=track,
            decode=lambda x: forward.decode(track, x),
            score=self.score_of(draw),
            rewards=self._rewards,
        )
