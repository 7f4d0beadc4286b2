"""Old log-probs, token weights and rollout metrics, shared by the token policy losses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.roles import Forward, LossTerm
from unirl.core.types.track import Status, Track

from ..loss.aggregation import Aggregation, AggregationMode, aggregation_weights
from .replay import per_sample, token_mask

__all__ = ["TokenWeights", "old_log_prob_tokens", "text_numbers", "token_weights"]


@dataclass(frozen=True, kw_only=True)
class TokenWeights:
    """Weights of the tokens of n completions, S the length of the longest."""

    counted: Tensor
    """[n, S]: the sample's weight where a token is trained on, else 0; metrics are means weighted by it."""
    aggregation: Aggregation

    @property
    def announced(self) -> Tensor:
        """[n], the term's entry in `Algorithm.loss_weights`."""
        return self.aggregation.normalizer

    def term(self, name: str, values: Tensor, *, scale: float = 1.0) -> LossTerm:
        """values: [n, S], arbitrary at weight 0."""
        return LossTerm(
            name=name,
            values=values,
            weights=self.aggregation.weights,
            normalizer=self.aggregation.normalizer,
            scale=scale,
        )


def token_weights(
    track: Track,
    mode: AggregationMode,
    *,
    horizon: float | None = None,
    truncated: Literal["keep", "mask"] = "keep",
    drop_zero_advantage: bool = False,
) -> TokenWeights:
    """Weights of the tokens of a text track; needs no forward.

    mode, horizon: see `aggregation_weights`.
    truncated: `mask` leaves out completions cut off by the length limit; ABORTED ones are always left out.
    drop_zero_advantage: leave out samples with zero advantage.
    Excluded samples do not count in the denominators either.
    """
    out = {Status.ABORTED, Status.PADDING, *([Status.TRUNCATED] if truncated == "mask" else [])}
    rows = track.sample_weights * track.sample_weights.new_tensor([status not in out for status in track.status])
    if drop_zero_advantage:
        assert track.advantages is not None
        rows = rows * (track.advantages != 0)
    valid = token_mask(track.text)
    return TokenWeights(
        counted=torch.where(valid, rows[:, None], 0.0),
        aggregation=aggregation_weights(valid, rows, mode, horizon=horizon),
    )


def old_log_prob_tokens(track: Track, forward: Forward, *, replays: bool, keeps_engine: bool = False) -> Track:
    """Store the old log-probs of a text track: recomputed ones, or the engine's.

    keeps_engine: put the engine's log-probs into `engine_log_probs`, for a loss that needs both.
    Raises BatchError if the engine's are needed and missing.
    """
    segment = track.text
    if segment.log_probs is None and (keeps_engine or not replays):
        raise BatchError(
            f"TextSegment.log_probs: the engine's log-probs are needed, but track {track.name!r} came without "
            "them. Use an engine that returns them, or train.old_log_probs=replay without importance weights."
        )
    if keeps_engine:
        segment = dataclasses.replace(segment, engine_log_probs=segment.log_probs)
    if replays:
        with torch.no_grad():
            old = forward(track).log_probs.detach()
        segment = dataclasses.replace(segment, log_probs=per_sample(old, segment))
    return dataclasses.replace(track, segment=segment)


def text_numbers(track: Track) -> dict[str, float]:
    """Metrics of a whole rollout: mean and maximum number of sampled tokens, and the truncated share."""
    counted = [
        row for row, weight in enumerate(cast("list[float]", cast("Any", track.sample_weights).tolist())) if weight > 0
    ]
    if not counted:
        return {}
    every = track.text.sampled_lengths
    lengths = [every[row] for row in counted]
    stopped = sum(track.status[row] is Status.TRUNCATED for row in counted)
    return {
        "response_length_mean": sum(lengths) / len(counted),
        "response_length_max": float(max(lengths)),
        "truncated_share": stopped / len(counted),
    }
