"""Small algorithms, so that backends can be tried without an algorithm plugin: PPO over SDE steps or tokens, PPO with a
critic or a fake score, and DPO."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm, Metric, Policy
from unirl.core.types.track import Track
from unirl.numerics.train.actions import action_mask, per_action, with_per_action

from .track_numbers import log_probs_of

__all__ = ["CLIP", "DPO", "PPO", "PULL", "Call", "CriticPPO", "FakeScorePPO", "clipped", "squared_distance"]

CLIP = 0.2
"""Clip range of the ratio."""
PULL = 3.0
"""Scale of the pull to another policy."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call that a backend made."""

    phase: Literal["old log-probs", "loss"]
    sample_ids: tuple[str, ...]
    with_grad: bool
    """Whether gradients were recorded."""
    progress: float | None = None
    """The progress that a `loss` was given."""
    deviation: float = 0.0
    """In a `loss`, the largest |ratio - 1| of rows that have a weight."""


class PPO(Algorithm):
    """A `unirl.core.roles.Algorithm`: PPO's clipped loss of every SDE step or token and, with `pull_to`, the squared
    distance of the means to those of another policy. `calls` lists the backend's calls in order.
    """

    def __init__(self, *, pull_to: Policy | None = None) -> None:
        self._pull_to: Policy | None = pull_to
        self.calls: list[Call] = []

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The rewards themselves."""
        return dataclasses.replace(track, advantages=track.rewards), {}

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        self._note("old log-probs", track)
        return with_per_action(track, log_probs=forward(track).log_probs.detach())

    def loss_weights(self, track: Track) -> dict[str, Tensor]:
        weights = track.sample_weights[:, None] * action_mask(track)
        return {"policy": weights} if self._pull_to is None else {"policy": weights, "pull": weights}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        old, weights = log_probs_of(track), self.loss_weights(track)
        assert track.advantages is not None and old is not None
        new: Any = forward(track)
        log_ratio = new.log_probs - old
        terms = [LossTerm(name="policy", values=clipped(log_ratio, track.advantages), weights=weights["policy"])]
        if self._pull_to is not None:
            other: Any = forward(track, policy=self._pull_to)
            pull = squared_distance(new.means, other.means)
            terms.append(LossTerm(name="pull", values=pull, weights=weights["pull"], scale=PULL))
        deviations = (log_ratio.detach().exp() - 1).abs()
        deviation = float(torch.where(weights["policy"] > 0, deviations, 0.0).max())
        self._note("loss", track, progress=progress, deviation=deviation)
        rows = track.sample_weights > 0
        values = torch.where(rows, track.advantages, 0.0)
        metrics = {
            "advantage_mean": _mean(values, track.sample_weights),
            "advantage_max": Metric(total=float(values.max()), reduce="max"),
            "rows": Metric(total=float(rows.sum()), reduce="sum"),
        }
        return Losses(terms=terms, metrics=metrics)

    def _note(self, phase: Literal["old log-probs", "loss"], track: Track, **facts: Any) -> None:
        self.calls.append(Call(phase=phase, sample_ids=track.sample_ids, with_grad=torch.is_grad_enabled(), **facts))


class CriticPPO(PPO):
    """A `unirl.core.roles.Algorithm` over tokens: the policy follows the track's advantages, the critic the
    rewards."""

    trains_critic = True

    def after_anchor(
        self, track: Track, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Track, Mapping[str, Metric]]:
        assert track.rewards is not None and track.text.values is not None, "after_anchor() comes after the values"
        returns = tuple(reward.expand(n).clone() for reward, n in zip(track.rewards, track.text.lengths, strict=True))
        return dataclasses.replace(track, segment=dataclasses.replace(track.text, returns=returns)), {}

    def critic_weights(self, track: Track) -> dict[str, Tensor]:
        return {"value": self.loss_weights(track)["policy"]}

    def critic_loss(self, track: Track, values: Tensor, *, progress: float) -> Losses:
        errors = (values - per_action(track, "returns")).square()
        return Losses(terms=[LossTerm(name="value", values=errors, weights=self.critic_weights(track)["value"])])


class FakeScorePPO(PPO):
    """A `unirl.core.roles.Algorithm` over latents: the policy follows the track's advantages, the velocity of the fake
    score a constant."""

    trains_fake_score = True

    def __init__(self, *, target: float = 1.0) -> None:
        super().__init__()
        self._target = target
        self.seen: list[tuple[Tensor, bool]] = []
        """Velocity of the live policy in each loss of the fake score, and whether it has a gradient."""

    @staticmethod
    def points(track: Track) -> tuple[Tensor, Tensor]:
        """x [n, ...] and sigma [n], where each trajectory starts."""
        segment = track.latent
        return segment.latents[:, 0].float(), segment.sigmas[:1].expand(track.num_rows).to(segment.latents.device)

    @staticmethod
    def errors(velocity: Tensor, target: float) -> Tensor:
        """[n, ...] -> [n]."""
        return (velocity - target).square().flatten(1).mean(dim=1)

    def fake_score_weights(self, track: Track) -> dict[str, Tensor]:
        return {"fake": track.sample_weights}

    def fake_score_loss(self, track: Track, forward: Forward, *, progress: float, repeat: int) -> Losses:
        x, sigma = self.points(track)
        live = forward.velocity(track, x, sigma)
        self.seen.append((live.detach(), live.requires_grad))
        errors = self.errors(forward.velocity(track, x, sigma, policy="fake"), self._target)
        return Losses(terms=[LossTerm(name="fake", values=errors, weights=track.sample_weights)])


class DPO(PPO):
    """DPO's loss (arXiv 2305.18290, equation 7) over SDE steps: every unit has two rows, and needs both."""

    def loss_weights(self, track: Track) -> dict[str, Tensor]:
        return {"pairs": torch.stack([track.sample_weights[rows].mean() for rows in _pairs(track)])}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        assert track.advantages is not None
        new: Any = forward(track)
        log_ratio = (new.log_probs - track.latent.log_probs).sum(dim=1)
        advantages = [float(advantage) for advantage in track.advantages]
        worse, better = torch.tensor([sorted(rows, key=advantages.__getitem__) for rows in _pairs(track)]).unbind(dim=1)
        values = -torch.nn.functional.logsigmoid(log_ratio[better] - log_ratio[worse])
        term = LossTerm(name="pairs", values=values, weights=self.loss_weights(track)["pairs"])
        return Losses(terms=[term], metrics={"advantage_mean": _mean(track.advantages, track.sample_weights)})


def _pairs(track: Track) -> list[list[int]]:
    units = track.units()
    for rows in units:
        ids = [track.sample_ids[row] for row in rows]
        assert len(rows) == 2, f"a micro-batch has {ids} of a unit of 2 rows; rows of a unit stay in one micro-batch"
    return units


def _mean(values: Tensor, weights: Tensor) -> Metric:
    return Metric(total=float((values * weights).sum()), weight=float(weights.sum()))


def clipped(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """max(-A r, -A clip(r, 1 - c, 1 + c)).  log_ratio: [n, S].  advantages: [n]."""
    ratio, weight = log_ratio.exp(), -advantages[:, None]
    return torch.maximum(weight * ratio, weight * ratio.clamp(1 - CLIP, 1 + CLIP))


def squared_distance(means: Tensor, others: Tensor) -> Tensor:
    """[n, S, ...] -> [n, S], averaged over the elements."""
    return (means - others).square().flatten(2).mean(dim=2)
