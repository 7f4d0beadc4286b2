"""Scoring a track: every reward runs, every value is checked, and the weighted sum becomes the track's reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import RewardFailed, UniRLError
from ..roles import Reward, ScoreInput, Scores
from ..types.array import Array
from ..types.media import Media, MediaKind
from ..types.track import TextSegment

if TYPE_CHECKING:
    from ..types.track import Track

__all__ = ["MediaScore", "combined", "constant_reward", "score", "score_by", "score_input"]


def score_input(track: Track) -> ScoreInput:
    """What rewards see of a track.

    Media are contiguous, as they are after a transfer: a mean over pixels adds in the order of the memory, and is to be
    the same number wherever the sample is scored.
    """
    return ScoreInput(
        sample_ids=track.sample_ids,
        group_ids=track.group_ids,
        inputs=track.inputs,
        metadata=track.metadata,
        media=None if track.media is None else track.media.mapped(lambda array: array.contiguous()),
        status=track.status,
        lengths=track.segment.lengths if isinstance(track.segment, TextSegment) else None,
    )


def score(track: Track, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> Track:
    """The track with `rewards` (weighted sum) and `reward_parts` (each reward, and its components as `name/part`).

    Raises RewardFailed when a reward raises, gives another number of values than samples, or one that is not finite.
    """
    return combined(track, {name: score_by(name, reward, track) for name, reward in rewards.items()}, weights)


def score_by(name: str, reward: Reward, track: Track) -> dict[str, Array]:
    """What one reward says of a track: its values under its name, and its components as `name/part`; each [N] fp32.

    Raises RewardFailed as `score` does.
    """
    scores = _run(name, reward, score_input(track))
    result = {name: scores.values, **{f"{name}/{part}": values for part, values in scores.parts.items()}}
    return {part: _checked(part, values, track).detach().float().cpu() for part, values in result.items()}


@dataclass(frozen=True, kw_only=True)
class MediaScore:
    """The weighted sum of differentiable rewards, where training runs. Implements `unirl.core.roles.GradientScore`."""

    rewards: Mapping[str, Reward]
    weights: Mapping[str, float]
    kind: MediaKind
    """Of the media."""
    rate: float | None = None
    """Frames per second of videos."""

    def __call__(self, track: Track, media: Array) -> Array:
        """Rows of weight 0 are padding: they are not scored and get 0, unless all rows are."""
        counted = track.sample_weights > 0
        if not bool(counted.any()) or bool(counted.all()):
            return self._of_rows(track, media)
        rows = [row for row in range(track.num_rows) if bool(counted[row])]
        scores = self._of_rows(track.select(rows), media[rows])
        return scores.new_zeros(track.num_rows).index_put((counted.to(media.device),), scores)

    def _of_rows(self, track: Track, media: Array) -> Array:
        samples = dataclasses.replace(
            score_input(dataclasses.replace(track, media=None)),
            media=Media(kind=self.kind, values=media.contiguous(), rate=self.rate),
        )
        total: Array | None = None
        for name, reward in self.rewards.items():
            values = _checked(name, _run(name, reward, samples).values, track)
            if media.requires_grad and not values.requires_grad:
                raise RewardFailed(
                    f"reward.{name}: got scores without a gradient, expected scores that depend on the pixels. Its "
                    "spec states `reward-differentiable`; look for a `detach` or `no_grad` in it."
                )
            weighted = values.to(media.device, dtype=media.dtype) * self.weights[name]
            total = weighted if total is None else total + weighted
        assert total is not None, "match() refuses a stage without rewards that count"
        return total


def combined(track: Track, scores: Mapping[str, Mapping[str, Array]], weights: Mapping[str, float]) -> Track:
    """The track with what `score_by` found for each reward: their weighted sum, and all parts.

    Raises RewardFailed when a sum is not finite although every score is: a weight is not, or fp32 overflows.
    """
    total: Array | None = None
    for name, parts in scores.items():
        weighted = parts[name] * weights[name]
        total = weighted if total is None else total + weighted
    if total is not None and (row := _not_finite(total)) is not None:
        terms = " + ".join(f"{weights[name]:g} {name}" for name in scores)
        raise RewardFailed(
            f"reward: the weighted sum {terms} is {float(total[row])} for sample {track.sample_ids[row]!r} "
            f"(prompt {track.inputs.prompts[row]!r}), though every score is finite; check the weights and the scale "
            "of the scores."
        )
    parts = {part: values for result in scores.values() for part, values in result.items()}
    return dataclasses.replace(track, rewards=total, reward_parts=parts)


def constant_reward(track: Track) -> float | None:
    """The one value that every sample got, or None when they differ; a batch like that teaches nothing."""
    assert track.rewards is not None
    counted = track.rewards[track.sample_weights > 0]
    if counted.numel() > 1 and bool((counted == counted[0]).all()):
        return float(counted[0])
    return None


def _run(name: str, reward: Reward, samples: ScoreInput) -> Scores:
    try:
        return reward.score(samples)
    except UniRLError:
        raise
    except (Exception, SystemExit) as error:
        raise RewardFailed(
            f"reward.{name}: raised {type(error).__name__}: {error} on a batch of {len(samples.sample_ids)} samples."
        ) from error


def _checked(name: str, values: Array, track: Track) -> Array:
    if tuple(values.shape) != (track.num_rows,):
        raise RewardFailed(
            f"reward.{name}: gave values of shape {tuple(values.shape)} for {track.num_rows} samples; "
            "a reward gives one number per sample, in their order."
        )
    if (row := _not_finite(values)) is not None:
        raise RewardFailed(
            f"reward.{name}: gave {float(values[row])} for sample {track.sample_ids[row]!r} "
            f"(prompt {track.inputs.prompts[row]!r}). A score must be finite; make the reward raise where it cannot "
            "score."
        )
    return values


def _not_finite(values: Array) -> int | None:
    """The first row that is not finite, if there is one."""
    finite = values.isfinite()
    return None if bool(finite.all()) else int((~finite).nonzero()[0])
