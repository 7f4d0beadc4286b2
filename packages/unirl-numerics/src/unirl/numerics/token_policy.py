"""What the policy losses over tokens have in common: frozen log-probs, what a token weighs, numbers of a rollout."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.roles import Replay
from unirl.core.track import Status, Track

from .aggregation import Aggregation, AggregationMode, aggregation_weights
from .reduction import LossTerm
from .text_replay import per_sample, token_mask

__all__ = ["TokenWeights", "anchor_tokens", "text_numbers", "token_weights"]


@dataclass(frozen=True, kw_only=True)
class TokenWeights:
    """What the tokens of n rows count, S the longest text of them."""

    counted: Tensor
    """[n, S]: the weight of the row where a token is trained on, else 0; numbers of the log are means by it."""
    aggregation: Aggregation

    @property
    def announced(self) -> Tensor:
        """[n], what `Algorithm.weights` gives of the term."""
        return self.aggregation.normalizer

    def term(self, name: str, values: Tensor, *, scale: float = 1.0) -> LossTerm:
        """values: [n, S] of the tokens; what is not counted may be anything."""
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
    """Weights of the tokens of a text track, without any forward.

    mode, horizon: see `aggregation_weights`.
    truncated: `mask` leaves out texts that a length limit stopped, as ABORTED ones are in any case.
    drop_zero_advantage: leave out rows without signal.
    What is left out counts in no denominator either.
    """
    out = {Status.ABORTED, Status.PADDING, *([Status.TRUNCATED] if truncated == "mask" else [])}
    rows = track.weights * track.weights.new_tensor([status not in out for status in track.status])
    if drop_zero_advantage:
        assert track.advantages is not None
        rows = rows * (track.advantages != 0)
    valid = token_mask(track.text)
    return TokenWeights(
        counted=torch.where(valid, rows[:, None], 0.0),
        aggregation=aggregation_weights(valid, rows, mode, horizon=horizon),
    )


def anchor_tokens(track: Track, replay: Replay, *, replays: bool, keeps_engine: bool = False) -> Track:
    """Freeze the old log-probs of a text track: replayed ones, or those that the engine gave.

    keeps_engine: put the engine's log-probs into `engine_log_probs`, for a loss that needs both.
    Raises BatchError where the engine's are needed and it gave none.
    """
    segment = track.text
    if segment.log_probs is None and (keeps_engine or not replays):
        raise BatchError(
            f"TextSegment.log_probs: the log-probs of the engine were asked for; track {track.name!r} came without "
            "them. Let the engine give them, or replay them without importance weights."
        )
    if keeps_engine:
        segment = dataclasses.replace(segment, engine_log_probs=segment.log_probs)
    if replays:
        with torch.no_grad():
            old = replay(track).log_probs.detach()
        segment = dataclasses.replace(segment, log_probs=per_sample(old, segment))
    return dataclasses.replace(track, segment=segment)


def text_numbers(track: Track) -> dict[str, float]:
    """Numbers of a whole rollout: tokens of a text on average and at most, and the share stopped by a length limit."""
    counted = [row for row in range(track.num_rows) if float(track.weights[row]) > 0]
    if not counted:
        return {}
    every = track.text.lengths
    lengths = [every[row] for row in counted]
    stopped = sum(track.status[row] is Status.TRUNCATED for row in counted)
    return {
        "response_length_mean": sum(lengths) / len(counted),
        "response_length_max": float(max(lengths)),
        "truncated_share": stopped / len(counted),
    }
