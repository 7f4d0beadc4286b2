"""A small algorithm of the kit, so that a backend can be tried without any algorithm plugin."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm, Metric, Policy
from unirl.core.types.track import Track

__all__ = ["CLIP", "PULL", "Call", "Pairs", "Surrogate", "clipped", "squared_distance"]

CLIP = 0.2
"""Clip range of the ratio."""
PULL = 3.0
"""Scale of the pull to another policy."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call that a backend made."""

    phase: Literal["anchor", "loss"]
    sample_ids: tuple[str, ...]
    with_grad: bool
    """Whether gradients were recorded."""
    progress: float | None = None
    """Of a `loss`."""
    deviation: float = 0.0
    """Of a `loss`: the largest |ratio - 1| of rows that weigh something."""


class Surrogate(Algorithm):
    """A `unirl.core.roles.Algorithm`: PPO's clipped loss of every SDE step, and, where asked, the squared distance of
    the means to those of another policy. `calls` is what the backend did with it, in order.
    """

    def __init__(self, *, pull_to: Policy | None = None) -> None:
        self._pull_to: Policy | None = pull_to
        self.calls: list[Call] = []

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The rewards themselves."""
        return dataclasses.replace(track, advantages=track.rewards), {}

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        self._note("anchor", track)
        return dataclasses.replace(
            track, segment=dataclasses.replace(track.latent, log_probs=forward(track).log_probs.detach())
        )

    def loss_weights(self, track: Track) -> dict[str, Tensor]:
        steps = track.sample_weights[:, None] * (track.latent.sde_steps >= 0)
        return {"policy": steps} if self._pull_to is None else {"policy": steps, "pull": steps}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        assert track.advantages is not None
        new: Any = forward(track)
        weights = self.loss_weights(track)
        log_ratio = new.log_probs - track.latent.log_probs
        terms = [LossTerm(name="policy", values=clipped(log_ratio, track.advantages), weights=weights["policy"])]
        if self._pull_to is not None:
            other: Any = forward(track, policy=self._pull_to)
            pull = squared_distance(new.means, other.means)
            terms.append(LossTerm(name="pull", values=pull, weights=weights["pull"], scale=PULL))
        ratio = log_ratio.detach().exp()
        is_counted = weights["policy"] > 0
        deviation = float(torch.where(is_counted, (ratio - 1).abs(), 0.0).max())
        self._note("loss", track, progress=progress, deviation=deviation)
        rows = track.sample_weights > 0
        values = torch.where(rows, track.advantages, 0.0)
        return Losses(
            terms=terms,
            metrics={
                "advantage_mean": Metric(
                    total=float((values * track.sample_weights).sum()), weight=float(track.sample_weights.sum())
                ),
                "advantage_max": Metric(total=float(values.max()), reduce="max"),
                "rows": Metric(total=float(rows.sum()), reduce="sum"),
            },
        )

    def _note(self, phase: Literal["anchor", "loss"], track: Track, **facts: Any) -> None:
        self.calls.append(Call(phase=phase, sample_ids=track.sample_ids, with_grad=torch.is_grad_enabled(), **facts))


class Pairs(Surrogate):
    """The same with DPO's loss of pairs (arXiv 2305.18290, equation 7): every unit has two rows, and needs both."""

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
        weights = track.sample_weights
        mean = Metric(total=float((track.advantages * weights).sum()), weight=float(weights.sum()))
        return Losses(terms=[term], metrics={"advantage_mean": mean})


def _pairs(track: Track) -> list[list[int]]:
    units = track.units()
    for rows in units:
        ids = [track.sample_ids[row] for row in rows]
        assert len(rows) == 2, f"a micro-batch has {ids} of a unit of 2 rows; rows of a unit stay in one micro-batch"
    return units


def clipped(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """max(-A r, -A clip(r, 1 - c, 1 + c)).  log_ratio: [n, S].  advantages: [n]."""
    ratio, weight = log_ratio.exp(), -advantages[:, None]
    return torch.maximum(weight * ratio, weight * ratio.clamp(1 - CLIP, 1 + CLIP))


def squared_distance(means: Tensor, others: Tensor) -> Tensor:
    """[n, S, ...] -> [n, S], averaged over the elements."""
    return (means - others).square().flatten(2).mean(dim=2)
